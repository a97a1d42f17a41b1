"""The byte stream between a slot and its harness: pipes of a local process, or a network connection."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

# The environment of every harness. MALLOC_ARENA_MAX keeps threads from reserving 64 MiB of address space each, which
# RLIMIT_AS would count.
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "2",
    "NODE_PATH": "/usr/share/nodejs",  # where Debian puts packages; other builds of node do not look there
}
MAX_READ_AHEAD_BYTES = 1 << 20
_KEPT_LOG_BYTES = 4096


class Ending(StrEnum):
    """The reason for which a link is closed."""

    WORN = "worn"  # it has served the maximum number of submissions
    DOUBT = "doubt"  # an unexpected, late or missing answer, or the end of the service


class Link(Protocol):
    """The connection of one slot to its harness, from HELLO to its end."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def use_until_s(self) -> float:
        """The time (by time.monotonic) after which no new submission may begin."""
        ...

    @property
    def pid(self) -> int | None:
        """The pid of the harness if it is a process of this host, else None."""
        ...

    @property
    def tools(self) -> Mapping[str, str] | None:
        """The absolute paths of the tools of another machine, by name; None for the gateway's own machine."""
        ...

    @property
    def has_dialogue_socket(self) -> bool:
        """Whether the harness has a socket to that of its partner."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether the link is open, as far as is known."""
        ...

    def last_log_line(self) -> str:
        """The last line of the harness's log."""
        ...

    async def close(self, ending: Ending) -> None:
        """Kill the harness and all its processes. Bounded in time."""
        ...


class ProcessLink:
    """The link to a harness that is a process of this host, over pipes."""

    tools: Mapping[str, str] | None = None
    use_until_s = math.inf

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        end: Callable[[asyncio.subprocess.Process], Awaitable[None]],
        has_dialogue_socket: bool = False,
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.reader, self.writer = process.stdout, process.stdin
        self.has_dialogue_socket = has_dialogue_socket
        self._process = process
        self._end = end
        self._log = b""
        self._log_task = asyncio.create_task(self._keep_log(), name=f"log of {process.pid}")

    @staticmethod
    async def start(
        command: Sequence[str],
        end: Callable[[asyncio.subprocess.Process], Awaitable[None]] | None = None,
        peer: int | None = None,
    ) -> ProcessLink:
        """Start the harness. `end` ends it when the link is closed (default: `kill`).

        `peer` is a descriptor that it gets under the same number: the socket to its partner. Raises OSError.
        """
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=ENVIRONMENT,
            cwd="/",
            start_new_session=True,
            limit=MAX_READ_AHEAD_BYTES,
            pass_fds=() if peer is None else (peer,),
        )
        return ProcessLink(process, end or kill, peer is not None)

    @property
    def pid(self) -> int | None:
        """See `Link`."""
        return self._process.pid if self.is_open else None

    @property
    def is_open(self) -> bool:
        """See `Link`."""
        return self._process.returncode is None

    def last_log_line(self) -> str:
        """See `Link`."""
        return self._log.decode("utf-8", "replace").strip().rpartition("\n")[2]

    async def close(self, ending: Ending) -> None:
        """See `Link`. Raises TimeoutError when the process does not end."""
        try:
            await self._end(self._process)
        finally:
            self._log_task.cancel()
            # asyncio closes it only after the last pipe has ended, perhaps later than its event loop.
            self._process._transport.close()  # type: ignore[attr-defined]

    async def _keep_log(self) -> None:
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(_KEPT_LOG_BYTES):
            self._log = (self._log + chunk)[-_KEPT_LOG_BYTES:]


async def kill(process: asyncio.subprocess.Process, limit_s: float = 30.0) -> None:
    """Send SIGKILL and wait for the end. Raises TimeoutError.

    The rest of its output is read and dropped, because asyncio reports the end of a process only after the end of its
    pipes, and stops reading a pipe whose buffer is full.
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
        except RuntimeError:  # a session still reads from this pipe
            await asyncio.sleep(0.01)
