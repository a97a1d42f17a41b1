"""The evaluations that a run folder holds, and their figures.

evaluation_before.json, evaluation_after.json and the files of evaluations/ (run/evaluation_files.py writes them) hold a
program for each problem, so they are large. Each is read once.

INVARIANT: of each policy version there is one evaluation. A file that is damaged or has no result is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nouscoder.atomic_files import numbered
from nouscoder.input_file import json_object

BEFORE, AFTER = "evaluation_before.json", "evaluation_after.json"
DURING = "evaluations"
# The figures of an evaluation in metrics.jsonl, if its record has them. `pass_at_k` has a rate for each k.
_FIGURES = (
    *("policy_version", "pass_at_1", "standard_error", "sampling_error", "pass_at_k"),
    *("truncated_share", "mean_tokens", "num_problems", "num_rollouts"),
)
Figures = Mapping[str, Any]


def evaluation_files(run: Path) -> Iterator[Path]:
    """The files that may be there, the oldest evaluation first."""
    yield from (run / BEFORE, *numbered(run / DURING, ".json").values(), run / AFTER)


@dataclass(frozen=True, slots=True)
class EvaluatedSample:
    """The first rollout of a problem, for inspection. `verdict` is the value of a VerdictKind."""

    problem_id: str
    family: str
    prompt: str
    program: str
    verdict: str

    @property
    def accepted(self) -> bool:
        """Whether every hidden test passed."""
        return self.verdict == "accepted"


class RecordedEvaluations:
    """The evaluations of one run."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._read: dict[tuple[Path, int], Figures | None] = {}

    def figures(self) -> list[Figures]:
        """The figures of each evaluated policy, in order of versions."""
        found = {}
        for file in evaluation_files(self._run):
            try:
                key = (file, file.stat().st_mtime_ns)
            except FileNotFoundError:
                continue
            if key not in self._read:
                self._read[key] = _figures(file)
            if (figures := self._read[key]) is not None:
                found[figures["policy_version"]] = figures
        return [found[version] for version in sorted(found)]


def _figures(file: Path) -> Figures | None:
    record = json_object(file)
    if not isinstance(record.get("policy_version"), int):
        return None
    if not isinstance(record.get("pass_at_1"), (int, float)):
        return None
    return {name: record[name] for name in _FIGURES if record.get(name) is not None}
