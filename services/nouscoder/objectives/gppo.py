"""GPPO: the clip bounds the gradient of a token and does not remove it; plus the NLL of accepted rollouts.

Su et al., "Klear-Reasoner", arXiv 2508.07629. With d = pi_theta / pi_old, A the token's advantage and sg =
stop-gradient, the gain of a token is

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

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from nouscoder.objectives.base import LossInputs, MinibatchCounts, Surrogate, bounded_ratio
from nouscoder.objectives.clip import ClippedObjective, Outside, clip_high_key, dual_clipped
from nouscoder.objectives.loss import NAME

if TYPE_CHECKING:
    from nouscoder.objectives.base import Tensor


class Gppo(ClippedObjective):
    """GPPO (Klear-Reasoner): clipped tokens keep a bounded gradient; plus the NLL of accepted rollouts."""

    name: Literal["gppo"] = Field("gppo", description=NAME)
    clip_high: float = clip_high_key(0.28)
    beta_low: float = Field(1.0, ge=0, description="b1: factor on tokens below the clip with a negative advantage")
    beta_high: float = Field(1.0, ge=0, description="b2: factor on tokens above the clip with a positive advantage")
    positive_nll: float = Field(0.1, ge=0, description="alpha: weight of the NLL of accepted rollouts; 0: none")

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The gain of each token, [tokens].

        Diagnostics: bounded_fraction_low, bounded_fraction_high (tokens with a bounded gradient), clip_fraction_dual.
        """
        ratios = bounded_ratio(inputs.logprobs, inputs.old_logprobs)
        outside = Outside.of(ratios, inputs.advantages, self.clip_low, self.clip_high)
        unit = (inputs.logprobs - inputs.logprobs.detach()).exp()  # d / sg(d): 1, with the gradient of log pi_theta
        low, high = self.beta_low * (1.0 - self.clip_low), self.beta_high * (1.0 + self.clip_high)
        factors = (low * unit).where(outside.low, (high * unit).where(outside.high, ratios))
        gains = factors * inputs.advantages
        diagnostics = outside.diagnostics("bounded_fraction")
        if self.dual_clip:
            gains = dual_clipped(gains, ratios, inputs.advantages, self.dual_clip, diagnostics)
        return Surrogate(gains, diagnostics)

    def with_own_terms(self, loss: Tensor, inputs: LossInputs, counts: MinibatchCounts) -> Tensor:
        """The loss with the NLL of accepted rollouts, []."""
        if not self.positive_nll or not counts.num_accepted_tokens:
            return loss
        nll = -inputs.logprobs.where(inputs.accepted, 0.0).sum() / counts.num_accepted_tokens
        return loss + self.positive_nll * nll
