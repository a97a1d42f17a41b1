"""Reads parts of many strings of Redis straight into one buffer.

Parts of many records are read straight into one buffer. The asyncio client of redis-py copies what it reads five times,
and spends some 40 microseconds of CPU time on each answer of a pipeline. Records are most of what the broker reads. So
here a connection of redis-py's pool, which is connected, logged in and encrypted as configured, gets another asyncio
protocol while it reads.

INVARIANT: a connection goes back to the pool in use only after all answers that it asked for were read. After an
error, and when a read is cancelled, it is closed, so no caller gets the answer to another caller's command.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection

# Before and after each string: "$LENGTH\r\n" and "\r\n".
_FRAME_BYTES = 24
# An error of Redis in place of a string is one line.
_ERROR_BYTES = 1024

Part = tuple[bytes, int, int]  # key, first byte, number of bytes


async def read_parts(redis: Redis, parts: Sequence[Part]) -> list[bytes]:
    """The bytes of each part: none where there is no such key, fewer where the string ends before.

    A connection that is lost is tried twice, as redis-py does. Raises RedisError and OSError.
    """
    pool = redis.connection_pool
    connection = await pool.get_connection()  # type: ignore[no-untyped-call]
    try:
        found: list[bytes] = await connection.retry.call_with_retry(
            lambda: _read(connection, parts), lambda error: connection.disconnect(nowait=True, error=error)
        )
        return found
    finally:
        await pool.release(connection)


async def _read(connection: AbstractConnection, parts: Sequence[Part]) -> list[bytes]:
    if not connection.is_connected:
        await connection.connect()  # type: ignore[no-untyped-call]
    writer = connection._writer
    assert writer is not None
    transport = writer.transport
    usual = transport.get_protocol()
    answers = _Answers(len(parts), sum(num_bytes for _, _, num_bytes in parts), usual)
    transport.set_protocol(answers)
    try:
        async with asyncio.timeout(connection.socket_timeout):
            transport.write(b"".join(_command(part) for part in parts))
            found = await answers.found
    except BaseException:
        await connection.disconnect(nowait=True)
        raise
    transport.set_protocol(usual)
    return found


def _command(part: Part) -> bytes:
    key, first, num_bytes = part
    words = (b"GETRANGE", key, b"%d" % first, b"%d" % (first + num_bytes - 1))
    return b"*4\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


class _Answers(asyncio.BufferedProtocol):
    """Reads `number` strings of `num_bytes` in all. `found` gets them, or the error."""

    def __init__(self, number: int, num_bytes: int, usual: asyncio.BaseProtocol) -> None:
        self.found: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        self._number = number
        self._usual = usual
        self._buffer = bytearray(num_bytes + number * _FRAME_BYTES + _ERROR_BYTES)
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._taken = 0
        self._strings: list[bytes] = []

    def get_buffer(self, sizehint: int) -> memoryview:
        """The free rest of the buffer; after the end, a place for bytes that nobody asked for."""
        return memoryview(bytearray(_FRAME_BYTES)) if self.found.done() else self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """More bytes came."""
        if self.found.done():
            return
        self._filled += nbytes
        try:
            while len(self._strings) < self._number and self._take():
                pass
        except exceptions.RedisError as error:
            self.found.set_exception(error)
            return
        if len(self._strings) == self._number:
            self.found.set_result(self._strings)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the read; the reader of redis-py learns of it as well."""
        if not self.found.done():
            self.found.set_exception(exceptions.ConnectionError(f"Redis closed the connection: {exc or 'end of data'}"))
        self._usual.connection_lost(exc)

    def _take(self) -> bool:
        """Take the next string if it is there as a whole. Raises RedisError for an error in its place."""
        end = self._buffer.find(b"\r\n", self._taken, self._filled)
        if end < 0:
            if self._filled == len(self._buffer):
                raise exceptions.InvalidResponse("Redis sent more than it was asked for")
            return False
        line = bytes(self._view[self._taken : end])
        if not line.startswith(b"$"):
            raise exceptions.ResponseError(line[1:].decode(errors="replace"))
        start = end + 2
        stop = start + int(line[1:])
        if stop + 2 > len(self._buffer):
            raise exceptions.InvalidResponse("Redis sent a longer string than it was asked for")
        if stop + 2 > self._filled:
            return False
        self._strings.append(bytes(self._view[start:stop]))
        self._taken = stop + 2
        return True
