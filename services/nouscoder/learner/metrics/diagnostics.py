"""Diagnostics of a step: figures over the loss tokens of a minibatch, by name.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from nouscoder.learner.parallel.ranks import Ranks
from nouscoder.objectives.base import MAX_LOG_RATIO, Diagnostic, LossInputs, Reduction, bounded_ratio

# The mismatch of sampler and learner.

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


# The diagnostics of a policy, and of all minibatches of a step together.

_REDUCE: Mapping[Reduction, Callable[[Tensor], Tensor]] = {
    Reduction.MEAN: torch.sum,
    Reduction.MIN: torch.min,
    Reduction.MAX: torch.max,
}
_COMBINE: Mapping[Reduction, Callable[[float, float], float]] = {
    Reduction.MEAN: lambda a, b: a + b,
    Reduction.MIN: min,
    Reduction.MAX: max,
}
# The effective sample size is computed from these two means, which are not reported.
_WEIGHT, _WEIGHT_SQUARED = "weight", "weight_squared"


@torch.no_grad()
def policy_diagnostics(inputs: LossInputs) -> dict[str, Diagnostic]:
    """The diagnostics of every objective.

    ratio_*: pi_theta / pi_old. mismatch_mean, mismatch_max: pi_old / pi_sampler (the difference between sampler and
    learner). approximate_kl (pi_old to pi_theta) and mismatch_kl (pi_sampler to pi_old): the estimator r - 1 - log r of
    J. Schulman's "Approximating KL Divergence".
    """
    ratios = bounded_ratio(inputs.logprobs, inputs.old_logprobs)
    mismatch = bounded_ratio(inputs.old_logprobs, inputs.sampler_logprobs)
    weight = bounded_ratio(inputs.logprobs, inputs.sampler_logprobs)
    return {
        "entropy": Diagnostic(inputs.entropies),
        "ratio_mean": Diagnostic(ratios),
        "ratio_min": Diagnostic(ratios, Reduction.MIN),
        "ratio_max": Diagnostic(ratios, Reduction.MAX),
        "mismatch_mean": Diagnostic(mismatch),
        "mismatch_max": Diagnostic(mismatch, Reduction.MAX),
        "approximate_kl": Diagnostic(ratios - 1 - ratios.log()),
        "mismatch_kl": Diagnostic(mismatch - 1 - mismatch.log()),
        _WEIGHT: Diagnostic(weight),
        _WEIGHT_SQUARED: Diagnostic(weight.double() ** 2),
    }


class StepDiagnostics:
    """Sums over micro-batches. `result` returns the figures of the whole minibatch."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._values: dict[str, float] = {}
        self._reductions: dict[str, Reduction] = {}
        self._mismatch = MismatchFigures()

    @torch.no_grad()
    def add(self, inputs: LossInputs, of_objective: Mapping[str, Diagnostic]) -> None:
        """Add a micro-batch. Raises ValueError when the objective uses a name of `policy_diagnostics`."""
        if not inputs.logprobs.numel():
            return
        of_policy = policy_diagnostics(inputs)
        if clash := sorted(of_policy.keys() & of_objective.keys()):
            raise ValueError(f"the objective must not name a diagnostic {clash[0]!r}: every objective has it")
        named = {**of_policy, **of_objective}
        reduced = torch.stack([_REDUCE[item.reduction](item.values.double()) for item in named.values()]).tolist()
        for (name, item), value in zip(named.items(), reduced, strict=True):
            self._combine(name, item.reduction, value)
        self._mismatch.add(inputs)
        self._num_tokens += inputs.logprobs.numel()

    def over(self, ranks: Ranks) -> StepDiagnostics:
        """Those of all ranks."""
        total = StepDiagnostics()
        for part in ranks.gather(self):
            total._num_tokens += part._num_tokens
            total._mismatch.join(part._mismatch)
            for name, value in part._values.items():
                total._combine(name, part._reductions[name], value)
        return total

    def _combine(self, name: str, reduction: Reduction, value: float) -> None:
        known = self._values.get(name)
        self._values[name] = value if known is None else _COMBINE[reduction](known, value)
        self._reductions[name] = reduction

    def result(self) -> dict[str, float]:
        """The figures by name, with those of the mismatch.

        effective_sample_size: (sum w)^2 / (n sum w^2), in (0, 1], w = pi_theta / pi_sampler.

        Raises ValueError when no token was counted.
        """
        if not self._num_tokens:
            raise ValueError("no loss tokens were counted")
        figures = {
            name: value / self._num_tokens if self._reductions[name] is Reduction.MEAN else value
            for name, value in self._values.items()
        }
        weight, squared = figures.pop(_WEIGHT), figures.pop(_WEIGHT_SQUARED)
        for name in ("approximate_kl", "mismatch_kl"):  # rounding may leave a sum of zeros slightly below 0
            figures[name] = max(0.0, figures[name])
        return {**figures, **self._mismatch.result(), "effective_sample_size": weight**2 / squared}
