"""The penalty for the distance from the reference policy: estimates of KL(pi_theta || pi_ref) for each token.

They have a gradient. Source: J. Schulman, "Approximating KL Divergence", 2020. With d = log pi_ref - log pi_theta of
the sampled token:

    k1 = -d        k2 = d^2 / 2        k3 = exp(d) - 1 - d     (k3 is GRPO's, arXiv 2402.03300, equation 4)

The gradient is that of the estimate itself: in expectation over tokens of pi_theta it is 0 for k1, the gradient of
KL(pi_theta || pi_ref) for k2, and that of KL(pi_ref || pi_theta) for k3. d is clipped to +-20 in exp(d).
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from pydantic import Field

from nouscoder.objectives.base import bounded_exp
from nouscoder.sections import Section

if TYPE_CHECKING:
    from nouscoder.objectives.base import Tensor


class KlEstimator(StrEnum):
    """The kinds of estimates."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class ReferenceKlSection(Section):
    """A penalty for the distance from the initial policy."""

    coefficient: float = Field(0.0, ge=0, description="weight of the KL to the initial policy in the loss; 0: none")
    estimator: KlEstimator = Field(KlEstimator.K3, description="k1, k2 or k3 of Schulman's estimators")

    def estimates(self, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
        """The estimate for each token, [tokens]."""
        difference = reference_logprobs - logprobs
        if self.estimator is KlEstimator.K1:
            return -difference
        if self.estimator is KlEstimator.K2:
            return difference**2 / 2
        return bounded_exp(difference) - 1 - difference
