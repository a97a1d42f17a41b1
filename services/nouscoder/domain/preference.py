"""Preferences between the samples of a problem, for reward models, and how well a model agrees with them.

AceCoder (arXiv 2502.01718) takes the share of tests that a program passes as its score s, and prefers program i to
program j if s_i > s_j + 0.4, s_i > 0.8 and s_j > 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class PairRule:
    """When a sample is preferred to another one, by their scores from 0 to 1. `rejected_above` below 0: always."""

    margin: float = 0.4
    chosen_above: float = 0.8
    rejected_above: float = 0.0

    def holds(self, chosen: float, rejected: float) -> bool:
        """Whether a sample of score `chosen` is preferred to one of score `rejected`."""
        return chosen > rejected + self.margin and chosen > self.chosen_above and rejected > self.rejected_above


def preference_pairs(
    scores: Sequence[float], rule: PairRule, at_most: int = 0, seed: str = ""
) -> list[tuple[int, int]]:
    """(place of the chosen, place of the rejected sample) of each pair of one problem's samples, in order.

    With `at_most` only so many of them, chosen by the seed; 0: all.
    """
    places = range(len(scores))
    pairs = [(i, j) for i in places for j in places if rule.holds(scores[i], scores[j])]
    if at_most and len(pairs) > at_most:
        pairs = sorted(Random(seed).sample(pairs, at_most))
    return pairs


@dataclass(frozen=True, slots=True)
class StyleAccuracy:
    """RM-Bench (arXiv 2410.16184): the share of comparisons in which the right answer has the higher score.

    hard: the wrong answer is in a more elaborate style than the right one. normal: both are in the same style. easy:
    the right one is in a more elaborate style.
    """

    hard: float
    normal: float
    easy: float

    @property
    def mean(self) -> float:
        """The mean of the three."""
        return (self.hard + self.normal + self.easy) / 3


def style_accuracy(chosen: Sequence[float], rejected: Sequence[float]) -> StyleAccuracy:
    """The accuracy on one prompt from the scores of right and wrong answers, each from the plainest style on.

    Raises ValueError unless both have the same number of styles, two or more.
    """
    if len(chosen) != len(rejected) or len(chosen) < 2:
        raise ValueError(f"{len(chosen)} right and {len(rejected)} wrong answers: give both in the same styles")
    places = range(len(chosen))
    wins = {(i, j): float(chosen[i] > rejected[j]) for i in places for j in places}
    return StyleAccuracy(
        hard=_mean([won for (i, j), won in wins.items() if i < j]),
        normal=_mean([won for (i, j), won in wins.items() if i == j]),
        easy=_mean([won for (i, j), won in wins.items() if i > j]),
    )


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Pearson's correlation of pairs of values; None when it is not defined, because one of the two does not vary."""
    mean_x, mean_y = _mean(xs), _mean(ys)
    products = math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    squares = math.fsum((x - mean_x) ** 2 for x in xs) * math.fsum((y - mean_y) ** 2 for y in ys)
    if squares <= 0:
        return None
    return max(-1.0, min(1.0, products / math.sqrt(squares)))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
