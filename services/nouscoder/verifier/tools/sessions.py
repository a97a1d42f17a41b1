"""Tool sessions: interpreters of callers, in number, time and memory bounded, and shared fairly between clients.

INVARIANT: at most `sessions` sessions are open, each with at most one interpreter, in the slots of the sandbox that
belong to tool sessions. At most as many calls run at once as there are grading slots; clients take turns. No call takes
a grading slot. A session ends when its caller leaves (also by a broken connection), after `idle_s` seconds without a
call, after `calls` calls, and when it must give its place to another client (places.py): then its next call fails with
the reason. With it ends its interpreter. Between two calls no process of the interpreter runs. A call that does not end
within its limits ends the interpreter with all its processes; the next call starts another. What the code does is an
answer, never an error.

The sandbox is that of every candidate: the code has no network, no file of the host, and nothing of a problem's tests.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from nouscoder.config import ToolSessionsSection
from nouscoder.domain.conversation import CallEnd, InterpreterAnswer
from nouscoder.domain.submission import Limits
from nouscoder.errors import NousCoderError
from nouscoder.http_server.fair_queue import FairSlots
from nouscoder.verifier.access.caller import current_caller
from nouscoder.verifier.access.quotas import Quotas
from nouscoder.verifier.grading.time_limits import ExclusiveRunLock
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.observe.audit import AuditLog
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.base import Dialogue, Exit, Program, RunResult, Sandbox, SandboxError
from nouscoder.verifier.toolchains.languages import installed
from nouscoder.verifier.tools.places import Sharing, ToolPlace, ToolPlaces

_KEPT_BYTES = 32 * 1024  # of an output: so many of its beginning, and as many of its end
_OUTPUT_BYTES = 4 * 1024**2  # of an interpreter's whole life
_PROCESSES = 32
_ENDS = {
    Exit.EXITED: CallEnd.EXITED,
    Exit.SIGNALLED: CallEnd.EXITED,
    Exit.TIME_LIMIT: CallEnd.TIME_LIMIT,
    Exit.MEMORY_LIMIT: CallEnd.MEMORY_LIMIT,
    Exit.OUTPUT_LIMIT: CallEnd.OUTPUT_LIMIT,
}
_DELIVERY_S = 5.0  # for the last answer of a session that must end
_FOR_ANOTHER = "the session has ended: another client with fewer sessions was waiting for its place"
Request = TypeVar("Request")
Answer = TypeVar("Answer")
MAX_CODE_BYTES = 256 * 1024
_MAX_WAITING = 4096


@dataclass(frozen=True, slots=True)
class InterpreterLimits:
    """The limits of an interpreter. `life_s` bounds its life with the time between calls."""

    call_s: float
    life_s: float
    memory_bytes: int
    open_patience_s: float = 60.0

    def of_program(self) -> Limits:
        """The limits that the sandbox enforces."""
        return Limits(self.life_s, self.life_s, self.memory_bytes, _OUTPUT_BYTES, _PROCESSES)


class SandboxInterpreter:
    """One Python interpreter, whose state lasts from call to call. Use by one task at a time. `close` ends it."""

    def __init__(self, sandbox: Sandbox, limits: InterpreterLimits) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._dialogue: Dialogue | None = None
        self._stack = AsyncExitStack()

    async def run(self, code: str) -> InterpreterAnswer:
        """Run `code` after all code before. Raises SandboxError when the sandbox fails; the state is then lost."""
        try:
            if self._dialogue is None:
                program = Program(installed()["python"], _cells(), self._limits.of_program())
                try:
                    async with asyncio.timeout(self._limits.open_patience_s):
                        self._dialogue = await self._stack.enter_async_context(self._sandbox.dialogue(program))
                except TimeoutError:
                    raise SandboxError("the sandbox did not start an interpreter in time") from None
            dialogue = self._dialogue
            answer = await self._call(dialogue, code.encode("utf-8", "surrogatepass"))
        except BaseException:
            await self.close()
            raise
        if answer.end is not CallEnd.DONE:
            await self.close()
        return answer

    async def close(self) -> None:
        """End the interpreter with all its processes. A later call starts another."""
        stack, self._stack, self._dialogue = self._stack, AsyncExitStack(), None
        await stack.aclose()

    async def _call(self, dialogue: Dialogue, code: bytes) -> InterpreterAnswer:
        mark = b"\0" + secrets.token_hex(16).encode()  # a new one for each call, so that no output ends it by chance
        heard = bytearray()
        try:
            async with asyncio.timeout(self._limits.call_s):
                await dialogue.say(b"%s %d\n%s" % (mark, len(code), code))
                while (at := heard.find(mark)) < 0:
                    part = await dialogue.hear(self._limits.call_s)
                    if isinstance(part, RunResult):
                        return InterpreterAnswer(_ENDS[part.exit], clipped(heard))
                    heard += part
        except TimeoutError:
            return InterpreterAnswer(CallEnd.TIME_LIMIT, clipped(heard))
        result = await dialogue.hold()
        end = CallEnd.DONE if result is None else _ENDS[result.exit]
        return InterpreterAnswer(end, clipped(heard[:at]))


def clipped(output: bytes | bytearray) -> str:
    """The output as text, without the middle of a long one."""
    if len(output) > 2 * _KEPT_BYTES:
        num_left_out = len(output) - 2 * _KEPT_BYTES
        output = b"%s\n[%d bytes left out]\n%s" % (output[:_KEPT_BYTES], num_left_out, output[-_KEPT_BYTES:])
    return output.decode("utf-8", "replace")


@cache
def _cells() -> str:
    return Path(__file__).with_name("cells.py").read_text("utf-8")


class ToolsOff(NousCoderError):
    """Tool sessions are turned off in this service."""


class SessionOver(NousCoderError):
    """The session has ended between two calls. Its state is lost; the caller may open another one."""


class InterpreterFailed(NousCoderError):
    """The sandbox failed, not the code. The session has lost its state and is over."""


def limits_of(section: ToolSessionsSection) -> InterpreterLimits:
    """The limits of one interpreter."""
    life_s = (section.calls + 1) * (section.call_s + section.idle_s)
    return InterpreterLimits(section.call_s, life_s, section.memory_bytes)


class ToolSession:
    """One caller's session. Made by `ToolSessions.open`."""

    def __init__(
        self,
        interpreter: SandboxInterpreter,
        place: ToolPlace,
        turn: Callable[[], AbstractAsyncContextManager[None]],
        section: ToolSessionsSection,
        metrics: VerifierMetrics,
        audit: AuditLog | None,
    ) -> None:
        """A call runs while it holds a `turn`."""
        self._interpreter = interpreter
        self._place = place
        self._turn = turn
        self._section = section
        self._metrics = metrics
        self._audit = audit
        self._num_calls = 0

    async def calls(self, requests: AsyncIterator[Request]) -> AsyncGenerator[Request, None]:
        """The requests of the session. Raises SessionOver when none comes in time, or another client gets the place."""
        while (request := await self._from_client(lambda: anext(requests, None), 0.0)) is not None:
            yield request

    async def deliver(self, send: Callable[[], Awaitable[None]]) -> None:
        """Send an answer. Raises SessionOver when the client takes it too late: it would keep the place for ever."""
        await self._from_client(send, _DELIVERY_S)

    async def _from_client(self, act: Callable[[], Awaitable[Answer]], patience_s: float) -> Answer:
        """What `act` waits for: the client. Raises SessionOver `patience_s` seconds after the session must end."""
        if self._place.is_told and not patience_s:
            raise SessionOver(_FOR_ANOTHER)
        try:
            async with asyncio.timeout(self._section.idle_s) as limit:
                now_s = asyncio.get_running_loop().time
                with self._place.idle(lambda: limit.reschedule(now_s() + patience_s)):
                    return await act()
        except TimeoutError:
            if self._place.is_told:
                raise SessionOver(_FOR_ANOTHER) from None
            raise SessionOver(f"the session has ended: its client was idle for {self._section.idle_s:g} s") from None

    async def run(self, code: str) -> InterpreterAnswer:
        """Run `code` when it is this caller's turn. Raises InvalidSubmission, QueueFull and InterpreterFailed."""
        if self._num_calls >= self._section.calls:
            raise InvalidSubmission("code", f"a session has {self._section.calls} calls")
        if len(code.encode("utf8", "surrogatepass")) > MAX_CODE_BYTES:
            raise InvalidSubmission("code", f"longer than {MAX_CODE_BYTES} bytes")
        self._num_calls += 1
        begun_s, answer = time.monotonic(), None
        try:
            with self._place.call():
                async with self._turn():
                    answer = await self._interpreter.run(code)
            self._metrics.called(answer.end)
            return answer
        except SandboxError as error:
            raise InterpreterFailed(f"the interpreter failed: {error}") from error
        finally:
            if self._audit is not None:
                end = None if answer is None else answer.end.value
                fields = {"language": "python", "tool_call": self._num_calls, "end": end}
                self._audit.write(code, **fields, duration_s=round(time.monotonic() - begun_s, 6))


