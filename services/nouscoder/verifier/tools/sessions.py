"""Tool sessions: interpreters of callers, in number, time and memory bounded, and shared fairly with grading.

INVARIANT: at most `sessions` sessions are open, each with at most one interpreter, in the slots of the sandbox that
belong to tool sessions. A call runs only while it holds a grading slot; sessions and grading get these slots in turn. A
session ends when its caller leaves (also by a broken connection), after `idle_s` seconds without a call, and after
`calls` calls. With it ends its interpreter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from nouscoder.config import ToolSessionsSection
from nouscoder.domain.interpreter import InterpreterAnswer
from nouscoder.errors import NousCoderError
from nouscoder.verifier.access.caller import current_caller
from nouscoder.verifier.access.quotas import Quotas
from nouscoder.verifier.grading.fair_queue import FairSlots
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.observe.audit import AuditLog
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.base import Sandbox, SandboxError
from nouscoder.verifier.tools.interpreter import Interpreter, InterpreterLimits

Request = TypeVar("Request")

MAX_CODE_BYTES = 256 * 1024
_MAX_WAITING = 4096


class ToolsOff(NousCoderError):
    """Tool sessions are turned off in this service."""


class SessionIdle(NousCoderError):
    """The session has ended, because no call came in time."""


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
        interpreter: Interpreter,
        grader: Grader,
        section: ToolSessionsSection,
        metrics: VerifierMetrics,
        audit: AuditLog | None,
    ) -> None:
        self._interpreter = interpreter
        self._grader = grader
        self._section = section
        self._metrics = metrics
        self._audit = audit
        self._num_calls = 0

    async def run(self, code: str) -> InterpreterAnswer:
        """Run `code` when it is this caller's turn. Raises InvalidSubmission, QueueFull and InterpreterFailed."""
        if self._num_calls >= self._section.calls:
            raise InvalidSubmission("code", f"a session has {self._section.calls} calls")
        if len(code.encode("utf8", "surrogatepass")) > MAX_CODE_BYTES:
            raise InvalidSubmission("code", f"longer than {MAX_CODE_BYTES} bytes")
        self._num_calls += 1
        begun_s, answer = time.monotonic(), None
        try:
            async with self._grader.turn(f"{current_caller().client} (tools)"):
                answer = await self._interpreter.run(code)
            self._metrics.called(answer.end)
            return answer
        except SandboxError as error:
            raise InterpreterFailed(f"the interpreter failed: {error}") from error
        finally:
            self._write_audit(code, answer, time.monotonic() - begun_s)

    def _write_audit(self, code: str, answer: InterpreterAnswer | None, duration_s: float) -> None:
        if self._audit is not None:
            end = None if answer is None else answer.end.value
            fields = {"language": "python", "tool_call": self._num_calls, "end": end}
            self._audit.write(code, **fields, duration_s=round(duration_s, 6))


class ToolSessions:
    """Opens sessions in the sandbox's slots for tools."""

    def __init__(
        self,
        sandbox: Sandbox,
        grader: Grader,
        quotas: Quotas,
        metrics: VerifierMetrics,
        section: ToolSessionsSection,
        audit: AuditLog | None = None,
    ) -> None:
        """`sandbox` must have `section.sessions` slots more than `grader` uses."""
        self.idle_s = section.idle_s
        self._sandbox = sandbox
        self._grader = grader
        self._quotas = quotas
        self._metrics = metrics
        self._section = section
        self._audit = audit
        self._places = FairSlots(section.sessions, _MAX_WAITING, metrics.tool_load)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[ToolSession]:
        """A session of the current caller. Waits for a place. Raises QueueFull and QuotaExceeded."""
        caller = current_caller()
        with self._quotas.admitted(caller):
            async with self._places.slot(caller.client):
                interpreter = Interpreter(self._sandbox, limits_of(self._section))
                try:
                    yield ToolSession(interpreter, self._grader, self._section, self._metrics, self._audit)
                finally:
                    await asyncio.shield(interpreter.close())


async def until_idle(requests: AsyncIterator[Request], idle_s: float) -> AsyncGenerator[Request, None]:
    """The requests of a session. Raises SessionIdle when none comes for `idle_s` seconds."""
    while True:
        try:
            async with asyncio.timeout(idle_s):
                request = await anext(requests, None)
        except TimeoutError:
            raise SessionIdle(f"the session has ended: no call came for {idle_s:g} s") from None
        if request is None:
            return
        yield request
