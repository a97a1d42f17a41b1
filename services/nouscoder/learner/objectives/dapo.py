"""DAPO: token-level policy gradient with a decoupled clip, corrected for the sampler by truncated importance sampling.

Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", arXiv 2503.14476: the objective is
equation 8, its ratio and advantage equation 9, the decoupled clip equation 10 and the token-level mean equation 12.
Equations 9 and 11 (group advantages, dynamic sampling) are done before: see advantage.py and the broker. With
r = pi_theta / pi_old, A the rollout's advantage and N the loss tokens of the minibatch, to be minimised:

    L = -1/N * sum over tokens of  w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)
    w = stop_gradient(min(C, pi_old / pi_sampler))

w stands outside the clip. Overlong rollouts come with advantage 0 (NousCoder's overlong filtering): they add nothing
to the sum, but their tokens do count in N.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nouscoder.learner.objectives.base import (
    LossInputs,
    MinibatchCounts,
    ObjectiveTerms,
    bounded_ratio,
    truncated_importance_weights,
)


@dataclass(frozen=True, slots=True)
class Dapo:
    """Defaults are the published values; `tis_cap` is C."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    tis_cap: float = 2.0

    def __call__(self, inputs: LossInputs, counts: MinibatchCounts) -> ObjectiveTerms:
        """The terms of one micro-batch."""
        advantages = inputs.advantages[inputs.rollout_of_token]
        ratios = bounded_ratio(inputs.logprobs, inputs.old_logprobs)
        clipped_ratios = ratios.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        weights = truncated_importance_weights(inputs.old_logprobs, inputs.sampler_logprobs, self.tis_cap)
        gains = weights * torch.minimum(ratios * advantages, clipped_ratios * advantages)
        detached = ratios.detach()
        return ObjectiveTerms(
            loss=-gains.sum() / counts.num_tokens,
            ratios=detached,
            clipped_low=(detached < 1.0 - self.clip_low) & (advantages < 0),
            clipped_high=(detached > 1.0 + self.clip_high) & (advantages > 0),
        )
