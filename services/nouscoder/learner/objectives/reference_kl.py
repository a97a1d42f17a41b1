"""Estimates of KL(pi_theta || pi_ref) for each token, as penalties with gradient.

J. Schulman, "Approximating KL Divergence", 2020. With d = log pi_ref - log pi_theta of the sampled token:

    k1 = -d        k2 = d^2 / 2        k3 = exp(d) - 1 - d     (k3 is GRPO's, arXiv 2402.03300, equation 4)

The gradient is that of the estimate itself: in expectation over tokens of pi_theta it is 0 for k1, the gradient of
KL(pi_theta || pi_ref) for k2, and that of KL(pi_ref || pi_theta) for k3. d is clipped to +-20 in exp(d).
"""

from __future__ import annotations

from torch import Tensor

from nouscoder.config import KlEstimator
from nouscoder.learner.objectives.ratios import bounded_exp


def reference_kl(estimator: KlEstimator, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """The estimate for each token, [tokens]."""
    difference = reference_logprobs - logprobs
    if estimator is KlEstimator.K1:
        return -difference
    if estimator is KlEstimator.K2:
        return difference**2 / 2
    return bounded_exp(difference) - 1 - difference
