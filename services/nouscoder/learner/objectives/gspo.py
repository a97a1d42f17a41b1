"""GSPO: one importance ratio for each rollout, and GSPO+.

Zheng et al., "Group Sequence Policy Optimization", arXiv 2507.18071, equations 5 and 7. With |o_i| the loss tokens of
rollout i and R the rollouts of the minibatch, to be maximised:

    s_i = exp(1/|o_i| * sum over tokens of log(pi_theta / pi_old))
    1/R * sum over rollouts i of  min(s_i * A_i, clip(s_i, 1 - clip_low, 1 + clip_high) * A_i)

The gain of a rollout is repeated for each of its tokens, so that the mean over its tokens (aggregation sequence_mean)
is the gain itself. GSPO+ (NousCoder-14B) weights rollouts by length, which is the mean over all tokens (aggregation
token_mean):

    sum over rollouts of |o_i| * min(s_i * A_i, clip(...) * A_i) / sum over rollouts of |o_i|
"""

from __future__ import annotations

from dataclasses import dataclass

from nouscoder.config import GspoSettings
from nouscoder.learner.objectives.base import LossInputs, bounded_exp, means_of_rollouts
from nouscoder.learner.objectives.clip import Surrogate, clipped
from nouscoder.learner.objectives.composition import SurrogateObjective


@dataclass(frozen=True, slots=True)
class Gspo(SurrogateObjective[GspoSettings]):
    """The GSPO objective. Diagnostics: clip_fraction_low, clip_fraction_high (clip.py), as shares of tokens."""

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The clipped gain of each token's rollout, [tokens]."""
        log_ratios = means_of_rollouts(inputs.logprobs - inputs.old_logprobs, inputs.rollout_of_token)
        return clipped(
            bounded_exp(log_ratios),
            inputs.advantages,
            clip_low=self.settings.clip_low,
            clip_high=self.settings.clip_high,
        )