class ToolSessions:
    """Opens sessions in the sandbox's slots for tools."""

    def __init__(
        self,
        sandbox: Sandbox,
        num_turns: int,
        run_lock: ExclusiveRunLock,
        quotas: Quotas,
        metrics: VerifierMetrics,
        section: ToolSessionsSection,
        audit: AuditLog | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        """At most `num_turns` calls run at once. `sandbox` must have `section.sessions` slots beside those of grading.

        `run_lock` is that of grading.
        """
        self._sandbox = sandbox
        self._run_lock = run_lock
        self._quotas = quotas
        self._metrics = metrics
        self._section = section
        self._audit = audit
        self._places = ToolPlaces(section.sessions, _MAX_WAITING, metrics.tool_load, sharing)
        self._turns = FairSlots(min(num_turns, section.sessions), _MAX_WAITING, lambda _waiting, _busy: None)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[ToolSession]:
        """A session of the current caller. Waits for a place. Raises QueueFull and QuotaExceeded."""
        caller = current_caller()
        with self._quotas.admitted(caller):
            async with self._places.place(caller.client) as place:
                interpreter = SandboxInterpreter(self._sandbox, limits_of(self._section))
                try:
                    yield ToolSession(interpreter, place, self._turn, self._section, self._metrics, self._audit)
                finally:
                    await asyncio.shield(interpreter.close())

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        async with self._turns.slot(current_caller().client), self._run_lock.shared():
            yield
