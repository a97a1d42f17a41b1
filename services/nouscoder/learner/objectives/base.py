"""The seam between the trainer and an objective: ragged tensors in, one summed-up loss and its diagnostics out.

Nothing is padded here: the loss tokens of a micro-batch's rollouts lie one after another. Counts of the whole
minibatch are passed in, so that the losses and gradients of its micro-batches add up to those of the minibatch
whatever way it is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# exp(20) is 4.9e8: far beyond any clip, and finite, as are its products with advantages in float32.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The loss tokens of some rollouts.

    logprobs [tokens], with gradient, of the policy being trained; old_logprobs [tokens] of the policy at the start of
    the batch; sampler_logprobs [tokens] as recorded when sampled; advantages [rollouts]; rollout_of_token [tokens],
    an index into advantages, ascending.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    rollout_of_token: Tensor


@dataclass(frozen=True, slots=True)
class MinibatchCounts:
    """Sizes of the whole minibatch a micro-batch is part of: its loss tokens and its rollouts."""

    num_tokens: int
    num_rollouts: int


@dataclass(frozen=True, slots=True)
class ObjectiveTerms:
    """What an objective makes of a micro-batch.

    loss [] is this micro-batch's share of the minibatch's loss. Detached: ratios [tokens], pi_theta / pi_old as the
    clip sees it; clipped_low and clipped_high [tokens], True where the clip took the gradient away at that side.
    """

    loss: Tensor
    ratios: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


class Objective(Protocol):
    """A loss to minimise. Pure: no state, no knowledge of models."""

    def __call__(self, inputs: LossInputs, counts: MinibatchCounts) -> ObjectiveTerms:
        """The terms of one micro-batch."""
        ...


def bounded_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """exp(numerator - denominator) of log-probabilities [tokens], with the log-ratio held within +-MAX_LOG_RATIO."""
    return torch.exp(torch.clamp(numerator - denominator, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def truncated_importance_weights(old_logprobs: Tensor, sampler_logprobs: Tensor, cap: float) -> Tensor:
    """min(C, pi_old / pi_sampler) a token [tokens], without gradient (truncated importance sampling)."""
    return bounded_ratio(old_logprobs, sampler_logprobs).clamp(max=cap).detach()
