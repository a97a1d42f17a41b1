"""`nouscoder grade FILE`: reads submissions as JSONL and writes verdicts as JSONL, in the same order.

INVARIANT: every line is checked before the first one is graded. Each has exactly one line in the output, written as
soon as all earlier ones are known.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from prometheus_client import CollectorRegistry

from nouscoder.client.http import AsyncClient, GradingFailed
from nouscoder.config import Config
from nouscoder.errors import NousCoderError
from nouscoder.progress_bar import progress_bar
from nouscoder.verifier.api.schema import answer_record, parse_submission
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import open_sandbox
from nouscoder.verifier.settings import grading_policy, sandbox_config

SERVER_AT_ONCE = 16

Answerer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class BadFile(NousCoderError):
    """The file cannot be graded. The message names the file and the line."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line: its id, by default the number of the line, and the request without the id."""

    entry_id: object
    record: dict[str, Any]


def grade_file(path: Path, config: Config, out: Path | None = None, server: str | None = None) -> int:
    """Grade every line of `path`. Returns the exit code: 0 when each got a verdict other than internal_error, else 1.

    `out` is a file, or None for stdout. `server` is the URL of a grading service, or None to grade on this machine.
    Raises BadFile for an invalid line, before anything is graded, and Unusable when this machine cannot grade.
    """
    return asyncio.run(_grade_file(path, config, out, server))


async def _grade_file(path: Path, config: Config, out: Path | None, server: str | None) -> int:
    entries = read_entries(path)
    async with AsyncExitStack() as stack:
        answer, at_once = await stack.enter_async_context(_remote(server) if server else _local(config))
        # Opened last, so that an earlier output is not overwritten when no service is available.
        file = sys.stdout if out is None else stack.enter_context(_open_out(out))
        return await _grade_all(entries, answer, at_once, file)


def read_entries(path: Path) -> list[Entry]:
    """Every submission of a file. Raises BadFile naming the first invalid line."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror or error}") from error
    entries = [_entry(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not entries:
        raise BadFile(f"{path} holds no submission")
    return entries


def _entry(path: Path, number: int, line: bytes) -> Entry:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise BadFile(f"{path}:{number}: not one JSON object a line") from None
    if not isinstance(record, dict):
        raise BadFile(f"{path}:{number}: not one JSON object a line")
    entry_id = record.pop("id", number)
    try:
        parse_submission(json.dumps(record))
    except InvalidSubmission as error:
        raise BadFile(f"{path}:{number}: {error}") from None
    return Entry(entry_id, record)


def _open_out(out: Path) -> TextIO:
    try:
        return out.open("w", encoding="utf8")
    except OSError as error:
        raise BadFile(f"{out} cannot be written: {error.strerror or error}") from error


@asynccontextmanager
async def _local(config: Config) -> AsyncIterator[tuple[Answerer, int]]:
    sandbox = open_sandbox(sandbox_config(config.verifier))
    try:
        await sandbox.start()
        grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()), grading_policy(config.verifier))

        async def answer(record: dict[str, Any]) -> dict[str, Any]:
            return answer_record(await grader.grade(parse_submission(json.dumps(record))))

        yield answer, sandbox.num_slots
    finally:
        await sandbox.close()


@asynccontextmanager
async def _remote(server: str) -> AsyncIterator[tuple[Answerer, int]]:
    async with AsyncClient(server, num_connections=SERVER_AT_ONCE) as client:
        yield client.grade_record, SERVER_AT_ONCE


async def _grade_all(entries: list[Entry], answer: Answerer, at_once: int, out: TextIO) -> int:
    """Grade `at_once` submissions at a time. A failed one does not stop the others."""
    slots = asyncio.Semaphore(at_once)

    async def line(entry: Entry) -> dict[str, Any]:
        async with slots:
            try:
                return {"id": entry.entry_id, **await answer(entry.record)}
            except (GradingFailed, InvalidSubmission) as error:
                return {"id": entry.entry_id, "error": str(error)}

    all_good = True
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(line(entry)) for entry in entries]
        with progress_bar("grading", len(entries)) as advance:
            for task in tasks:
                record = await task
                all_good &= record.get("verdict", "internal_error") != "internal_error"
                out.write(json.dumps(record) + "\n")
                advance(1)
        out.flush()
    return 0 if all_good else 1
