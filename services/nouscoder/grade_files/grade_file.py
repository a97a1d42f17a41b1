"""Grades a file of submissions or samples.

INVARIANT: each entry has exactly one line in the output, in the order of the input, written and flushed as soon as all
earlier ones are known. A bad entry is reported there and at the end, and does not stop the others. At most AHEAD
entries are in memory for each submission that is graded at the same time.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from nouscoder.atomic_files import whole_or_gone
from nouscoder.client import GradingFailed
from nouscoder.config import Config
from nouscoder.data.bounded_files import STDIN
from nouscoder.data.problem_index import open_index_of
from nouscoder.data.problem_parquet import store_beside
from nouscoder.domain.reasoning import begun_by
from nouscoder.errors import ExitCode, NousCoderError, Unusable, WrongUse, first_error, for_terminal
from nouscoder.grade_files.answers import Answerer, GradingTarget, answers_of, library_fault_of
from nouscoder.grade_files.entries import BadEntry, Entry, read_entries
from nouscoder.grade_files.output import OutputFault, kept_lines, opened_output, refuse_input
from nouscoder.grade_files.summary import GradeSummary
from nouscoder.progress_bar import progress_bar

AHEAD = 4


class NothingToGrade(Unusable):
    """The input has no entry."""


@dataclass(frozen=True, slots=True)
class FileRequest:
    """What `nouscoder grade` is asked. `out` None is stdout; `server` None grades on this machine."""

    file: Path
    out: Path | None = None
    problems: Path | None = None
    server: str | None = None
    token: str | None = None
    ca: Path | None = None
    resume: bool = False
    skip_bad: bool = False
    prefill: str = ""


def grade_file(request: FileRequest, config: Config) -> tuple[GradeSummary, int]:
    """Grade every entry. Returns the summary and the exit code.

    The code is 0 when each entry has a verdict other than internal_error; with `skip_bad` bad entries do not count.
    Raises Unusable when nothing can be graded, and OutputFault.
    """
    refuse_input(request.out, (request.file, request.problems))
    if request.resume and (request.out is None or request.file == STDIN):
        raise WrongUse("--resume needs --out FILE and an input that is a file")
    summary = asyncio.run(_grade(request, config))
    good = not summary.num_failed and (request.skip_bad or not summary.num_bad)
    return summary, ExitCode.OK if good else ExitCode.NO


async def _grade(request: FileRequest, config: Config) -> GradeSummary:
    summary = GradeSummary()
    async with AsyncExitStack() as stack:
        until_accepted = stack.enter_context(ExitStack())
        problems = None
        if request.problems is not None:
            until_accepted.enter_context(whole_or_gone(store_beside(request.problems)))
            problems = stack.enter_context(closing(open_index_of(request.problems)))
        entries = read_entries(request.file, None if problems is None else problems.problem_ids, request.prefill)
        if request.resume and request.out is not None:
            _skip_graded(request.out, entries, summary)
        first = next(entries, None)
        if first is None and not summary.num_lines:
            raise NothingToGrade(f"{request.file} holds no submission")
        answer, at_once = await stack.enter_async_context(
            answers_of(GradingTarget(config.verifier, request.server, request.token, request.ca), problems)
        )
        if problems is not None:
            needed, of = Counter(problems.libraries().values()), f"{len(problems.problem_ids)} problems"
            lacking = await library_fault_of(answer, needed, of)
            sys.stderr.write(for_terminal(f"warning: {request.problems}: {lacking}\n" if lacking else ""))
        # Opened last, so that an earlier output is not overwritten when no service is available.
        out = stack.enter_context(opened_output(request.out, resume=request.resume))
        until_accepted.close()
        advance = stack.enter_context(progress_bar("grading", None))
        if first is not None:
            await _Grading(answer, at_once, out, summary, advance).run(first, entries)
            sys.stderr.write(for_terminal(summary.prompts.warning()))
    return summary


def _skip_graded(out: Path, entries: Iterator[Entry], summary: GradeSummary) -> None:
    """Count the lines of an earlier output, and skip their entries. Raises OutputFault when they do not belong."""
    for record in kept_lines(out):
        entry = next(entries, None)
        if entry is None or entry.entry_id != record["id"]:
            place = "after the end of the input" if entry is None else f"where the input has {entry.entry_id!r}"
            raise OutputFault(f"{out} is no output of this input: it has id {record['id']!r} {place}")
        summary.add(entry.number, entry.problem_id, record)


class _Grading:
    """Reads, grades and writes at the same time."""

    def __init__(
        self, answer: Answerer, at_once: int, out: TextIO, summary: GradeSummary, advance: Callable[[float], None]
    ) -> None:
        self._answer = answer
        self._slots = asyncio.Semaphore(at_once)
        # In the order of the entries. Its bound is what keeps the reader from running ahead.
        self._tasks: asyncio.Queue[tuple[Entry, asyncio.Task[dict[str, Any]]] | None] = asyncio.Queue(AHEAD * at_once)
        self._out = out
        self._summary = summary
        self._advance = advance

    async def run(self, first: Entry, entries: Iterator[Entry]) -> None:
        """Grade all entries. Raises what reading and writing raise."""
        try:
            # A writer that fails must not leave the reader waiting for room, nor the other way round.
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(first, entries, group))
                group.create_task(self._write())
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None

    async def _read(self, first: Entry, entries: Iterator[Entry], group: asyncio.TaskGroup) -> None:
        entry: Entry | None = first
        while entry is not None:
            await self._tasks.put((entry, group.create_task(self._line(entry))))
            entry = await asyncio.to_thread(next, entries, None)
        await self._tasks.put(None)

    async def _line(self, entry: Entry) -> dict[str, Any]:
        if entry.fault:
            return {"id": entry.entry_id, "error": entry.fault, "bad_line": True}
        named = {"id": entry.entry_id, **({"task_id": entry.problem_id} if entry.problem_id else {})}
        async with self._slots:
            try:
                return {**named, **await self._answer(entry)}
            except BadEntry as error:
                return {**named, "error": str(error), "bad_line": True}
            except GradingFailed as error:
                return {**named, "error": str(error), **({"bad_line": True} if error.status in (413, 422) else {})}
            except NousCoderError as error:
                return {"id": entry.entry_id, "error": str(error)}

    async def _write(self) -> None:
        while (item := await self._tasks.get()) is not None:
            entry, task = item
            record = await task
            self._summary.add(entry.number, entry.problem_id, record)
            asked = entry.request or {}
            if isinstance(asked.get("completion"), str):
                self._summary.prompts.add(begun_by(asked.get("prompt"), asked["completion"]))
            self._out.write(json.dumps(record) + "\n")
            self._out.flush()
            self._advance(1)
