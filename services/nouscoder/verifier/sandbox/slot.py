"""One slot: a zygote process, started by the backend's `Launch`, and the byte stream to it.

INVARIANT: a slot whose stream is out of step is killed and never used again; `ensure_usable` starts a new zygote. Every
END is answered by one READY. Frames before the last expected READY belong to earlier sessions.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum

from nouscoder.config import SandboxSection
from nouscoder.verifier.harness import frames
from nouscoder.verifier.harness.frames import FrameKind
from nouscoder.verifier.sandbox.base import SandboxError, SandboxUnavailable
from nouscoder.verifier.sandbox.cgroup import UNGROUPED, SlotGroup

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
_FIRST_BYTES = 1 << 18  # a frame that belongs to no session
_UNDRAINED_BYTES = 1 << 15  # below asyncio's high-water mark, where drain() would not wait


class Link(ABC):
    """The connection of one slot to its harness, from HELLO to its end."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    use_until_s = math.inf  # by time.monotonic; after it no new submission may begin
    tools: Mapping[str, str] | None = None  # absolute paths on another machine, by name; None: those of the gateway's
    has_dialogue_socket = False  # to the harness of its partner

    @property
    def pid(self) -> int | None:
        """The pid of the harness if it is a process of this host, else None."""
        return None

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether the link is open, as far as is known."""

    @abstractmethod
    def last_log_line(self) -> str:
        """The last line of the harness's log."""

    @abstractmethod
    async def close(self, *, worn: bool = False) -> None:
        """Kill the harness and all its processes. Bounded in time.

        `worn`: it has served the maximum number of submissions. Otherwise its state is in doubt, or the service ends.
        """


class ProcessLink(Link):
    """The link to a harness that is a process of this host, over pipes."""

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
        return self._process.pid if self.is_open else None

    @property
    def is_open(self) -> bool:
        return self._process.returncode is None

    def last_log_line(self) -> str:
        return self._log.decode("utf-8", "replace").strip().rpartition("\n")[2]

    async def close(self, *, worn: bool = False) -> None:
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


class Launch(ABC):
    """Starts harnesses for one slot, one at a time."""

    @abstractmethod
    async def open(self) -> Link:
        """Start a fresh harness, which sends HELLO. Raises OSError or SandboxUnavailable. Bounded in time."""

    @abstractmethod
    def explain(self, reason: str) -> str:
        """One sentence that says why no slot starts, what is missing and how to get it."""

    async def lacked_memory(self) -> bool:
        """Whether what the last harness ran on has ended for lack of memory. Waits some seconds for the news.

        False where only the group of the slot knows (sandbox/cgroup.py), or nothing but the host's memory bounds it.
        """
        return False


class SlotEnded(SandboxError):
    """The zygote has ended."""


class SlotState(Enum):
    """DOWN -> READY (a fresh sandbox exists) -> IN_USE -> RECYCLING (it is being made) -> IN_USE; any -> DOWN."""

    DOWN = "down"
    RECYCLING = "recycling"
    READY = "ready"
    IN_USE = "in_use"


