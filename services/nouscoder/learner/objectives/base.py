"""The interface between the trainer and an objective.

An objective gets tensors over the loss tokens of a micro-batch and returns a loss and named diagnostics. There is no
padding: the tensors hold the loss tokens of one rollout after another. The counts of the whole minibatch are arguments,
so that losses and gradients of micro-batches add up to those of the minibatch, however it is divided.

Objectives share one loss, and differ only in the surrogate, the gain of a token.

To be minimised, with the share s_t of each token of the aggregation, the weight w_t of the correction, the penalty kl_t
of the reference policy, the entropy H_t and the coefficients b = reference_kl.coefficient and c = entropy_coefficient:

    L = - sum over tokens of s_t * (w_t * gain_t + c * H_t - b * kl_t)

The shares. With N loss tokens and R rollouts in the minibatch and |o_i| loss tokens in rollout i:

    token_mean      s_t = 1 / N               DAPO, arXiv 2503.14476, equation 12
    sequence_mean   s_t = 1 / (R * |o_i|)     GRPO, arXiv 2402.03300, equation 3
    fixed_divisor   s_t = 1 / (R * D)         Dr. GRPO, arXiv 2503.20783, section 3.2; D = divisor_tokens

The weights correct for the difference between the sampler and the learner. They have no gradient. With k_t = pi_old /
pi_sampler of a token, K_i = product of k_t over rollout i, and G_i = exp(mean of log k_t over rollout i):

    none                w_t = 1
    token               w_t = k_t                        decoupled PPO, AReaL, arXiv 2505.24298, equation 5
    token_truncated     w_t = min(C, k_t)                truncated importance sampling (TIS), Yao et al. 2025,
                                                         "Your Efficient RL Framework Secretly Brings You Off-Policy"
    sequence_truncated  w_t = min(C, K_i)                the same with the weight of the whole rollout
    geometric_truncated w_t = min(C, G_i)                the same with GSPO's ratio of a rollout (arXiv 2507.18071,
                                                         equation 7), as NousCoder-14B's report defines it
    token_masked        w_t = k_t if f <= k_t <= C, else 0   IcePop, Ling team 2025 (f = 0.5, C = 5)
    sequence_masked     w_t = K_i if K_i <= C, else 0    sequence MIS, Liu et al. 2025, "When Speed Kills Stability"

C is correction.cap and f is correction.floor. log k_t, log K_i and log G_i are clipped to +-20.

The penalties estimate KL(pi_theta || pi_ref) for each token, with gradient: J. Schulman, "Approximating KL Divergence",
2020. With d = log pi_ref - log pi_theta of the sampled token:

    k1 = -d        k2 = d^2 / 2        k3 = exp(d) - 1 - d     (k3 is GRPO's, arXiv 2402.03300, equation 4)

The gradient is that of the estimate itself: in expectation over tokens of pi_theta it is 0 for k1, the gradient of
KL(pi_theta || pi_ref) for k2, and that of KL(pi_ref || pi_theta) for k3. d is clipped to +-20 in exp(d).

Most surrogates have PPO's clip, of ratios r of tokens or of rollouts: Schulman et al., arXiv 1707.06347, equation 7,
with a clip of two sides (DAPO, arXiv 2503.14476, equation 10):

    gain = min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

and optionally the dual clip (Ye et al., arXiv 1912.09729): where A < 0, gain = max(gain, c * A).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from nouscoder.config import (
    Aggregation,
    CorrectionKind,
    CorrectionSection,
    EntropySection,
    KlEstimator,
    LearnerSection,
    ObjectiveSettings,
    ReferenceKlSection,
)


@dataclass(frozen=True, slots=True)
class Needs:
    """The optional inputs of an objective. The trainer computes only those that are needed.

    reference_logprobs: log-probabilities under the reference policy. entropy_gradient: entropies with gradient.
    batch_entropy: the entropy of the whole batch before its first step, which controls `entropy_coefficient`.
    """

    reference_logprobs: bool = False
    entropy_gradient: bool = False
    batch_entropy: bool = False


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The loss tokens of one or more rollouts. Every rollout is whole.

    logprobs [tokens] of the policy in training, with gradient. old_logprobs [tokens] of the policy at the start of the
    batch. sampler_logprobs [tokens] as recorded when the tokens were sampled. advantages [tokens]. rollout_of_token
    [tokens]: the number of each token's rollout in this micro-batch, ascending. entropies [tokens] of the policy in
    training, in nats, with gradient if the objective needs it. accepted [tokens]: whether every test passed.
    reference_logprobs [tokens] of the reference policy (the initial one, or the teacher), None if the objective does
    not need them. entropy_coefficient: the weight of the entropy bonus in this step. num_versions [tokens]: how many
    policy versions sampled the rollout, and is_fresh [tokens]: whether the rollout is of the policy at the start of the
    batch alone; None when that is not measured.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    rollout_of_token: Tensor
    entropies: Tensor
    accepted: Tensor
    reference_logprobs: Tensor | None = None
    entropy_coefficient: float = 0.0
    num_versions: Tensor | None = None
    is_fresh: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MinibatchCounts:
    """The numbers of loss tokens, of rollouts, and of loss tokens of accepted rollouts, of the whole minibatch."""

    num_tokens: int
    num_rollouts: int
    num_accepted_tokens: int


class Reduction(StrEnum):
    """How the values of a diagnostic are reduced to one figure of the minibatch."""

    MEAN = "mean"
    MIN = "min"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """`values` [tokens], without gradient, to be reduced over the loss tokens of the minibatch."""

    values: Tensor
    reduction: Reduction = Reduction.MEAN


@dataclass(frozen=True, slots=True)
class ObjectiveTerms:
    """The results of an objective for a micro-batch.

    loss [] is this micro-batch's share of the minibatch's loss. `diagnostics` are by name; each name becomes a field of
    metrics.jsonl and a label of the metric learner_diagnostic.
    """

    loss: Tensor
    diagnostics: Mapping[str, Diagnostic] = field(default_factory=dict)


class Objective(Protocol):
    """A loss to minimise. It has settings but no state, and does not depend on the model."""

    @property
    def needs(self) -> Needs:
        """The optional inputs that the trainer must compute."""

    def __call__(self, inputs: LossInputs, counts: MinibatchCounts) -> ObjectiveTerms:
        """The terms of one micro-batch."""


# Importance ratios from log-probabilities, by token and by rollout.

# exp(20) is 4.9e8, far above any clip. Its products with advantages are finite in float32.
MAX_LOG_RATIO = 20.0


def bounded_exp(log_ratios: Tensor) -> Tensor:
    """exp of log-ratios, which are clipped to +-MAX_LOG_RATIO. Beyond it the gradient is 0."""
    return torch.exp(torch.clamp(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def bounded_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """exp(numerator - denominator) of log-probabilities [tokens], bounded as `bounded_exp`."""
    return bounded_exp(numerator - denominator)


def sums_of_rollouts(values: Tensor, rollout_of_token: Tensor) -> Tensor:
    """The sum of `values` [tokens] over each token's rollout, repeated for each token, [tokens]."""
    if not values.numel():
        return values
    sums = values.new_zeros(int(rollout_of_token[-1]) + 1).index_add(0, rollout_of_token, values)
    return sums[rollout_of_token]


