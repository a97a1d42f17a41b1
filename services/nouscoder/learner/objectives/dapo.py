"""DAPO: token-level policy gradient with a decoupled clip, corrected for the sampler by truncated importance sampling.

Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", arXiv 2503.14476: the objective is
equation 8, its ratio and advantage equation 9, the decoupled clip equation 10 and the token-level mean equation 12.
Group advantages (equation 9) and dynamic sampling (equation 11) are computed before: see domain/advantage.py and the
broker. With r = pi_theta / pi_old, A the token's advantage and N the loss tokens of the minibatch, to be minimised:

    L = -1/N * sum over tokens of  w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)
    w = stop_gradient(min(C, pi_old / pi_sampler))

w is outside the clip. The tokens of overlong rollouts have advantage 0 (NousCoder's overlong filtering): they add
nothing to the sum, but they count in N.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nouscoder.config import DapoSettings
from nouscoder.learner.objectives.base import (
    Diagnostic,
    LossInputs,
    MinibatchCounts,
    Needs,
    ObjectiveTerms,
    bounded_ratio,
    truncated_importance_weights,
)


@dataclass(frozen=True, slots=True)
class Dapo:
    """The DAPO objective. Its diagnostics are shares of the loss tokens.

    clip_fraction_low, clip_fraction_high: the clip at that side removed the gradient. mismatch_truncated:
    pi_old / pi_sampler is above C.
    """

    settings: DapoSettings = DapoSettings()
    needs: Needs = Needs()

    def __call__(self, inputs: LossInputs, counts: MinibatchCounts) -> ObjectiveTerms:
        """The terms of one micro-batch."""
        low, high, cap = 1.0 - self.settings.clip_low, 1.0 + self.settings.clip_high, self.settings.tis_cap
        advantages = inputs.advantages
        ratios = bounded_ratio(inputs.logprobs, inputs.old_logprobs)
        weights = truncated_importance_weights(inputs.old_logprobs, inputs.sampler_logprobs, cap)
        gains = weights * torch.minimum(ratios * advantages, ratios.clamp(low, high) * advantages)
        detached = ratios.detach()
        mismatch = bounded_ratio(inputs.old_logprobs, inputs.sampler_logprobs).detach()
        return ObjectiveTerms(
            loss=-gains.sum() / counts.num_tokens,
            diagnostics={
                "clip_fraction_low": Diagnostic((detached < low) & (advantages < 0)),
                "clip_fraction_high": Diagnostic((detached > high) & (advantages > 0)),
                "mismatch_truncated": Diagnostic(mismatch > cap),
            },
        )
