"""On-policy distillation: the policy learns from the log-probabilities that a teacher gives to the policy's own tokens.

K. Lu and Thinking Machines Lab, "On-Policy Distillation", 2025: the reverse KL of each token takes the place of the
advantage. Agarwal et al., "On-Policy Distillation of Language Models" (GKD), arXiv 2306.13649: divergence on the
student's own samples, here the reverse KL. With r = pi_theta / pi_old and N the loss tokens of the minibatch, to be
maximised:

    1/N * sum over tokens of  r * (log pi_teacher - log pi_old + reward_weight * A)

At pi_theta = pi_old its gradient is, in expectation over tokens of the policy, that of -KL(pi_theta || pi_teacher) of
the next token at each position. The effect of a token on later ones is left out, as in both papers. A is the advantage
of the verdicts, with weight 0 by default: then verdicts do not matter, and broker.drop_zero_variance should be false.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nouscoder.config import DistillationSettings
from nouscoder.learner.objectives.base import Diagnostic, LossInputs, bounded_ratio
from nouscoder.learner.objectives.clip import Surrogate
from nouscoder.learner.objectives.composition import SurrogateObjective


@dataclass(frozen=True, slots=True)
class OnPolicyDistillation(SurrogateObjective[DistillationSettings]):
    """The objective. Its reference policy is the teacher.

    Diagnostic reverse_kl: log pi_old - log pi_teacher, whose mean estimates KL(pi_old || pi_teacher) of a token.
    """

    has_teacher: ClassVar[bool] = True

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The gain of each token, [tokens]. Raises ValueError without the teacher's log-probabilities."""
        if inputs.reference_logprobs is None:
            raise ValueError("distillation needs the log-probabilities of the teacher")
        reverse_kl = inputs.old_logprobs - inputs.reference_logprobs
        advantages = self.settings.reward_weight * inputs.advantages - reverse_kl
        ratios = bounded_ratio(inputs.logprobs, inputs.old_logprobs)
        return Surrogate(ratios * advantages, {"reverse_kl": Diagnostic(reverse_kl)})
