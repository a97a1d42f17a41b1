"""Reads the body of a request within limits of size and time, parses it, and ends the work for a client that has gone.

A decoder reads a whole text in one call, and the interpreter runs nothing else meanwhile, in whatever thread. So the
weight of the text (formats/json_values.py) is counted first, piece by piece. A body with too many values is refused.
One that a decoder would read for too long is decoded in a process of its own.

INVARIANT: no body above MAX_BYTES or MAX_WEIGHT is decoded, nor one in which an object has a key twice. A body above
SMALL_WEIGHT or SMALL_BYTES is parsed outside of the event loop, one at a time, without collections of garbage. What the
values of a body take is charged to the memory budget before it is decoded.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from nouscoder.atomic_files import naming_storage_faults
from nouscoder.formats.json_values import (
    BYTES_PER_WEIGHT,
    MAX_WEIGHT,
    RepeatedKey,
    TooManyValues,
    ValueCount,
    give_way,
    json_weight,
    without_collections,
)
from nouscoder.http_server.fair_queue import OneThread
from nouscoder.http_server.memory_budget import charge_decoded

READ_PATIENCE_S = 60.0
_PART_PATIENCE_S = 60.0  # for the next part of a body that goes to the disk
_FILE_PATIENCE_S = 3600.0  # for all of it
_NAMES = ("PATH", "PYTHONPATH", "LANG", "LD_LIBRARY_PATH")
ENVIRONMENT = {name: os.environ[name] for name in _NAMES if name in os.environ}  # of a process that decodes a body
_FLUSH_BYTES = 1024**2
_CODING_CHARS = 60
NOT_DECODED = "is not undone here: send the body as it is"  # said of a coding of a body
_UNWATCHED_S = 0.1  # most work ends sooner, and a task that watches for the client costs more than a timer


class BodyFault(Exception):
    """The body is refused. `status` is the HTTP status of the answer."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


def coding_of(scope: Scope) -> str:
    """The codings of a request's body, such as gzip, none of which is undone here; empty for a plain body."""
    if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
        return ""
    given = b",".join(value for name, value in scope["headers"] if bytes(name).lower() == b"content-encoding")
    codings = [one.strip().lower() for one in given.decode("latin-1").split(",")]
    return ", ".join(one for one in codings if one not in ("", "identity"))[:_CODING_CHARS]


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises BodyFault: 413 when it is too large (checked before reading), 408 when it is too slow."""
    return await read_whole(request.headers.get("content-length", ""), request.receive, max_bytes)


async def read_whole(declared: str, receive: Receive, max_bytes: int) -> bytes:
    """Like `read_body`, with the Content-Length header ("" without one) and ASGI's `receive`.

    Also raises ClientDisconnect.
    """
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(READ_PATIENCE_S):
            size = 0
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                size += len(part := message.get("body", b""))
                if size > max_bytes:
                    raise _too_large(max_bytes)
                parts.append(part)
                more = message.get("more_body", False)
    except TimeoutError:
        raise too_slow() from None
    return b"".join(parts)


def too_slow() -> BodyFault:
    """The body has not arrived in READ_PATIENCE_S."""
    return BodyFault(408, f"the body did not arrive within {READ_PATIENCE_S:.0f} s")


async def write_body(parts: AsyncIterator[bytes], file: Path, charge: Callable[[int], None]) -> None:
    """Write a body to a new file as it arrives. `charge` gets the size of each part, and may refuse it.

    Raises what `charge` raises, BodyFault and StorageError.
    """
    waiting = bytearray()
    with naming_storage_faults(file), file.open("xb") as output:
        try:
            async with asyncio.timeout(_FILE_PATIENCE_S):
                while (part := await asyncio.wait_for(anext(parts, None), _PART_PATIENCE_S)) is not None:
                    charge(len(part))
                    waiting += part
                    if len(waiting) >= _FLUSH_BYTES:
                        await asyncio.to_thread(output.write, bytes(waiting))
                        waiting.clear()
        except TimeoutError:
            raise BodyFault(408, "the body arrived too slowly") from None
        await asyncio.to_thread(_finish, output, bytes(waiting))


def _finish(output: BinaryIO, rest: bytes) -> None:
    output.write(rest)
    output.flush()
    os.fsync(output.fileno())


async def run_apart(module: str, *arguments: object, patience_s: float) -> tuple[int | None, bytes, bytes]:
    """Run `python -m module`, which decodes a body in a process of its own and sets its own limits of memory and time.

    Returns its exit code, stdout and stderr. One that takes longer than `patience_s` is killed: its code is None.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *map(str, arguments)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(patience_s):
            said = await process.communicate()
        return process.returncode, *said
    except TimeoutError:
        return None, b"", b""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _too_large(max_bytes: int) -> BodyFault:
    return BodyFault(413, f"must have at most {max_bytes} bytes")


