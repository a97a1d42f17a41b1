"""The results of an evaluation as one record, report.json: a pure function of its samples and verdicts, without times.

Problems count alike. pass@k is the unbiased estimate from a problem's samples, and its intervals are 95% bootstrap
intervals over problems. The Elo rating is that of domain/estimates.py, from the problems that have a rating.

`nouscoder eval compare A B` pairs two evaluations of the same problems, problem by problem. A problem's value is its
share of accepted samples. The sign test counts on how many problems B is better and worse; the interval of the mean
difference is a paired bootstrap: problems are drawn again, each with both of its values.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nouscoder.domain.estimates import (
    USUAL_K,
    Elo,
    RatedResult,
    bootstrap_interval,
    elo_rating,
    elo_text,
    pass_at_k,
    sign_test,
)
from nouscoder.domain.verdict import VerdictKind
from nouscoder.errors import Unusable
from nouscoder.evaluation.problems import EvaluatedProblem
from nouscoder.input_file import regular

REPORT = "report.json"
_ACCEPTED = VerdictKind.ACCEPTED.value
_MOST_BINS = 24
_GROUPS: dict[str, Callable[[EvaluatedProblem], str]] = {
    "difficulty": lambda problem: problem.difficulty,
    "platform": lambda problem: problem.platform,
    "month": lambda problem: problem.month,
    "language": lambda problem: ", ".join(problem.languages),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One sample. `verdicts` has the verdict of each profile; `num_tokens` is None if unknown."""

    position: int
    num_characters: int
    num_tokens: int | None
    is_truncated: bool
    verdicts: dict[str, str]


@dataclass(frozen=True, slots=True)
class ProblemOutcomes:
    """A problem and its samples, in the order of their positions."""

    problem: EvaluatedProblem
    samples: list[Outcome] = field(default_factory=list)

    def num_accepted(self, profile: str) -> int:
        """Samples that this profile accepts."""
        return sum(sample.verdicts[profile] == _ACCEPTED for sample in self.samples)

    def examples(self, profile: str) -> list[int]:
        """The positions of the first accepted sample and of the first that is not, where there is one."""
        firsts: dict[bool, int] = {}
        for sample in self.samples:
            firsts.setdefault(sample.verdicts[profile] == _ACCEPTED, sample.position)
        return list(firsts.values())

    def pass_at(self, k: int, profile: str) -> float:
        """The unbiased estimate of pass@k."""
        return pass_at_k(len(self.samples), self.num_accepted(profile), k)


def results(found: Sequence[ProblemOutcomes], profiles: Sequence[str]) -> dict[str, Any]:
    """The record. `found` are the problems in the order of their file, each with a sample at least."""
    samples = [sample for one in found for sample in one.samples]
    return {
        "num_problems": len(found),
        "num_samples": len(samples),
        "profiles": {profile: _of_profile(found, profile) for profile in profiles},
        "lengths": _lengths(samples, profiles[0]),
        "truncated": {
            "samples": sum(sample.is_truncated for sample in samples),
            "accepted": sum(sample.is_truncated and sample.verdicts[profiles[0]] == _ACCEPTED for sample in samples),
        },
        "disagreements": [
            {"problem_id": one.problem.problem_id, "position": sample.position, "verdicts": sample.verdicts}
            for one in found
            for sample in one.samples
            if len({sample.verdicts[profile] == _ACCEPTED for profile in profiles}) > 1
        ],
        "problems": [_problem(one, profiles) for one in found],
    }


def _of_profile(found: Sequence[ProblemOutcomes], profile: str) -> dict[str, Any]:
    fewest = min(len(one.samples) for one in found)
    most = sorted({*(k for k in USUAL_K if k <= fewest), fewest})
    verdicts = Counter(sample.verdicts[profile] for one in found for sample in one.samples)
    return {
        "pass_at_k": {str(k): _estimate(found, k, profile) for k in most},
        "by": {name: _by(found, group, profile) for name, group in _GROUPS.items()},
        "elo": _elo(found, profile),
        "verdicts": {name: verdicts[name] for name in sorted(verdicts, key=lambda name: (-verdicts[name], name))},
    }