def lengths_of_rollouts(values: Tensor, rollout_of_token: Tensor) -> Tensor:
    """|o_i|: the number of loss tokens of each token's rollout, [tokens], in the type of `values`."""
    return sums_of_rollouts(torch.ones_like(values), rollout_of_token).detach()


def means_of_rollouts(values: Tensor, rollout_of_token: Tensor) -> Tensor:
    """The mean of `values` [tokens] over each token's rollout, repeated for each token, [tokens]."""
    return sums_of_rollouts(values, rollout_of_token) / lengths_of_rollouts(values, rollout_of_token)


# PPO's clip.

# Diagnostics that say which tokens lost their gradient to a clip, or kept it with a bounded factor.
_CLIPS = ("clip_fraction_", "bounded_fraction_")


@dataclass(frozen=True, slots=True)
class Surrogate:
    """gains [tokens], to be maximised, with gradient; diagnostics by name, over tokens."""

    gains: Tensor
    diagnostics: dict[str, Diagnostic]


@dataclass(frozen=True, slots=True)
class Outside:
    """The tokens on which the clip acts, [tokens]: below with a negative, above with a positive advantage."""

    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, ratios: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Outside:
        """The tokens outside of 1 - clip_low .. 1 + clip_high on the side to which their gain pulls."""
        fixed = ratios.detach()
        return cls((fixed < 1.0 - clip_low) & (advantages < 0), (fixed > 1.0 + clip_high) & (advantages > 0))

    def diagnostics(self, name: str) -> dict[str, Diagnostic]:
        """The shares of these tokens, as `name`_low and `name`_high."""
        return {f"{name}_low": Diagnostic(self.low), f"{name}_high": Diagnostic(self.high)}