class Slot:
    """Used by one session at a time."""

    def __init__(
        self,
        index: int,
        config: SandboxSection,
        launch: Launch,
        max_sessions: float = math.inf,
        group: SlotGroup = UNGROUPED,
    ) -> None:
        self.index = index
        self.group = group
        self.state = SlotState.DOWN
        self._config = config
        self.launch = launch
        self._max_sessions = max_sessions  # per zygote; then a new one is started
        self._num_sessions = 0
        self._in_step = True
        self._is_retired = False
        self._num_owed = 0  # READY frames to expect before the first answer to the current session
        self._link: Link | None = None
        # The longest frame of the current session, and of the one before it.
        self._most_bytes = self._earlier_bytes = _FIRST_BYTES

    @property
    def tools(self) -> Mapping[str, str] | None:
        return self._link.tools if self._link is not None else None

    @property
    def pid(self) -> int | None:
        """The pid of the zygote if it is a process of this host, else None."""
        return self._link.pid if self._link is not None else None

    @property
    def has_dialogue_socket(self) -> bool:
        """Whether the slot has a socket to the slot of its partner."""
        return self._link is not None and self._link.has_dialogue_socket

    @property
    def _is_up(self) -> bool:
        return self._link is not None and self._link.is_open

    @property
    def _is_worn(self) -> bool:
        over = self._link is not None and _has_passed(self._link.use_until_s)
        return over or self._is_retired or self._num_sessions >= self._max_sessions

    async def ensure_usable(self) -> None:
        """Make sure that a fresh sandbox exists or is being made. Raises SandboxUnavailable if the host cannot."""
        usable = self.state in (SlotState.READY, SlotState.RECYCLING) and self._in_step and self._is_up
        if not usable or self._is_worn:
            await self.stop()
            try:
                self._link = await self.launch.open()
            except OSError as error:
                raise SandboxUnavailable(self.launch.explain(str(error))) from error
            self._num_sessions = 0
            self._in_step, self._is_retired = True, False
            self._most_bytes = self._earlier_bytes = _FIRST_BYTES
            try:
                kind, hello = await self.receive(self._config.start_limit_s)
                if kind is not FrameKind.HELLO:
                    raise SandboxError(f"slot {self.index} began with {kind.name}")
                _check_hello(hello)
                self._num_owed = 1
                await self.await_ready()
                self.state = SlotState.READY
            except SandboxError as error:
                await self.stop()
                raise SandboxUnavailable(self.launch.explain(str(error))) from error

    async def await_ready(self) -> None:
        """Wait until the sandbox in use is ready. Answers of an abandoned run are skipped.

        Raises SandboxError; frames that were already sent are lost then.
        """
        while self._num_owed:
            kind, _ = await self.receive(self._config.start_limit_s)
            self._num_owed -= kind is FrameKind.READY

    def begin(self, most_bytes: int) -> None:
        """Give the sandbox to a session whose frames have at most `most_bytes` bytes each.

        The session may send at once and must then `await_ready`.
        """
        self._earlier_bytes, self._most_bytes = self._most_bytes, most_bytes
        self.state = SlotState.IN_USE
        self._num_sessions += 1

    def end_session(self) -> bool:
        """End the session; the slot kills its processes. Returns False when the slot must be stopped instead."""
        if self.state is not SlotState.IN_USE:
            return self.state is not SlotState.DOWN
        if not self._in_step or self._is_worn or not self._is_up:
            return False
        try:
            self._write(FrameKind.END)
        except SandboxError:
            return False
        self._num_owed += 1
        self.state = SlotState.RECYCLING
        return True

    async def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Send a frame. Raises SandboxError when the slot has ended, ValueError when the payload is too long."""
        writer = self._write(kind, payload)
        try:
            if writer.transport.get_write_buffer_size() > _UNDRAINED_BYTES:
                async with asyncio.timeout(self._config.start_limit_s):
                    await writer.drain()
        except (OSError, TimeoutError) as error:
            raise SandboxError(f"slot {self.index} does not accept input: {error!r}") from error

    def _write(self, kind: FrameKind, payload: bytes = b"") -> asyncio.StreamWriter:
        if self._link is None or not self._link.is_open:
            raise SlotEnded(f"slot {self.index} has ended")
        self._link.writer.write(frames.encode(kind, payload))
        return self._link.writer

    async def receive(self, limit_s: float) -> tuple[FrameKind, bytes]:
        """The next frame.

        Raises SandboxError at the end of the stream, after `limit_s`, or for a frame that is too long or FAILED.
        """
        link = self._link
        most_bytes = max(self._most_bytes, self._earlier_bytes) if self._num_owed else self._most_bytes
        if link is None:
            raise SlotEnded(f"slot {self.index} has ended")
        try:
            async with asyncio.timeout(limit_s):
                number, length = frames.HEADER.unpack(await link.reader.readexactly(frames.HEADER.size))
                self._in_step = False  # a cancellation here would leave the payload in the stream
                if length > most_bytes:
                    raise SandboxError(f"slot {self.index} sent a frame of {length} bytes")
                payload = await link.reader.readexactly(length) if length else b""
                self._in_step = True
                kind = FrameKind(number)
        except TimeoutError as error:
            raise SandboxError(f"slot {self.index} did not answer within {limit_s:.0f} s") from error
        except (asyncio.IncompleteReadError, OSError) as error:
            raise SlotEnded(f"slot {self.index} ended. {link.last_log_line()}") from error
        except ValueError as error:
            raise SandboxError(f"slot {self.index} sent a frame of an unknown kind") from error
        if kind is FrameKind.FAILED:
            raise SandboxError(f"slot {self.index}: {payload.decode('utf-8', 'replace')}")
        return kind, payload

    def retire(self) -> None:
        """Use this zygote for no further session."""
        self._is_retired = True

    async def stop(self, worn: bool = False) -> None:
        """Kill the zygote with every sandbox process below it, and wait for the end.

        With `worn`, or after its last session, whatever it runs on is replaced too.
        """
        self.state = SlotState.DOWN
        link, self._link = self._link, None
        if link is not None:
            worn = self._in_step and (worn or self._num_sessions >= self._max_sessions or _has_passed(link.use_until_s))
            await link.close(worn=worn)


def _has_passed(time_s: float) -> bool:
    return time.monotonic() >= time_s


def _check_hello(hello: bytes) -> None:
    """Raises SandboxError when it is not JSON."""
    try:
        json.loads(hello)
    except (ValueError, RecursionError) as error:
        raise SandboxError("the first frame is not JSON") from error


def host_is_root() -> bool:
    """Whether this process is root, so that two separate users can be mapped into a sandbox."""
    return os.geteuid() == 0
