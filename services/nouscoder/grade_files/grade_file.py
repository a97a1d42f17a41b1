"""Grades a file of submissions or samples.

INVARIANT: each entry has exactly one line in the output, in the order of the input, written and flushed as soon as all
earlier ones are known. A bad entry is reported there and at the end, and does not stop the others. At most AHEAD
entries are in memory for each submission that is graded at the same time.

INVARIANT: an output never replaces a file that is read. A resumed output keeps its lines up to the first that is torn
or has no verdict because the service failed; each entry has exactly one line in the end.

INVARIANT: memory grows with the number of problems and of bad lines shown, never with the number of submissions.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from nouscoder.atomic_files import naming_storage_faults, whole_or_gone
from nouscoder.client import GradingFailed
from nouscoder.config import Config
from nouscoder.data.bounded_files import STDIN
from nouscoder.data.problem_index import open_index_of
from nouscoder.data.problem_parquet import store_beside
from nouscoder.domain.estimates import USUAL_K, mean_pass_at_k
from nouscoder.domain.reasoning import UnknownPrompts, begun_by
from nouscoder.domain.verdict import VerdictKind
from nouscoder.errors import ExitCode, NousCoderError, Unusable, WrongUse, first_error, for_terminal
from nouscoder.grade_files.answers import (
    Answerer,
    BadEntry,
    Entry,
    GradingTarget,
    answers_of,
    library_fault_of,
    read_entries,
)
from nouscoder.progress_bar import progress_bar

# The output of `nouscoder grade`: one JSON line an entry, in the order of the entries, flushed line by line.


class OutputFault(Unusable):
    """The output does not belong to the input. The message names the file."""


def refuse_input(out: Path | None, inputs: tuple[Path | None, ...]) -> None:
    """Raises OutputFault when the output is one of the inputs."""
    for given in inputs:
        if out is not None and given is not None and given.exists() and out.exists() and out.samefile(given):
            raise OutputFault(f"--out {out} is the input itself: give another file")


_BEGIN = b'{"id": '  # of each line


def kept_lines(out: Path) -> Iterator[dict[str, Any]]:
    """The lines of an earlier output that a resumed grading keeps. The file is cut after the last of them.

    Raises OutputFault for a file with other lines, which is not changed.
    """
    end, is_kept = 0, True
    try:
        with out.open("rb") as file:
            for line in file:
                record = _record(line)
                is_torn = not line.endswith(b"\n") and line[: len(_BEGIN)] == _BEGIN[: len(line)]
                if not ("id" in record and {"verdict", "error"} & record.keys()) and (record or not is_torn):
                    raise OutputFault(f"{out} holds lines that are no verdicts of this command: give another --out")
                is_kept = is_kept and line.endswith(b"\n") and _is_kept(record)
                if is_kept:
                    end += len(line)
                    yield record
        os.truncate(out, end)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OutputFault(f"{out} cannot be read: {error.strerror or error}") from error


def _record(line: bytes) -> dict[str, Any]:
    """The record of a line; empty when it holds none."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _is_kept(record: dict[str, Any]) -> bool:
    """Whether it is a verdict of the program, or a bad line: these are not graded again."""
    is_ours = record.get("verdict", VerdictKind.INTERNAL_ERROR.value) == VerdictKind.INTERNAL_ERROR.value
    return not is_ours or bool(record.get("bad_line"))


@contextmanager
def opened_output(out: Path | None, *, resume: bool) -> Iterator[TextIO]:
    """The output, stdout when there is no file. Raises StorageError."""
    if out is None:
        yield sys.stdout
        return
    is_new = not out.exists()
    with naming_storage_faults(out):
        file = out.open("a" if resume else "w", encoding="utf8")
    try:
        with file:
            yield file
    finally:
        if is_new and not out.stat().st_size:  # not even one verdict found room
            out.unlink()


# The sum of a file's verdicts: counts by verdict, lines that could not be graded, pass@k.

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