Answer = TypeVar("Answer")


async def while_connected(receive: Receive, work: Awaitable[Answer]) -> Answer:
    """Await `work`. A client that disconnects cancels it, which frees what it holds at once. Raises BodyFault then.

    `receive` is ASGI's, of a request whose body has been read.
    """
    me = asyncio.current_task()
    assert me is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        me.cancel()

    watching: list[asyncio.Task[None]] = []
    timer = asyncio.get_running_loop().call_later(_UNWATCHED_S, lambda: watching.append(asyncio.create_task(watch())))
    try:
        return await work
    except asyncio.CancelledError:
        if not gone:
            raise
        me.uncancel()
        raise BodyFault(499, "the client disconnected") from None
    finally:
        timer.cancel()
        for task in watching:
            task.cancel()


MAX_BYTES = 8 * 1024**2
BODIES_OF_MANY = 8  # a batch of lines and a gRPC message may have so many times the bytes of one body
SMALL_BYTES = 256 * 1024
SMALL_WEIGHT = 10_000

Parsed = TypeVar("Parsed")
Parse = Callable[[bytes, ValueCount], Parsed]
Charge = Callable[[], Awaitable[None]]


def weight_of_json(body: bytes) -> int:
    """The weight of a body; of one with too many values, some weight above MAX_WEIGHT. Raises RepeatedKey."""
    return json_weight(body, MAX_WEIGHT)


class BodyParser:
    """Parses the bodies of one service.

    `too_large` makes its error for a body with too many bytes or values, `repeated` for one in which an object has a
    key twice, from the key.
    """

    def __init__(self, too_large: Callable[[str], Exception], repeated: Callable[[str], Exception]) -> None:
        self._too_large = too_large
        self._repeated = repeated
        self.thread = OneThread("parse")

    async def parsed(
        self,
        body: bytes,
        parse: Parse[Parsed],
        patiently: Callable[[Charge], Awaitable[None]] | None = None,
        weigh: Callable[[bytes], int] = weight_of_json,
    ) -> Parsed:
        """What `parse` makes of a body.

        `parse` also gets the count of the body's values, to which it adds texts that it decodes. `patiently` gets a
        function that charges the memory budget, and may call it again after MemoryBudgetExceeded. `weigh` returns the
        weight of a body that is not JSON. Raises what `parse` and `weigh` raise, what `too_large` and `repeated` make,
        MemoryBudgetExceeded, and QueueFull when other bodies take too long.
        """
        if len(body) > MAX_BYTES:
            raise self._too_large(f"must have at most {MAX_BYTES} bytes")
        is_short = len(body) <= SMALL_BYTES
        values = ValueCount()
        try:
            values.add_weight(weigh(body) if is_short else await self.thread.run(weigh, body))
            before = values.weight

            async def charge() -> None:
                charge_decoded(BYTES_PER_WEIGHT * before)

            await (charge() if patiently is None else patiently(charge))
            if is_short and before <= SMALL_WEIGHT:
                return parse(body, values)
            found: Parsed = await self.thread.run(_parsed_apart, parse, body, values)
        except TooManyValues as error:
            raise self._too_large(str(error)) from None
        except RepeatedKey as error:
            raise self._repeated(error.key) from None
        charge_decoded(BYTES_PER_WEIGHT * (values.weight - before))
        return found


def _parsed_apart(parse: Parse[Parsed], body: bytes, values: ValueCount) -> Parsed:
    give_way(len(body))  # the body before this one may have taken long, too
    with without_collections():
        return parse(body, values)
