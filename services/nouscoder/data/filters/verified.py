"""Filters that run programs: reference solutions must pass, and known wrong solutions must fail."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field

from nouscoder.data.filters.graders import Program, grade_all
from nouscoder.data.filters.step import Candidate, Context, Outcome, Step
from nouscoder.data.json_records import checked_records
from nouscoder.data.references import Reference
from nouscoder.domain.verdict import VerdictKind
from nouscoder.formats.body import Body
from nouscoder.record_log import RecordLog

_ACCEPTED = VerdictKind.ACCEPTED.value


class ReferencesPass(Step):
    """Keeps problems whose reference solutions pass all tests."""

    filter: Literal["references_pass"]
    most: int = Field(1, ge=0, description="reference solutions of a problem that are run; 0: all")
    share: float = Field(1.0, gt=0, le=1, description="share of them that must pass")
    without: Literal["keep", "drop"] = Field("keep", description="problems without a reference solution")

    def apply(self, candidates: Sequence[Candidate], context: Context) -> Outcome:
        """See Step."""
        accepted, table = _graded(self._programs(candidates, context), context)
        dropped, notes = {}, {}
        for one in candidates:
            if not one.num_references:
                if self.without == "drop":
                    dropped[one.problem_id] = "no reference solution: none"
                continue
            tried = min(one.num_references, self.most) if self.most else one.num_references
            passed = accepted[one.problem_id]
            notes[one.problem_id] = {"references_passed": f"{passed}/{tried}"}
            if passed < self.share * tried:
                dropped[one.problem_id] = f"references fail: {passed} of {tried} passed"
        return Outcome(dropped, dict(notes), table)

    def _programs(self, candidates: Sequence[Candidate], context: Context) -> Iterator[Program]:
        for one, references in context.references(candidates):
            for reference in references[: self.most] if self.most else references:
                yield Program(one, reference)


class WrongSolution(Body):
    """A record of the file of wrong solutions."""

    problem_id: str
    code: str
    language: str = "python"


class WrongSolutionsFail(Step):
    """Keeps problems whose tests refuse the programs that are known to be wrong: the false-positive screen."""

    filter: Literal["wrong_solutions_fail"]
    file: str = Field(description="lines of {problem_id, code, language}; language is python by default")
    allowed: int = Field(0, ge=0, description="wrong solutions that may pass")

    def files(self) -> tuple[str, ...]:
        """See Step."""
        return (self.file,)

    def apply(self, candidates: Sequence[Candidate], context: Context) -> Outcome:
        """See Step."""
        accepted, table = _graded(self._programs(candidates, context), context)
        passing = {problem_id: count for problem_id, count in accepted.items() if count > self.allowed}
        return Outcome({one: f"wrong solutions pass: {count}" for one, count in passing.items()}, {}, table)

    def _programs(self, candidates: Sequence[Candidate], context: Context) -> Iterator[Program]:
        known = {one.problem_id: one for one in candidates}
        for wrong in checked_records(context.folder / self.file, WrongSolution):
            if wrong.problem_id in known:
                yield Program(known[wrong.problem_id], Reference(wrong.code, wrong.language))


def _graded(programs: Iterator[Program], context: Context) -> tuple[Counter[str], dict[str, int]]:
    """(accepted programs by problem, programs by verdict)."""
    with RecordLog(context.evidence, "verdict") as known:
        try:
            verdicts = asyncio.run(grade_all(programs, context.grading, known))
        except ExceptionGroup as group:  # of the workers, which all stop when one fails
            raise group.exceptions[0] from None
    accepted = Counter(problem_id for problem_id, verdict in verdicts if verdict == _ACCEPTED)
    return accepted, dict(sorted(Counter(verdict for _, verdict in verdicts).items()))
