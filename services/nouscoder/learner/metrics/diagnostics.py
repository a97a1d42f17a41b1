"""Diagnostics of a step: figures over the loss tokens of a minibatch, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from nouscoder.learner.metrics.mismatch import MismatchFigures
from nouscoder.learner.parallel.ranks import Ranks
from nouscoder.objectives.base import Diagnostic, LossInputs, Reduction, bounded_ratio

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
