"""Estimates from the results of an evaluation: the Elo rating, intervals, best of n, correlation, sign test, pass@k.

The Elo rating of a model comes from the ratings of problems, on the scale of Codeforces. A problem counts as an
opponent with its own rating: who has the same rating solves it with probability 1/2 (Elo 1978; Codeforces sets the
ratings of its problems so, https://codeforces.com/blog/entry/62865). The rating of the model is the one with the
highest likelihood. It is not the rating that an account with these programs would get, which comes from standings in
contests.

Intervals are bootstrap intervals of a mean over problems (Efron 1979, the percentile method). The problems are drawn
again with replacement, so the interval says how much the mean would differ on other problems of the same kind. Each
problem's own value stays as it is.

The exact sign test is for two results on the same problems. With one sample a problem it is McNemar's exact test.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import comb, exp, log, log1p
from random import Random

_POINTS = 400.0  # a difference of so many points makes the odds ten times as high
_PER_POINT = log(10.0) / _POINTS
# Half of the 95% quantile of chi-squared with one degree of freedom.
_DROP_95 = 3.841458820694124 / 2
_BISECTIONS = 60


@dataclass(frozen=True, slots=True)
class Elo:
    """A rating and its 95% interval. None for no bound: `value` and `high` when every problem is solved each time,
    `value` and `low` when none ever is.
    """

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class RatedResult:
    """A problem with its rating, and `score`: the share of the samples that solve it, in [0, 1]."""

    rating: float
    score: float


def expected_score(rating: float, problem_rating: float) -> float:
    """The probability 1 / (1 + 10^((r_p - r) / 400)) that a model of this rating solves the problem."""
    logit = (rating - problem_rating) * _PER_POINT
    if logit >= 0:
        return 1.0 / (1.0 + exp(-logit))
    odds = exp(logit)
    return odds / (1.0 + odds)


def elo_rating(results: Iterable[RatedResult]) -> Elo:
    """The rating with the highest likelihood, and the ratings that the likelihood-ratio test keeps at 95% (Wilks 1938).

    Each problem counts as one game, however many samples it has, because the samples of one problem depend on each
    other; so the interval is rather too wide than too narrow. Raises ValueError for no result and for a score outside
    of [0, 1].
    """
    levels: dict[float, list[float]] = {}  # rating -> [problems, sum of their scores]
    for one in results:
        if not 0.0 <= one.score <= 1.0:
            raise ValueError(f"a score of {one.score} is outside of 0 to 1")
        level = levels.setdefault(one.rating, [0, 0.0])
        level[0] += 1
        level[1] += one.score
    if not levels:
        raise ValueError("there is no rating from no problem")
    return _Likelihood({rating: (int(count), total) for rating, (count, total) in levels.items()}).elo()


class _Likelihood:
    """The likelihood of a rating: log L = sum of s log E + (1 - s) log(1 - E), which is concave in the rating."""

    def __init__(self, levels: dict[float, tuple[int, float]]) -> None:
        self._levels = levels
        self._games = sum(count for count, _ in levels.values())
        self._won = sum(won for _, won in levels.values())

    def elo(self) -> Elo:
        lowest, highest = min(self._levels), max(self._levels)
        if self._won <= 0.0:
            return Elo(None, None, self._bound(lowest, 1.0, -_DROP_95))
        if self._won >= self._games:
            return Elo(None, self._bound(highest, -1.0, -_DROP_95), None)
        # If all problems had one rating, this would be the distance to it. So the root is between these two.
        shift = log(self._won / (self._games - self._won)) / _PER_POINT
        value = _bisected(lambda rating: self._slope(rating) > 0.0, lowest + shift, highest + shift)
        least = self._log(value) - _DROP_95
        return Elo(value, self._bound(value, -1.0, least), self._bound(value, 1.0, least))

    def _slope(self, rating: float) -> float:
        """What the model scored, less what a model of this rating is expected to score."""
        return sum(won - count * expected_score(rating, level) for level, (count, won) in self._levels.items())

    def _log(self, rating: float) -> float:
        found = 0.0
        for level, (count, won) in self._levels.items():
            logit = (rating - level) * _PER_POINT
            found += won * logit - count * (max(logit, 0.0) + log1p(exp(-abs(logit))))
        return found

    def _bound(self, start: float, direction: float, least: float) -> float:
        """Where the log-likelihood falls to `least` on the way from `start` in this direction."""
        # Before `start` when nothing was solved, or everything: then it rises without end on the other side.
        begin, step = start, _POINTS
        while self._log(begin) < least:
            begin, step = begin - direction * step, 2 * step
        end, step = begin + direction * step, 2 * step
        while self._log(end) >= least:
            end, step = end + direction * step, 2 * step
        return _bisected(lambda rating: self._log(rating) >= least, begin, end)


def _bisected(holds: Callable[[float], bool], begin: float, end: float) -> float:
    """Where `holds` changes between `begin`, where it is true, and `end`."""
    for _ in range(_BISECTIONS):
        middle = (begin + end) / 2
        if holds(middle):
            begin = middle
        else:
            end = middle
    return (begin + end) / 2


def elo_text(elo: Elo) -> str:
    """A rating for people: `1523 (1402 to 1650)`, or its only bound."""
    if elo.low is None:
        return f"at most {elo.high:.0f}"
    if elo.high is None:
        return f"at least {elo.low:.0f}"
    return f"{elo.value:.0f} ({elo.low:.0f} to {elo.high:.0f})"


_RESAMPLES = 1000
_LEVEL = 0.95


def bootstrap_interval(values: Sequence[float], seed: int = 0, resamples: int = _RESAMPLES) -> tuple[float, float]:
    """(low, high): the bounds that hold the mean of `values` [problems] in 95 % of the resamples.

    The same values and seed give the same interval. Raises ValueError for no values.
    """
    if not values:
        raise ValueError("there is no interval of no values")
    draw = Random(seed)
    means = sorted(sum(draw.choices(values, k=len(values))) / len(values) for _ in range(resamples))
    outside = int(resamples * (1.0 - _LEVEL) / 2.0)
    return means[outside], means[-1 - outside]


def best_of_n(scores: Sequence[float], right: Sequence[bool], n: int) -> float:
    """The mean over all sets of n of the samples; among equal scores each is as likely.

    For n = 1 it is the share that is right, and for the number of samples it says whether the best of all is right. It
    is unbiased, as pass@k is (domain/estimates.py). Raises ValueError unless 1 <= n <= samples.
    """
    if not 1 <= n <= len(scores):
        raise ValueError(f"the best of {n} of {len(scores)} samples is not defined")
    groups: dict[float, list[bool]] = defaultdict(list)
    for score, is_right in zip(scores, right, strict=True):
        groups[score].append(is_right)
    sets, lower, total = comb(len(scores), n), 0, 0.0
    for score in sorted(groups):
        equal = groups[score]
        # The highest score of a set is this one if the set has one of `equal` and none that is higher.
        probability = (comb(lower + len(equal), n) - comb(lower, n)) / sets
        total += probability * sum(equal) / len(equal)
        lower += len(equal)
    return total


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Pearson's correlation of pairs of values; None when it is not defined, because one of the two does not vary.

    Raises ValueError unless there are as many of both.
    """
    if len(xs) != len(ys):
        raise ValueError(f"{len(xs)} and {len(ys)} values are no pairs")
    try:
        return max(-1.0, min(1.0, statistics.correlation(xs, ys)))
    except statistics.StatisticsError:
        return None


