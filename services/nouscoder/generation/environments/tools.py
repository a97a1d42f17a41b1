"""The tools of environments, with a time limit on each call: the verifier's grading and its Python interpreter.

INVARIANT: a call ends within its limit, with the tool's answer or with an error. `num_waiting` counts the calls that
have not ended: their rollouts need no place in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Protocol, TypeVar

from nouscoder.config.generation import FeedbackSection, InterpreterSection
from nouscoder.domain.conversation import CallEnd, InterpreterAnswer
from nouscoder.domain.submission import Submission
from nouscoder.domain.verdict import Verdict
from nouscoder.generation.environments.base import TaskRefused, ToolUnavailable
from nouscoder.rpc.channel import PeerBehind, PeerError, PeerRefused, PeerUnreachable

Answer = TypeVar("Answer")
Settings = TypeVar("Settings", FeedbackSection, InterpreterSection)

ENDS = {
    CallEnd.DONE: "",
    CallEnd.EXITED: "The code ended the interpreter. The next call begins with a fresh one.",
    CallEnd.TIME_LIMIT: "The code took too long. The next call begins with a fresh interpreter.",
    CallEnd.MEMORY_LIMIT: "The code needed too much memory. The next call begins with a fresh interpreter.",
    CallEnd.OUTPUT_LIMIT: "The code printed too much. The next call begins with a fresh interpreter.",
}


class SessionCalls(Protocol):
    """The calls of one tool session; implemented by InterpreterCalls."""

    async def run(self, code: str) -> InterpreterAnswer:
        """Run `code` after all code before. Raises PeerError."""


class ToolVerifier(Protocol):
    """What environments need of the verifier; implemented by VerifierClient."""

    async def grade(self, submission: Submission) -> Verdict:
        """The verdict. Raises PeerError."""

    def interpreter(self) -> AbstractAsyncContextManager[SessionCalls]:
        """A tool session, which ends with the context."""


class Tools:
    """The tools that an environment may call while a rollout is made."""

    def __init__(self, verifier: ToolVerifier, limit_s: float) -> None:
        """Each call waits at most `limit_s` seconds."""
        self._verifier = verifier
        self._limit_s = limit_s
        self.num_waiting = 0

    async def grade(self, submission: Submission) -> Verdict:
        """The verdict, never internal_error. Raises ToolUnavailable, and TaskRefused for the submission."""
        verdict = await self.within("public tests", self._verifier.grade(submission))
        if verdict.is_ours:
            raise ToolUnavailable(f"the verifier failed: {verdict.detail}")
        return verdict

    @asynccontextmanager
    async def interpreter(self) -> AsyncIterator[RolloutInterpreter]:
        """A Python interpreter for one rollout. It keeps its state from call to call, and ends with the context."""
        async with AsyncExitStack() as stack:
            yield RolloutInterpreter(self, lambda: stack.enter_async_context(self._verifier.interpreter()))

    async def within(self, what: str, call: Awaitable[Answer]) -> Answer:
        """The answer to a call about `what`. Raises ToolUnavailable and TaskRefused."""
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self._limit_s):
                return await call
        except TimeoutError:
            raise ToolUnavailable(f"the verifier gave no answer within {self._limit_s:g} s") from None
        except PeerRefused as error:
            raise TaskRefused(f"the {what} cannot be run: {error}") from error
        except PeerError as error:
            raise ToolUnavailable(str(error)) from error
        finally:
            self.num_waiting -= 1


class RolloutInterpreter:
    """The interpreter of one rollout; see `Tools.interpreter`.

    The verifier ends a session between two calls when another client needs its place. Then, and when a session is lost,
    the code of all calls runs again in a new one. If an answer is another one this time, the state is not what the
    policy has seen, and the rollout is given back.
    """

    def __init__(self, tools: Tools, open_session: Callable[[], Awaitable[SessionCalls]]) -> None:
        self._tools = tools
        self._open_session = open_session
        self._session: SessionCalls | None = None
        self._answered: list[tuple[str, InterpreterAnswer]] = []

    async def run(self, code: str) -> InterpreterAnswer:
        """Run `code` after all code before. Raises ToolUnavailable without an answer in time, and TaskRefused."""
        answer = await self._tools.within("code", self._run(code))
        self._answered.append((code, answer))
        return answer

    async def _run(self, code: str) -> InterpreterAnswer:
        try:
            if self._session is None:
                self._session = await self._restored()
            return await self._session.run(code)
        except (PeerBehind, PeerUnreachable):
            self._session = await self._restored()
            return await self._session.run(code)

    async def _restored(self) -> SessionCalls:
        """A new session in which all calls so far have run. Raises PeerError."""
        session = await self._open_session()
        for code, answer in self._answered:
            if await session.run(code) != answer:
                raise PeerBehind("the interpreter's state was lost, and its code gives other answers now")
        return session