def _estimate(found: Iterable[ProblemOutcomes], k: int, profile: str) -> dict[str, float]:
    values = [one.pass_at(k, profile) for one in found]
    low, high = bootstrap_interval(values)
    return {"value": sum(values) / len(values), "low": low, "high": high}


def _elo(found: Iterable[ProblemOutcomes], profile: str) -> dict[str, Any] | None:
    """The Elo rating from the problems that have one; None when none has."""
    rated = [
        RatedResult(one.problem.rating, one.pass_at(1, profile)) for one in found if one.problem.rating is not None
    ]
    return {"num_problems": len(rated), **asdict(elo_rating(rated))} if rated else None


def _by(
    found: Sequence[ProblemOutcomes], group: Callable[[EvaluatedProblem], str], profile: str
) -> list[dict[str, Any]]:
    groups: dict[str, list[ProblemOutcomes]] = {}
    for one in found:
        groups.setdefault(group(one.problem), []).append(one)
    return [
        {"name": name, "num_problems": len(members), **_estimate(members, 1, profile)}
        for name, members in sorted(groups.items())
    ]


def _lengths(samples: Sequence[Outcome], profile: str) -> dict[str, Any]:
    """A histogram of accepted and other samples. In characters, unless every sample has its number of tokens."""
    in_tokens = all(sample.num_tokens is not None for sample in samples)
    sizes = [(sample.num_tokens or 0) if in_tokens else sample.num_characters for sample in samples]
    width = _bin_width(max(sizes))
    num_bins = max(sizes) // width + 1
    accepted, others = [0] * num_bins, [0] * num_bins
    for size, sample in zip(sizes, samples, strict=True):
        (accepted if sample.verdicts[profile] == _ACCEPTED else others)[size // width] += 1
    return {
        "unit": "tokens" if in_tokens else "characters",
        "mean": sum(sizes) / len(sizes),
        "bin_width": width,
        "accepted": accepted,
        "others": others,
    }


def _bin_width(largest: int) -> int:
    """The smallest of 1, 2, 5, 10, ... with which the bins from 0 to `largest` are few."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if largest // (factor * power) < _MOST_BINS:
                return factor * power
        power *= 10


def _problem(one: ProblemOutcomes, profiles: Sequence[str]) -> dict[str, Any]:
    problem = one.problem
    return {
        "problem_id": problem.problem_id,
        "difficulty": problem.difficulty,
        "platform": problem.platform,
        "month": problem.month,
        "rating": problem.rating,
        "tests_digest": problem.tests_digest,
        "num_samples": len(one.samples),
        "accepted": {profile: one.num_accepted(profile) for profile in profiles},
    }


# Two evaluations.


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
        lines += [_elo_row(results["elo"])] if results["elo"] else []
        lines += [f"{name:<34}{count:>6}" for name, count in results["verdicts"].items()]
    lines.append(f"\n{'truncated':<34}{record['truncated']['samples']:>6}")
    lines.append(f"{'mean ' + record['lengths']['unit']:<34}{record['lengths']['mean']:>6.0f}")
    lines += _disagreement_rows(record) if len(record["profiles"]) > 1 else []
    lines.append(f"report: {out / 'report.html'}")
    return "\n".join(lines)


def _row(name: str, count: str, one: dict[str, Any]) -> str:
    return f"{name:<34}{count:>6}{one['value']:>9.4f}   {one['low']:.4f} to {one['high']:.4f}"


def _elo_row(one: dict[str, Any]) -> str:
    return f"{'Elo rating':<34}{one['num_problems']:>6}   {elo_text(Elo(one['value'], one['low'], one['high']))}"


def _disagreement_rows(record: dict[str, Any]) -> list[str]:
    found = record["disagreements"]
    shown = [
        f"  {one['problem_id']}, sample {one['position']}: "
        + ", ".join(f"{profile} {verdict}" for profile, verdict in one["verdicts"].items())
        for one in found[:_MOST_DISAGREEMENTS]
    ]
    more = [f"  and {len(found) - len(shown)} more in report.json"] if len(found) > len(shown) else []
    return [f"accepted by one profile only: {len(found)}", *shown, *more]
