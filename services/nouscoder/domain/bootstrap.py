"""Bootstrap intervals of a mean over problems (Efron 1979, the percentile method).

The problems are drawn again with replacement, so the interval says how much the mean would differ on other problems of
the same kind. Each problem's own value stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

RESAMPLES = 1000
LEVEL = 0.95


def bootstrap_interval(
    values: Sequence[float], seed: int = 0, resamples: int = RESAMPLES, level: float = LEVEL
) -> tuple[float, float]:
    """(low, high): the bounds that hold the mean of `values` [problems] in the share `level` of the resamples.

    The same values and seed give the same interval. Raises ValueError for no values.
    """
    if not values:
        raise ValueError("there is no interval of no values")
    draw = Random(seed)
    means = sorted(sum(draw.choices(values, k=len(values))) / len(values) for _ in range(resamples))
    outside = int(resamples * (1.0 - level) / 2.0)
    return means[outside], means[-1 - outside]
