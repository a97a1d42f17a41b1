"""The stream of one slot to the harness behind it, whatever stands in between: a pipe, or a network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Protocol

ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "2"}
MAX_READ_AHEAD_BYTES = 1 << 20
_KEPT_LOG_BYTES = 4096


class Ending(StrEnum):
    """Why a link is closed."""

    WORN = "worn"  # it has served as many submissions as it may
    DOUBT = "doubt"  # an answer out of step, late or missing, or the end of the service


class Link(Protocol):
    """Used by one slot, from HELLO to its end."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def pid(self) -> int | None:
        """Of the harness, where it is a process of this host."""
        ...

    @property
    def is_open(self) -> bool:
        """As far as is known now."""
        ...

    def last_words(self) -> str:
        """The end of what it had to say beside the stream, in one line."""
        ...

    async def close(self, ending: Ending) -> None:
        """Kill what is at the other end, and all below it. Bounded in time."""
        ...


class ProcessLink:
    """A harness that is a process of this host, on pipes."""

    def __init__(
        self, process: asyncio.subprocess.Process, put_away: Callable[[asyncio.subprocess.Process], Awaitable[None]]
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.reader, self.writer = process.stdout, process.stdin
        self._process = process
        self._put_away = put_away
        self._log = b""
        self._log_task = asyncio.create_task(self._keep_log(), name=f"log of {process.pid}")

    @staticmethod
    async def start(
        command: Sequence[str], put_away: Callable[[asyncio.subprocess.Process], Awaitable[None]] | None = None
    ) -> ProcessLink:
        """Start it; `put_away` kills it in the end. Raises OSError."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=ENVIRONMENT,
            cwd="/",
            start_new_session=True,
            limit=MAX_READ_AHEAD_BYTES,
        )
        return ProcessLink(process, put_away or kill)

    @property
    def pid(self) -> int | None:
        """See `Link`."""
        return self._process.pid if self.is_open else None

    @property
    def is_open(self) -> bool:
        """See `Link`."""
        return self._process.returncode is None

    def last_words(self) -> str:
        """See `Link`."""
        return self._log.decode("utf-8", "replace").strip().rpartition("\n")[2]

    async def close(self, ending: Ending) -> None:
        """See `Link`. Raises TimeoutError when it does not die."""
        try:
            await self._put_away(self._process)
        finally:
            self.writer.close()
            self._log_task.cancel()

    async def _keep_log(self) -> None:
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(_KEPT_LOG_BYTES):
            self._log = (self._log + chunk)[-_KEPT_LOG_BYTES:]


async def kill(process: asyncio.subprocess.Process, limit_s: float = 30.0) -> None:
    """SIGKILL, and wait. Raises TimeoutError.

    What it still had to say is read and dropped: asyncio tells of a process's end only when its pipes are at theirs,
    and stops reading a pipe whose reader is full.
    """
    if process.returncode is None:
        process.kill()
    async with asyncio.timeout(limit_s):
        if process.stdout is not None:
            await _drop_the_rest(process.stdout)
        await process.wait()


async def _drop_the_rest(stdout: asyncio.StreamReader) -> None:
    while True:
        try:
            if not await stdout.read(1 << 16):
                return
        except RuntimeError:  # a session still reads an answer, which comes whole or never
            await asyncio.sleep(0.01)
