"""PUT /v1/tests: the only way for tests that are too large for the body of a request.

A body of at most `max_body_bytes` is parsed like any other. A larger one, one with more values than a body may have,
and one of unknown length go to the disk as they arrive. Then a process converts them, case by case, to the file that
the store keeps: a decoder stalls the interpreter that it runs in.

INVARIANT: of a body that goes to the disk this process holds only the part that arrives. One body of each client is
there at a time, those of all have at most MAX_BYTES_ON_DISK, and MOST_AT_ONCE are converted at once. The process that
converts has limits of memory and time. When a body is refused, cut or too slow nothing stays on the disk.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from mmap import ACCESS_READ, mmap
from pathlib import Path
from weakref import WeakValueDictionary

from fastapi import Request

from nouscoder.domain.submission import Tests
from nouscoder.formats.sent_tests import NotTests, sent_tests
from nouscoder.http_server.body import read_body, run_apart, while_connected, write_body
from nouscoder.http_server.memory_budget import stored_parts
from nouscoder.store.case_files import unpacked, write_tests
from nouscoder.store.tests import StoredTests
from nouscoder.verifier.access.caller import current_caller
from nouscoder.verifier.access.stored_tests import ClientTests
from nouscoder.verifier.api.schema import bodies, parse_tests
from nouscoder.verifier.grading.grader import QueueFull
from nouscoder.verifier.grading.validation import Bounds, InvalidSubmission, TooLarge, validate_tests

MOST_AT_ONCE = 2
MAX_BODY_BYTES = 256 * 1024**2
MAX_BYTES_ON_DISK = 2 * MAX_BODY_BYTES  # the chart's volume has room for these bodies and the files made of them
_RETRY_AFTER_S = 5
_MEMORY_BYTES = 2 << 30  # beside the file itself
_CPU_TIME_S = 600
_PATIENCE_S = 900.0
_converting = asyncio.Semaphore(MOST_AT_ONCE)


class TestsUpload:
    """Stores the tests that clients send."""

    __test__ = False  # not a pytest class

    def __init__(self, client_tests: ClientTests, max_body_bytes: int) -> None:
        self._client_tests = client_tests
        self._max_body_bytes = max_body_bytes
        self._of_clients: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._all_bytes = 0

    async def put(self, request: Request) -> StoredTests:
        """Store the tests of a request. Raises the errors of `answer_to`."""
        client, declared = current_caller().client, request.headers.get("content-length", "")
        parts = stored_parts(request)
        if declared.isdigit() and int(declared) <= self._max_body_bytes:
            body = await read_body(request, self._max_body_bytes)
            try:
                return await self._client_tests.put(client, await bodies.parsed(body, parse_tests))
            except TooLarge:
                parts = _one_part(body)
        lock = self._of_clients.setdefault(client, asyncio.Lock())
        async with lock, self._on_disk(parts) as source:
            target = source.with_name("tests")
            stored = await while_connected(request.receive, converted(source, target))
            return await self._client_tests.put(client, target, stored)

    @asynccontextmanager
    async def _on_disk(self, parts: AsyncIterator[bytes]) -> AsyncIterator[Path]:
        """A file with the body, deleted at the end. Raises InvalidSubmission, QueueFull, BodyFault and StorageError."""
        num_bytes = 0

        def charge(more: int) -> None:
            nonlocal num_bytes
            num_bytes += more
            self._all_bytes += more
            if num_bytes > MAX_BODY_BYTES:
                raise InvalidSubmission("body", f"must have at most {MAX_BODY_BYTES} bytes")
            if self._all_bytes > MAX_BYTES_ON_DISK:
                raise QueueFull(_RETRY_AFTER_S)

        with tempfile.TemporaryDirectory(prefix="nouscoder-tests-") as folder:
            try:
                source = Path(folder) / "body"
                await write_body(parts, source, charge)
                yield source
            finally:
                self._all_bytes -= num_bytes


async def _one_part(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def tests_of_message(data: bytes) -> tuple[Tests, str]:
    """(tests, digest) of a gRPC message with too many values for one decoder, compressed. Raises InvalidSubmission.

    The message is in memory already, so its bytes are counted in the memory budget.
    """
    with tempfile.TemporaryDirectory(prefix="nouscoder-tests-") as folder:
        source, target = Path(folder) / "body", Path(folder) / "tests"
        await asyncio.to_thread(source.write_bytes, data)
        stored = await converted(source, target)
        return unpacked(await asyncio.to_thread(target.read_bytes)), stored.digest


async def converted(source: Path, target: Path) -> StoredTests:
    """Convert a file that a client has sent to the file of its tests. Raises InvalidSubmission."""
    async with _converting:
        code, said, _ = await run_apart(__name__, source, target, patience_s=_PATIENCE_S)
    if code != 0:
        raise InvalidSubmission("body", "the tests cannot be read within the limits of memory and time")
    answer = json.loads(said)
    if "field" in answer:
        raise InvalidSubmission(answer["field"], answer["detail"])
    return StoredTests(**answer)


def convert(source: Path, target: Path) -> dict[str, object]:
    """The fields of StoredTests, or `field` and `detail` of a fault. `target` is then the file of the tests."""
    with source.open("rb") as sent, target.open("xb") as output:
        try:
            with mmap(sent.fileno(), 0, access=ACCESS_READ) as text:
                tests = sent_tests(text, Bounds().num_tests)
                validate_tests(tests, Bounds())
                digest, num_bytes = write_tests(tests, output)
                num_tests = len(tests.cases)
        except NotTests as error:
            return {"field": error.field, "detail": str(error)}
        except InvalidSubmission as error:
            return {"field": error.field, "detail": str(error).removeprefix(f"{error.field}: ")}
        except ValueError as error:  # an empty file, or text that is not Unicode
            return {"field": "body", "detail": str(error)}
        return {"digest": digest, "num_tests": num_tests, "num_bytes": num_bytes, "file_bytes": output.tell()}


def main(source: Path, target: Path) -> None:
    """Convert in a process of its own. Prints the answer."""
    memory_bytes = _MEMORY_BYTES + source.stat().st_size
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_TIME_S, _CPU_TIME_S))
    sys.stdout.write(json.dumps(convert(source, target)))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
