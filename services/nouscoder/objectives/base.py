"""What an objective gets and returns, and importance ratios.

An objective gets tensors over the loss tokens of a micro-batch and returns a loss and named diagnostics. There is no
padding: the tensors hold the loss tokens of one rollout after another. The counts of the whole minibatch are arguments,
so that losses and gradients of micro-batches add up to those of the minibatch, however it is divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor as Tensor


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
class Surrogate:
    """gains [tokens], to be maximised, with gradient; diagnostics by name, over tokens."""

    gains: Tensor
    diagnostics: dict[str, Diagnostic]


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


# exp(20) is 4.9e8, far above any clip. Its products with advantages are finite in float32.
MAX_LOG_RATIO = 20.0


def bounded_exp(log_ratios: Tensor) -> Tensor:
    """exp of log-ratios, which are clipped to +-MAX_LOG_RATIO. Beyond it the gradient is 0."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


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
    return sums_of_rollouts(values.new_ones(values.shape), rollout_of_token)


def means_of_rollouts(values: Tensor, rollout_of_token: Tensor) -> Tensor:
    """The mean of `values` [tokens] over each token's rollout, repeated for each token, [tokens]."""
    return sums_of_rollouts(values, rollout_of_token) / lengths_of_rollouts(values, rollout_of_token)
