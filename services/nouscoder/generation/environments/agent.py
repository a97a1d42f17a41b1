"""The environment of agents: another program makes the rollout, through the API in OpenAI's form.

    a session waits -> an agent claims it -> completions under its key, one turn each -> the agent closes it -> rollout
                       POST /v1/sessions     POST /v1/chat/completions                  POST /v1/sessions/ID/reward

`AgentSessions` stands between the rollouts (`Agent`) and the API (openai/agents.py), which has the texts and the keys.

INVARIANT: a session has at most one agent at a time, and ends exactly once: closed by its agent, abandoned when the
agent asks for nothing within its limit, or with its rollout. Its requests are handled one after the other, in the task
of the rollout, and each gets one answer. A session that nobody has claimed waits without a limit.
A free session goes to the waiting client that has the fewest. Each SHARE_S that a client waits, it takes a session back
from the client with the most, if that one has at least two more. So no client keeps all sessions from others.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from nouscoder.config.generation import AgentSection
from nouscoder.domain.rollout import Rollout, Task
from nouscoder.domain.tokens import Completion
from nouscoder.errors import NousCoderError
from nouscoder.formats.body import canonical_json
from nouscoder.generation.environments.base import EnvironmentUnusable, Sampler, SessionAbandoned
from nouscoder.generation.environments.prompts import Episode, Prompts
from nouscoder.policy_folder.tokenizer import PolicyTokenizer

log = logging.getLogger(__name__)

SHARE_S = 30.0
_ALONE_S = 60.0  # without an agent, after which the log says so
_TAKEN_BACK = "another client waited for a session, and this one had the most"
_WITH_ROLLOUT = "its rollout has ended: its group is too old, a service stops, or the run is over"
About = dict[str, Any]


class AgentFault(NousCoderError):
    """A session cannot do what its agent asks. The message says why; the session goes on."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """Sample at most `max_tokens` tokens after `given` [tokens]."""

    given: Sequence[int]
    max_tokens: int | None
    done: asyncio.Future[Completion]


@dataclass(frozen=True, slots=True)
class _Close:
    """Grade `answer`; None: the text of the last completion. `reward` takes the place of the verdict's."""

    reward: float | None
    answer: str | None
    done: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class _Session:
    about: About
    session_id: str = field(default_factory=lambda: secrets.token_hex(12))
    requests: asyncio.Queue[_Turn | _Close | None] = field(default_factory=asyncio.Queue)
    claimed: asyncio.Event = field(default_factory=asyncio.Event)
    client: str = ""