def clipped(ratios: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0) -> Surrogate:
    """The surrogate of `ratios` [tokens]. The diagnostics are shares of tokens whose gradient a clip removed.

    clip_fraction_low, clip_fraction_high: the clip at that side. clip_fraction_dual: the dual clip, when it is on.
    """
    outside = Outside.of(ratios, advantages, clip_low, clip_high)
    gains = torch.minimum(ratios * advantages, ratios.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)
    diagnostics = outside.diagnostics("clip_fraction")
    if dual_clip:
        gains = dual_clipped(gains, ratios, advantages, dual_clip, diagnostics)
    return Surrogate(gains, diagnostics)


def dual_clipped(
    gains: Tensor, ratios: Tensor, advantages: Tensor, limit: float, diagnostics: dict[str, Diagnostic]
) -> Tensor:
    """`gains` [tokens] with the dual clip; it notes its share of the tokens in `diagnostics`."""
    too_low = (advantages < 0) & (ratios.detach() > limit)
    diagnostics["clip_fraction_dual"] = Diagnostic(too_low)
    return torch.where(too_low, limit * advantages, gains)


def clipped_tokens(inputs: LossInputs, diagnostics: Mapping[str, Diagnostic]) -> Tensor:
    """Whether the clip of the objective with these diagnostics acts on each token, [tokens]."""
    acts = torch.zeros_like(inputs.accepted)
    for name, diagnostic in diagnostics.items():
        if name.startswith(_CLIPS):
            acts = acts | diagnostic.values.bool()
    return acts


# The shares of tokens.


def shares_of_tokens(settings: ObjectiveSettings, inputs: LossInputs, counts: MinibatchCounts) -> Tensor:
    """The share of each token in the loss, [tokens], without gradient."""
    ones = torch.ones_like(inputs.old_logprobs)
    if settings.aggregation is Aggregation.TOKEN_MEAN:
        return ones / counts.num_tokens
    if settings.aggregation is Aggregation.SEQUENCE_MEAN:
        return ones / (counts.num_rollouts * lengths_of_rollouts(ones, inputs.rollout_of_token))
    return ones / (counts.num_rollouts * settings.divisor_tokens)


# The weights of the correction.

_OF_SEQUENCE = (CorrectionKind.SEQUENCE_TRUNCATED, CorrectionKind.SEQUENCE_MASKED)
_MASKED = (CorrectionKind.TOKEN_MASKED, CorrectionKind.SEQUENCE_MASKED)


@torch.no_grad()
def correction_of(settings: CorrectionSection, inputs: LossInputs) -> tuple[Tensor, dict[str, Diagnostic]]:
    """(weights [tokens] outside the clip, diagnostics): mismatch_truncated or mismatch_masked, a share of tokens."""
    if settings.kind is CorrectionKind.NONE:
        return torch.ones_like(inputs.old_logprobs), {}
    log_ratios = inputs.old_logprobs - inputs.sampler_logprobs
    if settings.kind in _OF_SEQUENCE:
        log_ratios = sums_of_rollouts(log_ratios, inputs.rollout_of_token)
    elif settings.kind is CorrectionKind.GEOMETRIC_TRUNCATED:
        log_ratios = means_of_rollouts(log_ratios, inputs.rollout_of_token)
    ratios = bounded_exp(log_ratios)
    if settings.kind is CorrectionKind.TOKEN:
        return ratios, {}
    if settings.kind in _MASKED:
        outside = (ratios > settings.cap) | (ratios < settings.floor)
        return ratios.masked_fill(outside, 0.0), {"mismatch_masked": Diagnostic(outside)}
    return ratios.clamp(max=settings.cap), {"mismatch_truncated": Diagnostic(ratios > settings.cap)}


# The penalty of the reference policy.


def reference_kl(estimator: KlEstimator, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """The estimate for each token, [tokens]."""
    difference = reference_logprobs - logprobs
    if estimator is KlEstimator.K1:
        return -difference
    if estimator is KlEstimator.K2:
        return difference**2 / 2
    return bounded_exp(difference) - 1 - difference


# The loss.

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

    Diagnostics besides those of the surrogate: mismatch_truncated or mismatch_masked, see the corrections above;
    reference_kl and entropy_coefficient, when these terms are on.
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
        weights, of_correction = correction_of(self.shared.correction, inputs)
        values = weights * surrogate.gains
        diagnostics = {**surrogate.diagnostics, **of_correction}
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
