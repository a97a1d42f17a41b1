"""The tools of environments, with a time limit on each call: the verifier's grading and its Python interpreter.

INVARIANT: a call ends within its limit, with the tool's answer or with an error. `num_waiting` counts the calls that
have not ended: their rollouts need no place in the engine.

Two environments use them. An episode of both also ends after a number of turns, when a turn is cut at the limit of
tokens, and when the reply leaves no room for another turn.

With feedback the policy sees how its program fails the public tests, and writes another:

    prompt -> program -> public tests -> feedback -> program -> ... -> the last program is graded by the hidden tests
    given     sampled    the verifier    given       sampled

The episode ends when the public tests pass, or when the problem has none. The hidden tests and their expected outputs
are not in this process.

With an interpreter the policy may run Python before it writes its answer:

    prompt -> text with <python>...</python> -> <output>...</output> -> ... -> the last text is graded
    given     sampled                           given

A turn whose text ends in a call is answered with what the code prints. A turn without one is the answer. The
interpreter keeps its state between the calls of a rollout. Source: R1-Code-Interpreter (arXiv 2505.21668): at most 5 to
8 calls of 60 s each, whose outputs are not in the loss. `broker.reward.rule` r1_code_interpreter has its rewards.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Generic, Protocol, TypeVar

from nouscoder.config.generation import FeedbackSection, InterpreterSection
from nouscoder.domain.conversation import CallEnd, InterpreterAnswer, feedback_on
from nouscoder.domain.rollout import Rollout, Task
from nouscoder.domain.submission import Submission
from nouscoder.domain.tokens import Completion, FinishReason
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.generation.environments.base import Sampler, TaskRefused, ToolUnavailable
from nouscoder.generation.environments.prompts import Prompts
from nouscoder.policy_folder.tokenizer import PolicyTokenizer
from nouscoder.rpc.channel import PeerBehind, PeerError, PeerRefused, PeerUnreachable

Answer = TypeVar("Answer")
Settings = TypeVar("Settings", FeedbackSection, InterpreterSection)

_ENDS = {
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


# The environments.


class _Turns(Generic[Settings]):
    def __init__(self, tokenizer: PolicyTokenizer, settings: Settings, tools: Tools, max_tokens_total: int) -> None:
        """`max_tokens_total` is the engine's limit of given and sampled tokens. Raises EnvironmentUnusable."""
        self._prompts = Prompts(tokenizer, settings)
        self._settings: Settings = settings
        self._tools = tools
        self._max_tokens_total = max_tokens_total

    async def _rollout(
        self, task: Task, sampler: Sampler, turns: int, reply: Callable[[Completion, str], Awaitable[list[int]]]
    ) -> Rollout:
        """Sample turns until `reply`, which gets each with its text, has no tokens, or a limit is reached."""
        episode = self._prompts.begin(task, sampler)
        for turns_left in reversed(range(turns)):
            answer = await episode.sample()
            text = self._prompts.text_of(answer, episode.given)
            if not turns_left or answer.finish_reason is FinishReason.LENGTH:
                break
            if not episode.give_reply(await reply(answer, text), self._max_tokens_total):
                break
        return episode.finished(text)


class Feedback(_Turns[FeedbackSection]):
    """Up to `settings.turns` programs, with feedback from the public tests between them."""

    name = "feedback"

    async def rollout(self, task: Task, sampler: Sampler) -> Rollout:
        """Sample programs until one passes the public tests or a limit is reached. Raises ToolUnavailable."""

        async def reply(answer: Completion, text: str) -> list[int]:
            if task.public_tests is None:
                return []
            verdict = await self._tools.grade(task.public_tests.submission(text))
            if verdict.kind is VerdictKind.ACCEPTED:
                return []
            return self._prompts.reply_to(answer, feedback_on(verdict, self._settings.feedback_chars))

        return await self._rollout(task, sampler, self._settings.turns, reply)


class WithInterpreter(_Turns[InterpreterSection]):
    """Up to `settings.calls` calls of an interpreter, then the answer."""

    name = "interpreter"

    async def rollout(self, task: Task, sampler: Sampler) -> Rollout:
        """Sample turns until one makes no call, or a limit is reached. Raises ToolUnavailable."""
        settings = self._settings
        async with self._tools.interpreter() as interpreter:

            async def reply(answer: Completion, text: str) -> list[int]:
                code = call_in(text, settings.call_begin, settings.call_end)
                if code is None:
                    return []
                output = await interpreter.run(code)
                text = reply_to_call(output, settings.output_begin, settings.output_end, settings.output_chars)
                return self._prompts.reply_to(answer, text)

            return await self._rollout(task, sampler, settings.calls + 1, reply)


def call_in(text: str, begin: str, end: str) -> str | None:
    """The code of the call that `text` ends in; None if it ends in none."""
    before, has_end, after = text.rpartition(end)
    if not has_end or after.strip():
        return None
    _, has_begin, code = before.rpartition(begin)
    return code.strip("\n") if has_begin else None


def reply_to_call(answer: InterpreterAnswer, begin: str, end: str, max_chars: int) -> str:
    """The text of the reply to a call. The middle of an output of more than `max_chars` characters is left out."""
    output = answer.output.rstrip()
    if len(output) > max_chars:
        half = max_chars // 2
        output = f"{output[:half]}\n...\n{output[len(output) - half :]}"
    lines = [line for line in (output, _ENDS[answer.end]) if line]
    return begin + "\n".join(lines) + end