class AgentSessions:
    """The sessions of one run. `on_end` is told each claimed session that has ended, and why."""

    def __init__(self) -> None:
        self._free: deque[_Session] = deque()
        self._waiting: dict[str, deque[asyncio.Future[_Session]]] = {}  # by client
        self._claimed: dict[str, _Session] = {}
        self._last_claim_s = time.monotonic()
        self.on_end: Callable[[str, str], None] = lambda session_id, why: None
        self.num_waiting = 0  # claimed ones whose agent does something else than wait for a completion

    # What the API calls.

    async def claim(self, client: str) -> tuple[str, About]:
        """Wait for a session that is free; it is the caller's then. Its id, and what its agent is told."""
        waiting: asyncio.Future[_Session] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(waiting)
        self._hand_out()
        try:
            while not (await asyncio.wait({waiting}, timeout=SHARE_S))[0]:
                # Take the oldest session of the client that has the most; before its first turn `client` may get it.
                held = Counter(session.client for session in self._claimed.values())
                most = max(held, key=lambda name: held[name], default=client)
                if held[most] >= held[client] + 2:
                    oldest = next(session for session in self._claimed.values() if session.client == most)
                    oldest.requests.put_nowait(None)
        except asyncio.CancelledError:
            if waiting.done():
                waiting.result().requests.put_nowait(None)
            else:
                self._leave(client, waiting)
            raise
        session = waiting.result()
        return session.session_id, session.about

    def _hand_out(self) -> None:
        while self._free and self._waiting:
            held = Counter(session.client for session in self._claimed.values())
            client = min(self._waiting, key=lambda name: held[name])
            waiting, session = self._waiting[client][0], self._free.popleft()
            self._leave(client, waiting)
            self._last_claim_s = time.monotonic()
            self._claimed[session.session_id] = session
            session.client = client
            session.claimed.set()
            waiting.set_result(session)

    def _leave(self, client: str, waiting: asyncio.Future[_Session]) -> None:
        self._waiting[client].remove(waiting)
        if not self._waiting[client]:
            del self._waiting[client]

    def turn(self, session_id: str, given: Sequence[int], max_tokens: int | None) -> asyncio.Future[Completion]:
        """Sample the next turn. The future raises AgentFault and EngineError."""
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._ask(session_id, _Turn(given, max_tokens, done))
        return done

    def close(self, session_id: str, reward: float | None, answer: str | None) -> asyncio.Future[None]:
        """End the rollout. The future raises AgentFault."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ask(session_id, _Close(reward, answer, done))
        return done

    def _ask(self, session_id: str, request: _Turn | _Close) -> None:
        if session_id in self._claimed:
            self._claimed[session_id].requests.put_nowait(request)
        else:
            _fail(request, AgentFault("the session has ended"))

    # What a rollout calls.

    async def agent_of(self, session: _Session) -> None:
        """Offer the session, and wait until an agent has claimed it."""
        self._forget(session, _TAKEN_BACK)
        session.claimed.clear()
        self._free.append(session)
        self._hand_out()
        while not session.claimed.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_ALONE_S):
                    await session.claimed.wait()
            if not session.claimed.is_set() and time.monotonic() - self._last_claim_s >= _ALONE_S:
                self._last_claim_s = time.monotonic()
                log.warning("sessions wait for an agent: POST /v1/sessions", extra={"sessions": len(self._free)})

    async def request(self, session: _Session, limit_s: float) -> _Turn | _Close | None:
        """What the agent asks for next; None: the session is taken back. Raises SessionAbandoned."""
        self.num_waiting += 1
        try:
            async with asyncio.timeout(limit_s):
                return await session.requests.get()
        except TimeoutError:
            raise SessionAbandoned(f"the agent asked for nothing within {limit_s:g} s") from None
        finally:
            self.num_waiting -= 1

    def end(self, session: _Session, why: str) -> None:
        """The rollout has ended."""
        if session in self._free:
            self._free.remove(session)
        self._forget(session, why)

    def _forget(self, session: _Session, why: str) -> None:
        """Its agent has it no more, and what it has asked for fails."""
        while not session.requests.empty():
            _fail(session.requests.get_nowait(), AgentFault(f"the session has ended: {why}"))
        if self._claimed.pop(session.session_id, None) is not None:
            self.on_end(session.session_id, why)


def _fail(request: _Turn | _Close | None, error: Exception) -> None:
    if request is not None and not request.done.done():
        request.done.set_exception(error)
        request.done.exception()  # retrieved, because nobody may wait for it any more


class Agent:
    """Rollouts that agents make."""

    name = "agent"

    def __init__(
        self, tokenizer: PolicyTokenizer, settings: AgentSection, sessions: AgentSessions, max_tokens_total: int
    ) -> None:
        """`max_tokens_total` is the engine's limit of given and sampled tokens. Raises EnvironmentUnusable."""
        if settings.prompt_as == "text" and tokenizer.has_chat_template:
            raise EnvironmentUnusable(
                'generation.environment.prompt_as is "text", but agents ask in messages, which the policy\'s chat'
                ' template writes: take "auto"'
            )
        self._prompts = Prompts(tokenizer, settings)
        self._limit_s = settings.agent_session_s
        self._sessions = sessions
        self._max_tokens_total = max_tokens_total

    async def rollout(self, task: Task, sampler: Sampler) -> Rollout:
        """Do what an agent asks until it closes the session. Raises as Environment.rollout."""
        session, episode = _Session(self._about(task)), self._prompts.empty(task, sampler)
        text: str | None = None
        why = _WITH_ROLLOUT
        try:
            await self._sessions.agent_of(session)
            while True:
                match await self._sessions.request(session, self._limit_s):
                    case _Turn() as turn:
                        text = await self._sampled(episode, turn, text)
                    case _Close() as closing if text is not None:
                        answer = text if closing.answer is None else closing.answer
                        rollout = episode.finished(answer, closing.reward)
                        why = "its agent has closed it"
                        closing.done.set_result(None)
                        return rollout
                    case _Close() as closing:
                        _fail(closing, AgentFault("the session has no completion yet, so there is nothing to reward"))
                    case None if text is None:
                        await self._sessions.agent_of(session)
                    case None:
                        raise SessionAbandoned(_TAKEN_BACK)
        except SessionAbandoned as error:
            why = str(error)
            raise
        finally:
            self._sessions.end(session, why)

    async def _sampled(self, episode: Episode, turn: _Turn, text: str | None) -> str | None:
        """Sample a turn. Returns the text of the newest completion: `text` when nothing can be sampled."""
        num_tokens = episode.num_tokens + len(turn.given)
        why_not = ""
        if not episode.tokens_left:
            why_not = "the session has sampled as many tokens as generation.sampling.max_new_tokens"
        elif num_tokens >= self._max_tokens_total:
            why_not = (
                f"the session would have {num_tokens} tokens; together with a completion it may have"
                f" {self._max_tokens_total} (generation.max_tokens_total)"
            )
        if why_not:
            _fail(turn, AgentFault(why_not))
            return text
        try:
            episode.give(turn.given)
            completion = await episode.sample(turn.max_tokens)
        except BaseException as error:
            _fail(
                turn, error if isinstance(error, Exception) else AgentFault(f"the session has ended: {_WITH_ROLLOUT}")
            )
            raise
        if not turn.done.done():
            turn.done.set_result(completion)
        return self._prompts.text_of(completion, episode.given)

    def _about(self, task: Task) -> About:
        """What an agent is told of its session, as JSON."""
        sampling, public_tests = task.sampling, task.public_tests
        return {
            "problem_id": task.problem_id,
            "messages": [
                {"role": message.role.value, "content": message.content} for message in self._prompts.messages_of(task)
            ],
            "starter_code": task.starter_code,
            "languages": list(task.languages),
            "public_tests": None if public_tests is None else json.loads(canonical_json(public_tests.tests)),
            "sampling": {"temperature": sampling.temperature, "top_p": sampling.top_p},
            "max_new_tokens": sampling.max_new_tokens,
            "max_tokens_total": self._max_tokens_total,
        }
