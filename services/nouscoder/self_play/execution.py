"""What programs print: each program runs on one input in the verifier's sandbox, through its ordinary grading.

The verdict on a wrong answer shows the output, so a program is graded by one test whose expected output no program
prints. A longer output than the verdict shows counts as none. Programs are hostile, and run nowhere else.

INVARIANT: each result is in the log before it is used, never that of an internal_error, and what is in the log is not
run again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from nouscoder.data.synthesis.run import result_key
from nouscoder.domain.problem import GradingRules
from nouscoder.domain.submission import Comparator, StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.errors import first_error
from nouscoder.record_log import RecordLog
from nouscoder.verifier.judges.base import CLIP_CHARS

# Grades a submission; never with internal_error. The second argument names it in errors.
Grade = Callable[[Submission, str], Awaitable[Verdict]]

_UNEXPECTED = "an output that nobody expects"
_AT_ONCE = 16


def run_of(text: str, given: str, rules: GradingRules, *, is_program: bool) -> Submission:
    """One run on the input `given`, of a program, or of the program in an answer of the policy."""
    code = text if is_program or rules.text_is_code else None
    return Submission(
        tests=StdinTests((StdinCase(given, _UNEXPECTED),)),
        code=code,
        completion=text if code is None else None,
        limits=rules.limits,
        comparator=Comparator(),
        profile=rules.profile,
        prelude=rules.prelude,
    )


class Runs:
    """Runs submissions and keeps what came of them."""

    def __init__(self, log: RecordLog, grade: Grade) -> None:
        self._log = log
        self._grade = grade

    async def make(self, submissions: Sequence[Submission], progress: Callable[[int, int], None]) -> None:
        """Run all that have no result yet, several at a time. Raises what `grade` raises."""
        missing = {result_key(one): one for one in submissions if result_key(one) not in self._log}
        waiting, done = iter(missing.items()), 0

        async def work(waiting: Iterator[tuple[str, Submission]]) -> None:
            nonlocal done
            for key, submission in waiting:
                self._log.add(key, _record(await self._grade(submission, key)))
                done += 1
                progress(done, len(missing))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(_AT_ONCE):
                    group.create_task(work(waiting))
        except BaseExceptionGroup as failed:  # of the workers, which all stop when one fails
            raise first_error(failed) from None

    def output(self, submission: Submission) -> str | None:
        """What the run of `run_of` printed; None when it failed. Raises KeyError before it was made."""
        output: str | None = self._log.get(result_key(submission))["output"]
        return output

    def is_accepted(self, submission: Submission) -> bool:
        """Whether all tests passed. Raises KeyError before it was made."""
        return bool(self._log.get(result_key(submission))["verdict"] == VerdictKind.ACCEPTED.value)


def _record(verdict: Verdict) -> dict[str, Any]:
    failure, output = verdict.first_failure, None
    if verdict.kind is VerdictKind.WRONG_ANSWER and failure is not None and len(failure.output) < CLIP_CHARS:
        output = failure.output
    return {"verdict": verdict.kind.value, "output": output}
