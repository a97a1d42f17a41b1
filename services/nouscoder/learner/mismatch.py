"""How far the learner's log-probabilities are from those that the sampler recorded, over the tokens of a step.

With d_t = log pi_old(t) - log pi_sampler(t) of loss token t:

    mismatch_abs_mean    the mean of |d_t|
    mismatch_abs_p99     the smallest value that |d_t| exceeds for at most 1 % of the tokens (nearest rank)
    mismatch_beyond_2x   the share of tokens with |d_t| > log 2: one probability is more than twice the other
    mismatch_kl_at_N     the mean of exp(d_t) - 1 - d_t, the k3 estimator of the KL divergence of sampler and learner
                         (J. Schulman, "Approximating KL Divergence"), over the tokens whose position among the sampled
                         tokens of their rollout is N or later, and before the next bucket

A sampler with the weights of the batch's start and the same arithmetic has 0 everywhere. Older weights, another
precision, and keys and values that were kept over an update each add to it, more at later positions.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from nouscoder.learner.objectives.base import LossInputs
from nouscoder.learner.objectives.ratios import MAX_LOG_RATIO

# First positions of the buckets.
BUCKETS = (0, 64, 512, 4096, 16384)
_END = 2**62


class MismatchFigures:
    """Collects the tokens of a step's micro-batches. `result` returns the figures of all of them."""

    def __init__(self) -> None:
        self._differences: list[Tensor] = []
        self._positions: list[Tensor] = []

    @torch.no_grad()
    def add(self, inputs: LossInputs) -> None:
        """Add the tokens of a micro-batch."""
        differences = (inputs.old_logprobs - inputs.sampler_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        self._differences.append(differences.double().cpu())
        self._positions.append(positions_in_rollouts(inputs.rollout_of_token.cpu()))

    def join(self, other: MismatchFigures) -> None:
        """Add the tokens that `other` has."""
        self._differences += other._differences
        self._positions += other._positions

    def result(self) -> dict[str, float]:
        """The figures by name; a bucket without tokens has none. Raises ValueError when no token was added."""
        if not self._differences:
            raise ValueError("no loss tokens were added")
        differences, positions = torch.cat(self._differences), torch.cat(self._positions)
        sizes = differences.abs()
        rank = math.ceil(0.99 * len(sizes))
        k3 = differences.expm1() - differences
        return {
            "mismatch_abs_mean": float(sizes.mean()),
            "mismatch_abs_p99": float(sizes.kthvalue(rank).values),
            "mismatch_beyond_2x": float((sizes > math.log(2)).double().mean()),
            **{
                f"mismatch_kl_at_{first}": max(0.0, float(k3[inside].mean()))
                for first, end in pairwise((*BUCKETS, _END))
                if bool((inside := (positions >= first) & (positions < end)).any())
            },
        }


def positions_in_rollouts(rollout_of_token: Tensor) -> Tensor:
    """The position of each token among the loss tokens of its rollout, [tokens]; `rollout_of_token` is ascending."""
    counts = torch.bincount(rollout_of_token)
    starts = counts.cumsum(0) - counts
    return torch.arange(len(rollout_of_token)) - starts[rollout_of_token]
