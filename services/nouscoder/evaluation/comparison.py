"""The comparison of two evaluations, problem by problem.

`nouscoder eval compare A B` pairs two evaluations of the same problems, problem by problem. A problem's value is its
share of accepted samples. The sign test counts on how many problems B is better and worse; the interval of the mean
difference is a paired bootstrap: problems are drawn again, each with both of its values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nouscoder.domain.estimates import bootstrap_interval, sign_test
from nouscoder.errors import Unusable
from nouscoder.evaluation.outcomes import REPORT
from nouscoder.input_file import regular


@dataclass(frozen=True, slots=True)
class Difference:
    """A problem on which the two differ: accepted of all samples, of A and of B."""

    problem_id: str
    a: tuple[int, int]
    b: tuple[int, int]


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """B minus A on the problems that both have. `low` and `high` bound the difference at 95%."""

    num_problems: int
    num_only_in_one: int
    pass_at_1_a: float
    pass_at_1_b: float
    low: float
    high: float
    num_better: int
    num_worse: int
    p_value: float
    is_mcnemar: bool
    differences: tuple[Difference, ...]

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "difference": self.pass_at_1_b - self.pass_at_1_a}

    def text(self) -> str:
        """For people."""
        test = "McNemar's exact test" if self.is_mcnemar else "exact sign test"
        rows = [f"{one.problem_id:<40}{one.a[0]:>5}/{one.a[1]:<5}{one.b[0]:>5}/{one.b[1]}" for one in self.differences]
        alone = f" ({self.num_only_in_one} are in one evaluation only)" if self.num_only_in_one else ""
        return "\n".join(
            [
                f"{self.num_problems} problems{alone}",
                f"pass@1 of A {self.pass_at_1_a:.4f}, of B {self.pass_at_1_b:.4f}",
                f"B - A {self.pass_at_1_b - self.pass_at_1_a:+.4f},"
                f" 95% paired bootstrap {self.low:+.4f} to {self.high:+.4f}",
                f"B is better on {self.num_better} problems and worse on {self.num_worse};"
                f" {test}: p = {self.p_value:.4g}",
                *([f"{'problem':<40}{'A':>6}{'B':>11}"] if rows else []),
                *rows,
            ]
        )


def compare(a: Path, b: Path, profile: str = "") -> PairedComparison:
    """Compare the evaluations in two folders. `profile`: the first of A by default. Raises Unusable."""
    first, second = _read(a), _read(b)
    profile = profile or next(iter(first["profiles"]))
    for path, record in ((a, first), (b, second)):
        if profile not in record["profiles"]:
            raise Unusable(f"{path} has no verdicts of the profile {profile}: it has {', '.join(record['profiles'])}")
    left, right = _by_id(first), _by_id(second)
    common = [name for name in left if name in right]
    if not common:
        raise Unusable(f"{a} and {b} have no problem in common")
    for name in common:
        if left[name]["tests_digest"] != right[name]["tests_digest"]:
            raise Unusable(f"{name} has other tests in {a} than in {b}, so the two cannot be compared")
    counts = {name: (_counts(left[name], profile), _counts(right[name], profile)) for name in common}
    return _comparison(counts, len(left) + len(right) - 2 * len(common))


def _comparison(
    counts: Mapping[str, tuple[tuple[int, int], tuple[int, int]]], num_only_in_one: int
) -> PairedComparison:
    rates_a = [a[0] / a[1] for a, _ in counts.values()]
    rates_b = [b[0] / b[1] for _, b in counts.values()]
    changes = [after - before for before, after in zip(rates_a, rates_b, strict=True)]
    low, high = bootstrap_interval(changes)
    num_better, num_worse = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    return PairedComparison(
        num_problems=len(counts),
        num_only_in_one=num_only_in_one,
        pass_at_1_a=sum(rates_a) / len(counts),
        pass_at_1_b=sum(rates_b) / len(counts),
        low=low,
        high=high,
        num_better=num_better,
        num_worse=num_worse,
        p_value=sign_test(num_better, num_worse),
        is_mcnemar=all(a[1] == b[1] == 1 for a, b in counts.values()),
        differences=tuple(
            Difference(name, *pair) for (name, pair), change in zip(counts.items(), changes, strict=True) if change
        ),
    )


def _counts(problem: Mapping[str, Any], profile: str) -> tuple[int, int]:
    return problem["accepted"][profile], problem["num_samples"]


def _by_id(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {problem["problem_id"]: problem for problem in record["problems"]}


def _read(path: Path) -> dict[str, Any]:
    file = path / REPORT if path.is_dir() else path
    try:
        record: dict[str, Any] = json.loads(regular(file).read_bytes())
        record["problems"], record["profiles"]  # a KeyError names what is missing
    except FileNotFoundError:
        raise Unusable(f"{path} has no {REPORT}: its evaluation is not finished") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unusable(f"{file} is not a report of an evaluation: {error}") from None
    return record
