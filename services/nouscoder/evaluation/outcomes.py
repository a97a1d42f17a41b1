"""The results of an evaluation as one record, report.json: a pure function of its samples and verdicts, without times.

Problems count alike. pass@k is the unbiased estimate from a problem's samples, and its intervals are 95% bootstrap
intervals over problems. The Elo rating is that of domain/estimates.py, from the problems that have a rating.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nouscoder.domain.estimates import USUAL_K, Elo, RatedResult, bootstrap_interval, elo_rating, elo_text, pass_at_k
from nouscoder.domain.verdict import VerdictKind
from nouscoder.evaluation.problems import EvaluatedProblem

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
