"""On-policy distillation: the policy learns from a teacher's log-probabilities of the policy's own tokens.

The teacher takes the place of the reference policy. K. Lu and Thinking Machines Lab, "On-Policy Distillation", 2025:
the reverse KL of each token takes the place of the advantage. Agarwal et al., "On-Policy Distillation of Language
Models" (GKD), arXiv 2306.13649: divergence on the student's own samples, here the reverse KL. To be maximised, with r =
pi_theta / pi_old and N loss tokens in the minibatch:

    1/N * sum over tokens of  r * (log pi_teacher - log pi_old + reward_weight * A)

At pi_theta = pi_old its gradient is, in expectation over tokens of the policy, that of -KL(pi_theta || pi_teacher) of
the next token at each position. The effect of a token on later ones is left out, as in both papers. A is the advantage
of the verdicts, with weight 0 by default: then verdicts do not matter, and broker.drop_zero_variance should be false.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field

from nouscoder.objectives.base import Diagnostic, LossInputs, Surrogate, bounded_ratio
from nouscoder.objectives.loss import NAME, ObjectiveSection
from nouscoder.sections import InputFile


class Distillation(ObjectiveSection):
    """On-policy distillation: the reverse KL to a teacher takes the place of the advantage."""

    needs_reference: ClassVar[bool] = True
    name: Literal["distillation"] = Field("distillation", description=NAME)
    teacher: InputFile = Field(
        description="for distillation: the teacher's Hugging Face folder, with the same tokenizer"
    )
    reward_weight: float = Field(
        0.0, ge=0, description="for distillation: weight of the advantage of verdicts beside the teacher; 0: none"
    )

    @classmethod
    def published(cls) -> Mapping[str, Self]:
        """None without a teacher."""
        return {}

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The gain of each token, [tokens]. Raises ValueError without the teacher's log-probabilities.

        Diagnostic reverse_kl: log pi_old - log pi_teacher, whose mean estimates KL(pi_old || pi_teacher) of a token.
        """
        if inputs.reference_logprobs is None:
            raise ValueError("distillation needs the log-probabilities of the teacher")
        reverse_kl = inputs.old_logprobs - inputs.reference_logprobs
        advantages = self.reward_weight * inputs.advantages - reverse_kl
        ratios = bounded_ratio(inputs.logprobs, inputs.old_logprobs)
        return Surrogate(ratios * advantages, {"reverse_kl": Diagnostic(reverse_kl)})
