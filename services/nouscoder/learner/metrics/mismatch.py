"""The mismatch of sampler and learner.

`MismatchFigures` say how far the learner's log-probabilities are from those that the sampler recorded, over the tokens
of a step. With d_t = log pi_old(t) - log pi_sampler(t) of loss token t:

    mismatch_abs_mean        the mean of |d_t|
    mismatch_abs_p99         the smallest value that |d_t| exceeds for at most 1 % of the tokens (nearest rank)
    mismatch_beyond_2x       the share of tokens with |d_t| > log 2: one probability is more than twice the other
    mismatch_kl_at_N         the mean of exp(d_t) - 1 - d_t, the k3 estimator of the KL divergence of sampler and
                             learner (J. Schulman, "Approximating KL Divergence"), over the tokens whose position among
                             the sampled tokens of their rollout is N or later, and before the next bucket
    mismatch_fresh_abs_mean  the mean of |d_t| over the tokens of rollouts that the weights of the batch's start alone
                             sampled; missing in a step without such a rollout
    mismatch_fresh_kl        the mean of exp(d_t) - 1 - d_t over the same tokens
    mismatch_kl_versions_N   the same mean over the tokens of rollouts that N policy versions sampled; the last bucket
                             has the rollouts of 4 versions and more

A sampler with the weights of the batch's start and the same arithmetic has 0 everywhere. Older weights, another
precision, and keys and values that were kept over an update each add to it. The figures of fresh rollouts show only
what sampler and learner compute differently; a guard watches them (domain/guards.py). Older weights show in rollouts
of one version too; what updates within a rollout add shows as the difference to rollouts of more versions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from nouscoder.objectives.base import MAX_LOG_RATIO, LossInputs

# First positions of the buckets, and first numbers of versions.
POSITIONS = (0, 64, 512, 4096, 16384)

VERSIONS = (1, 2, 3, 4)

_END = 2**62


class MismatchFigures:
    """Collects the tokens of a step's micro-batches. `result` returns the figures of all of them."""

    def __init__(self) -> None:
        # Of each micro-batch: the differences, positions, numbers of versions and freshness of its tokens.
        self._parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    @torch.no_grad()
    def add(self, inputs: LossInputs) -> None:
        """Add the tokens of a micro-batch."""
        differences = (inputs.old_logprobs - inputs.sampler_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        positions = positions_in_rollouts(inputs.rollout_of_token.cpu())
        versions = torch.zeros_like(positions) if inputs.num_versions is None else inputs.num_versions.cpu()
        fresh = torch.zeros_like(positions, dtype=torch.bool) if inputs.is_fresh is None else inputs.is_fresh.cpu()
        self._parts.append((differences.double().cpu(), positions, versions, fresh))

    def join(self, other: MismatchFigures) -> None:
        """Add the tokens that `other` has."""
        self._parts += other._parts

    def result(self) -> dict[str, float]:
        """The figures by name; a bucket without tokens has none. Raises ValueError when no token was added."""
        if not self._parts:
            raise ValueError("no loss tokens were added")
        differences, positions, versions, fresh = map(torch.cat, zip(*self._parts, strict=True))
        sizes = differences.abs()
        rank = math.ceil(0.99 * len(sizes))
        k3 = differences.expm1() - differences
        of_fresh = {}
        if bool(fresh.any()):
            of_fresh = {
                "mismatch_fresh_abs_mean": float(sizes[fresh].mean()),
                "mismatch_fresh_kl": max(0.0, float(k3[fresh].mean())),
            }
        return {
            "mismatch_abs_mean": float(sizes.mean()),
            "mismatch_abs_p99": float(sizes.kthvalue(rank).values),
            "mismatch_beyond_2x": float((sizes > math.log(2)).double().mean()),
            **of_fresh,
            **dict(_means("mismatch_kl_at", k3, positions, POSITIONS)),
            **dict(_means("mismatch_kl_versions", k3, versions, VERSIONS)),
        }


def positions_in_rollouts(rollout_of_token: Tensor) -> Tensor:
    """The position of each token among the loss tokens of its rollout, [tokens]; `rollout_of_token` is ascending."""
    counts = torch.bincount(rollout_of_token)
    starts = counts.cumsum(0) - counts
    return torch.arange(len(rollout_of_token)) - starts[rollout_of_token]


def _means(name: str, k3: Tensor, places: Tensor, firsts: Sequence[int]) -> Iterator[tuple[str, float]]:
    """The mean of `k3` [tokens] over the tokens whose place, [tokens], is in each bucket; buckets begin at `firsts`."""
    for first, end in pairwise((*firsts, _END)):
        inside = (places >= first) & (places < end)
        if bool(inside.any()):
            yield f"{name}_{first}", max(0.0, float(k3[inside].mean()))
