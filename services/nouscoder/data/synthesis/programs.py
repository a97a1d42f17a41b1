"""Which tests a solver's program passes. The verifier runs the programs: here, or as a service.

INVARIANT: each result is in the log before it is used, never that of an internal_error, and what is in the log is not
graded again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nouscoder.client import GradingFailed
from nouscoder.config import Config
from nouscoder.data.asking import NotAnswered
from nouscoder.domain.submission import Submission
from nouscoder.domain.verdict import VerdictKind
from nouscoder.grade_files.answers import Answerer, BadEntry, local_answers, remote_answers
from nouscoder.grade_files.entries import Entry
from nouscoder.progress_bar import progress_bar
from nouscoder.record_log import RecordLog, key_of
from nouscoder.verifier.api.schema import request_of


@dataclass(frozen=True, slots=True)
class Verifier:
    """Where programs are run: by the grading service at `server`, else here with the settings of `config`."""

    config: Config
    server: str | None = None
    token: str | None = None


def result_key(submission: Submission) -> str:
    """The key of a program's result: a digest of its code, the tests and the rules."""
    return key_of(request_of(submission))


def grade_programs(submissions: Sequence[Submission], verifier: Verifier, results: RecordLog) -> None:
    """Grade every program without a result. A result has the places of the tests that it passes, `passed`.

    Raises NotAnswered when some got no verdict, after the results of the others are kept.
    """
    missing = {result_key(one): one for one in submissions if result_key(one) not in results}
    if missing:
        failures = asyncio.run(_grade_all(missing, verifier, results))
        if failures:
            raise NotAnswered(
                f"{len(failures)} programs got no verdict ({failures[0]:.200}); the other results are kept: start again"
            )


async def _grade_all(missing: dict[str, Submission], verifier: Verifier, results: RecordLog) -> list[str]:
    waiting, failures = iter(missing.items()), list[str]()
    where = (
        remote_answers(verifier.server, None, verifier.token, None)
        if verifier.server
        else local_answers(verifier.config, None)
    )
    async with where as (answer, at_once):
        with progress_bar("running programs", len(missing)) as advance:

            async def work(waiting: Iterator[tuple[str, Submission]]) -> None:
                for key, submission in waiting:
                    found = await _result(key, submission, answer)
                    if isinstance(found, str):
                        failures.append(found)
                    else:
                        results.add(key, found)
                    advance(1)

            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(work(waiting))
    return failures


async def _result(key: str, submission: Submission, answer: Answerer) -> dict[str, Any] | str:
    """The record of a program's result, or why there is none. A program that cannot be graded passes no test."""
    try:
        verdict = await answer(Entry(0, key, request=request_of(submission)))
    except BadEntry as error:
        return {"verdict": f"refused: {error}", "passed": []}
    except GradingFailed as error:
        if error.status == 422:
            return {"verdict": f"refused: {error}", "passed": []}
        return str(error)
    if verdict["verdict"] == VerdictKind.INTERNAL_ERROR.value:
        return f"internal_error: {verdict['detail']}"
    accepted = VerdictKind.ACCEPTED.value
    passed = [test["index"] for test in verdict["tests"] if test["outcome"] == accepted]
    return {"verdict": verdict["verdict"], "passed": passed}
