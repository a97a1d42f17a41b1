"""The sum of a file's verdicts: counts by verdict, lines that could not be graded, pass@k.

INVARIANT: memory grows with the number of problems and of bad lines shown, never with the number of submissions.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from nouscoder.domain.estimates import USUAL_K, mean_pass_at_k
from nouscoder.domain.reasoning import UnknownPrompts
from nouscoder.domain.verdict import VerdictKind

_BAD_LINES_SHOWN = 1000
_REASONS_SHOWN = 5


@dataclass(slots=True)
class GradeSummary:
    """Counts so far. `by_problem` has (graded, accepted) of each problem; failures of the service count in neither."""

    verdicts: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    by_problem: dict[str, list[int]] = field(default_factory=dict)
    num_bad: int = 0
    num_failed: int = 0
    bad_lines: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)  # of the first failures of the service
    prompts: UnknownPrompts = field(default_factory=UnknownPrompts)

    def add(self, number: int, problem_id: str, record: dict[str, Any]) -> None:
        """Count a line of the output."""
        verdict = record.get("verdict")
        if record.get("bad_line"):
            self.num_bad += 1
            if len(self.bad_lines) < _BAD_LINES_SHOWN:
                self.bad_lines.append(f"line {number}: {record['error']}")
        elif verdict is None or verdict == VerdictKind.INTERNAL_ERROR.value:
            self.num_failed += 1
            reason = str(record.get("error") or record.get("detail") or VerdictKind.INTERNAL_ERROR.value)
            if reason in self.reasons or len(self.reasons) < _REASONS_SHOWN:
                self.reasons[reason] += 1
        else:
            self.verdicts[verdict] += 1
            self.languages.update([record["language"]] if "language" in record else [])
            if problem_id:
                counts = self.by_problem.setdefault(problem_id, [0, 0])
                counts[0] += 1
                counts[1] += verdict == VerdictKind.ACCEPTED.value

    @property
    def num_lines(self) -> int:
        """All lines of the output."""
        return self.verdicts.total() + self.num_bad + self.num_failed

    @property
    def pass_at_k(self) -> dict[int, float]:
        """pass@k for each usual k that every problem has samples for."""
        counts = [(graded, accepted) for graded, accepted in self.by_problem.values()]
        found = {k: mean_pass_at_k(counts, k) for k in USUAL_K}
        return {k: value for k, value in found.items() if value is not None}

    def record(self) -> dict[str, Any]:
        """The summary as JSON."""
        return {
            "submissions": self.num_lines,
            "verdicts": dict(self.verdicts.most_common()),
            "languages": dict(self.languages.most_common()),
            "without_verdict": self.num_failed,
            "bad_lines": self.num_bad,
            "bad_line_reasons": self.bad_lines,
            "problems": len(self.by_problem),
            "pass_at_k": {str(k): value for k, value in self.pass_at_k.items()},
        }

    def text(self) -> str:
        """The summary as a table for people."""
        graded = self.verdicts.total()
        rows = [(kind, f"{count}", f"{count / graded:.1%}") for kind, count in self.verdicts.most_common()]
        rows += [("without verdict", f"{self.num_failed}", "")] if self.num_failed else []
        rows += [("bad lines", f"{self.num_bad}", "")] if self.num_bad else []
        rows += [(f"pass@{k}", f"{value:.4f}", "") for k, value in self.pass_at_k.items()]
        lines = [f"{name:<24}{value:>10}{share:>9}".rstrip() for name, value, share in rows]
        problems = f" of {len(self.by_problem)} problem{'s' * (len(self.by_problem) != 1)}" if self.by_problem else ""
        reasons = [f"without verdict: {reason} ({count})" for reason, count in self.reasons.most_common()]
        counts = ", ".join(f"{language} {count}" for language, count in self.languages.most_common())
        languages = f"; graded as {counts}" if counts else ""
        head = f"{self.num_lines} submission{'s' * (self.num_lines != 1)}{problems}{languages}"
        return "\n".join([*self.bad_lines, *reasons, head, *lines])
