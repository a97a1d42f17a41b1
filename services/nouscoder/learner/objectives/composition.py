"""The loss that all objectives share. They differ only in the surrogate.

To be minimised, with the share s_t of each token (aggregation.py), the weight w_t (correction.py), the penalty kl_t
(reference_kl.py), the entropy H_t and the coefficients b = reference_kl.coefficient and c = entropy_coefficient:

    L = - sum over tokens of s_t * (w_t * gain_t + c * H_t - b * kl_t)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, Self, TypeVar

import torch

from nouscoder.config import CorrectionSection, EntropySection, LearnerSection, ObjectiveSettings, ReferenceKlSection
from nouscoder.learner.objectives.aggregation import shares_of_tokens
from nouscoder.learner.objectives.base import Diagnostic, LossInputs, MinibatchCounts, Needs, ObjectiveTerms
from nouscoder.learner.objectives.clip import Surrogate
from nouscoder.learner.objectives.correction import correction_of
from nouscoder.learner.objectives.reference_kl import reference_kl

Settings = TypeVar("Settings", bound=ObjectiveSettings, covariant=True)


@dataclass(frozen=True, slots=True)
class SharedTerms:
    """The settings of the terms that every objective shares."""

    correction: CorrectionSection = CorrectionSection()
    reference_kl: ReferenceKlSection = ReferenceKlSection()
    entropy: EntropySection = EntropySection()

    @classmethod
    def of(cls, section: LearnerSection) -> Self:
        """Those of the learner's section."""
        return cls(section.correction, section.reference_kl, section.entropy)


@dataclass(frozen=True, slots=True)
class SurrogateObjective(ABC, Generic[Settings]):
    """An objective that differs from others in its surrogate only.

    Diagnostics besides those of the surrogate: mismatch_truncated or mismatch_masked, see correction.py; reference_kl
    and entropy_coefficient, when these terms are on.
    """

    has_teacher: ClassVar[bool] = False
    settings: Settings
    shared: SharedTerms = SharedTerms()

    @abstractmethod
    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The gains [tokens] to be maximised, before correction and aggregation."""

    @property
    def needs(self) -> Needs:
        """Reference log-probabilities for the KL and for a teacher, entropies with gradient for the bonus."""
        entropy = self.shared.entropy
        return Needs(
            reference_logprobs=self.has_teacher or self.shared.reference_kl.coefficient > 0,
            entropy_gradient=entropy.coefficient > 0 or entropy.target > 0,
            batch_entropy=entropy.target > 0,
        )

    def __call__(self, inputs: LossInputs, counts: MinibatchCounts) -> ObjectiveTerms:
        """The terms of one micro-batch. Raises ValueError when reference log-probabilities are missing."""
        surrogate = self.surrogate(inputs)
        correction = correction_of(self.shared.correction, inputs)
        values = correction.weights * surrogate.gains
        diagnostics = {**surrogate.diagnostics, **correction.diagnostics}
        if self.needs.entropy_gradient:
            values = values + inputs.entropy_coefficient * inputs.entropies
            coefficients = torch.full_like(inputs.old_logprobs, inputs.entropy_coefficient)
            diagnostics["entropy_coefficient"] = Diagnostic(coefficients)
        if self.shared.reference_kl.coefficient > 0:
            if inputs.reference_logprobs is None:
                raise ValueError("the KL to the reference policy needs its log-probabilities")
            penalty = reference_kl(self.shared.reference_kl.estimator, inputs.logprobs, inputs.reference_logprobs)
            values = values - self.shared.reference_kl.coefficient * penalty
            diagnostics["reference_kl"] = Diagnostic(penalty.detach())
        shares = shares_of_tokens(self.settings, inputs, counts)
        return ObjectiveTerms(loss=-(shares * values).sum(), diagnostics=diagnostics)
