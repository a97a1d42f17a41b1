"""The loss that all objectives share. They differ only in the surrogate, the gain of a token.

To be minimised, with the share s_t of each token of the aggregation, the weight w_t of the correction, the penalty kl_t
of the reference policy, the entropy H_t and the coefficients b = reference_kl.coefficient and c = entropy_coefficient:

    L = - sum over tokens of s_t * (w_t * gain_t + c * H_t - b * kl_t)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from nouscoder.objectives.aggregation import AggregatedSection
from nouscoder.objectives.base import Diagnostic, LossInputs, MinibatchCounts, Needs, ObjectiveTerms, Surrogate
from nouscoder.objectives.correction import CorrectionSection
from nouscoder.objectives.entropy import EntropySection
from nouscoder.objectives.reference_kl import ReferenceKlSection

if TYPE_CHECKING:
    from nouscoder.objectives.base import Tensor

NAME = "the objective; docs/recipes.md has the keys and defaults of each"  # the description of the key `name`


class ObjectiveSection(AggregatedSection):
    """The base of every objective: its settings, and its surrogate."""

    needs_reference: ClassVar[bool] = False  # the surrogate reads reference_logprobs

    @abstractmethod
    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The gains [tokens] to be maximised, before correction and aggregation."""

    def with_own_terms(self, loss: Tensor, inputs: LossInputs, counts: MinibatchCounts) -> Tensor:
        """The loss [] of a micro-batch with the terms that only this objective has."""
        return loss

    @classmethod
    def published(cls) -> Mapping[str, Self]:
        """The published configurations by name: the defaults, and variants where there are some."""
        return {cls.model_fields["name"].default: cls()}


@dataclass(frozen=True, slots=True)
class SharedTerms:
    """The settings of the terms that every objective shares."""

    correction: CorrectionSection = CorrectionSection()
    reference_kl: ReferenceKlSection = ReferenceKlSection()
    entropy: EntropySection = EntropySection()


@dataclass(frozen=True, slots=True)
class SurrogateLoss:
    """The loss of an objective with the shared terms.

    Diagnostics besides those of the surrogate and of the correction: reference_kl and entropy_coefficient, when these
    terms are on.
    """

    objective: ObjectiveSection
    shared: SharedTerms = SharedTerms()

    @property
    def needs(self) -> Needs:
        """Reference log-probabilities for the KL and for a teacher, entropies with gradient for the bonus."""
        entropy = self.shared.entropy
        return Needs(
            reference_logprobs=self.objective.needs_reference or self.shared.reference_kl.coefficient > 0,
            entropy_gradient=entropy.coefficient > 0 or entropy.target > 0,
            batch_entropy=entropy.target > 0,
        )

    def __call__(self, inputs: LossInputs, counts: MinibatchCounts) -> ObjectiveTerms:
        """The terms of one micro-batch. Raises ValueError when reference log-probabilities are missing."""
        surrogate = self.objective.surrogate(inputs)
        weights, of_correction = self.shared.correction.weights(inputs)
        values = weights * surrogate.gains
        diagnostics = {**surrogate.diagnostics, **of_correction}
        if self.needs.entropy_gradient:
            values = values + inputs.entropy_coefficient * inputs.entropies
            coefficients = inputs.old_logprobs.new_full(inputs.old_logprobs.shape, inputs.entropy_coefficient)
            diagnostics["entropy_coefficient"] = Diagnostic(coefficients)
        if self.shared.reference_kl.coefficient > 0:
            if inputs.reference_logprobs is None:
                raise ValueError("the KL to the reference policy needs its log-probabilities")
            penalty = self.shared.reference_kl.estimates(inputs.logprobs, inputs.reference_logprobs)
            values = values - self.shared.reference_kl.coefficient * penalty
            diagnostics["reference_kl"] = Diagnostic(penalty.detach())
        loss = -(self.objective.shares(inputs, counts) * values).sum()
        return ObjectiveTerms(self.objective.with_own_terms(loss, inputs, counts), diagnostics)
