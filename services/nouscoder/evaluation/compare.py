"""`nouscoder eval compare A B`: two evaluations of the same problems, paired problem by problem.

A problem's value is its share of accepted samples. The sign test counts on how many problems B is better and worse; the
interval of the mean difference is a paired bootstrap: problems are drawn again, each with both of its values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nouscoder.domain.estimates import Elo, bootstrap_interval, elo_text, sign_test
from nouscoder.errors import Unusable
from nouscoder.evaluation.evaluate import REPORT


class NotComparable(Unusable):
    """Two evaluations cannot be compared. The message says why."""


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
    """Compare the evaluations in two folders. `profile`: the first of A by default. Raises NotComparable."""
    first, second = _read(a), _read(b)
    profile = profile or next(iter(first["profiles"]))
    for path, record in ((a, first), (b, second)):
        if profile not in record["profiles"]:
            raise NotComparable(
                f"{path} has no verdicts of the profile {profile}: it has {', '.join(record['profiles'])}"
            )
    left, right = _by_id(first), _by_id(second)
    common = [name for name in left if name in right]
    if not common:
        raise NotComparable(f"{a} and {b} have no problem in common")
    for name in common:
        if left[name]["tests_digest"] != right[name]["tests_digest"]:
            raise NotComparable(f"{name} has other tests in {a} than in {b}, so the two cannot be compared")
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
        record: dict[str, Any] = json.loads(file.read_bytes())
        record["problems"], record["profiles"]  # a KeyError names what is missing
    except FileNotFoundError:
        raise NotComparable(f"{path} has no {REPORT}: its evaluation is not finished") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotComparable(f"{file} is not a report of an evaluation: {error}") from None
    return record


# The table that `nouscoder eval` prints.

_MOST_DISAGREEMENTS = 20


def summary_text(record: dict[str, Any], out: Path) -> str:
    """The results of report.json as text."""
    lines = [f"{record['num_problems']} problems, {record['num_samples']} samples"]
    for profile, results in record["profiles"].items():
        lines.append(f"\ngrading: {profile}")
        lines += [_row(f"pass@{k}", "", one) for k, one in results["pass_at_k"].items()]
        for group, rows in results["by"].items():
            lines += [_row(f"  {group} {row['name']}", f"{row['num_problems']}", row) for row in rows]
        lines += [_elo(results["elo"])] if results["elo"] else []
        lines += [f"{name:<34}{count:>6}" for name, count in results["verdicts"].items()]
    lines.append(f"\n{'truncated':<34}{record['truncated']['samples']:>6}")
    lines.append(f"{'mean ' + record['lengths']['unit']:<34}{record['lengths']['mean']:>6.0f}")
    lines += _disagreements(record) if len(record["profiles"]) > 1 else []
    lines.append(f"report: {out / 'report.html'}")
    return "\n".join(lines)


def _row(name: str, count: str, one: dict[str, Any]) -> str:
    return f"{name:<34}{count:>6}{one['value']:>9.4f}   {one['low']:.4f} to {one['high']:.4f}"


def _elo(one: dict[str, Any]) -> str:
    return f"{'Elo rating':<34}{one['num_problems']:>6}   {elo_text(Elo(one['value'], one['low'], one['high']))}"


def _disagreements(record: dict[str, Any]) -> list[str]:
    found = record["disagreements"]
    shown = [
        f"  {one['problem_id']}, sample {one['position']}: "
        + ", ".join(f"{profile} {verdict}" for profile, verdict in one["verdicts"].items())
        for one in found[:_MOST_DISAGREEMENTS]
    ]
    more = [f"  and {len(found) - len(shown)} more in report.json"] if len(found) > len(shown) else []
    return [f"accepted by one profile only: {len(found)}", *shown, *more]
