"""GPPO: the clip bounds the gradient of a token and does not remove it; plus the NLL of accepted rollouts.

Su et al., "Klear-Reasoner", arXiv 2508.07629. With d = pi_theta / pi_old and sg = stop-gradient, the gain of a token is

    b1 * (1 - clip_low)  / sg(d) * d * A     where A < 0 and d < 1 - clip_low
    b2 * (1 + clip_high) / sg(d) * d * A     where A > 0 and d > 1 + clip_high
    d * A                                    elsewhere

and its mean over the tokens of the minibatch is maximised. With dual_clip = c > 1 the gain is c * A, without gradient,
where A < 0 and d > c. The paper has no dual clip; the authors' scripts have c = 10 (Kwai-Klear/KlearReasoner,
compute_gppo_loss_general_beta in verl/trainer/ppo/core_algos.py and recipe/dapo/perf_run_dapo_ours_code.sh).

The loss also has alpha times the NLL of the rollouts whose tests all pass: -1/N+ * sum over their tokens of log
pi_theta, with N+ their loss tokens in the minibatch (0 if none).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from nouscoder.config import GppoSettings
from nouscoder.learner.objectives.base import Diagnostic, LossInputs, MinibatchCounts, ObjectiveTerms, bounded_ratio
from nouscoder.learner.objectives.clip import Outside, Surrogate, dual_clipped
from nouscoder.learner.objectives.composition import SurrogateObjective


@dataclass(frozen=True, slots=True)
class Gppo(SurrogateObjective[GppoSettings]):
    """The GPPO objective. bounded_fraction_low, bounded_fraction_high: share of tokens with a bounded gradient.

    clip_fraction_dual: share of tokens whose gradient the dual clip removed, when it is on.
    """

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The gain of each token, [tokens]."""
        settings, advantages = self.settings, inputs.advantages
        ratios = bounded_ratio(inputs.logprobs, inputs.old_logprobs)
        outside = Outside.of(ratios, advantages, settings.clip_low, settings.clip_high)
        unit = torch.exp(inputs.logprobs - inputs.logprobs.detach())  # d / sg(d): 1, with the gradient of log pi_theta
        low, high = settings.beta_low * (1.0 - settings.clip_low), settings.beta_high * (1.0 + settings.clip_high)
        factors = torch.where(outside.low, low * unit, torch.where(outside.high, high * unit, ratios))
        gains = factors * advantages
        diagnostics = {
            "bounded_fraction_low": Diagnostic(outside.low),
            "bounded_fraction_high": Diagnostic(outside.high),
        }
        if settings.dual_clip:
            gains = dual_clipped(gains, ratios, advantages, settings.dual_clip, diagnostics)
        return Surrogate(gains, diagnostics)

    def __call__(self, inputs: LossInputs, counts: MinibatchCounts) -> ObjectiveTerms:
        """The terms of one micro-batch, with the NLL of accepted rollouts."""
        terms = SurrogateObjective.__call__(self, inputs, counts)
        if not self.settings.positive_nll or not counts.num_accepted_tokens:
            return terms
        nll = -torch.where(inputs.accepted, inputs.logprobs, 0.0).sum() / counts.num_accepted_tokens
        return replace(terms, loss=terms.loss + self.settings.positive_nll * nll)