def sign_test(num_better: int, num_worse: int) -> float:
    """The two-sided p-value of `num_better` wins and `num_worse` losses; ties do not count. 1.0 without either.

    Each problem is a win with probability 1/2 when both models are equally good (Dixon and Mood 1946; for one sample a
    problem McNemar 1947, exact form). Raises ValueError for a negative number.
    """
    if num_better < 0 or num_worse < 0:
        raise ValueError(f"{num_better} better and {num_worse} worse are no counts")
    total = num_better + num_worse
    tail: int = sum(comb(total, count) for count in range(min(num_better, num_worse) + 1))
    # Integers are divided, because 2.0**total overflows above 1023.
    return float(min(1.0, 2 * tail / 2**total))


USUAL_K = (1, 2, 4, 5, 8, 10, 16, 32, 50, 64, 100, 128)


def pass_at_k(num_rollouts: int, num_right: int, k: int) -> float:
    """The unbiased estimate 1 - C(n - c, k) / C(n, k) from n rollouts of which c are right.

    Chen et al. 2021, 2107.03374, equation 1. Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= num_rollouts or not 0 <= num_right <= num_rollouts:
        raise ValueError(f"pass@{k} of {num_right} right in {num_rollouts} rollouts is not defined")
    return 1.0 - comb(num_rollouts - num_right, k) / comb(num_rollouts, k)


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> float | None:
    """The mean over problems of (rollouts, right); None when a problem has fewer than k rollouts, or there is none."""
    if not counts or min(num_rollouts for num_rollouts, _ in counts) < k:
        return None
    return sum(pass_at_k(num_rollouts, num_right, k) for num_rollouts, num_right in counts) / len(counts)
