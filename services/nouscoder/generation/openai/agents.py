"""Sessions of agents over HTTP: an agent claims a rollout, asks for completions under its key, and closes it.

    POST /v1/sessions             claims a session: its key, the problem and the messages of its prompt
    POST /v1/chat/completions     with the session's key: the next turn of the rollout
    POST /v1/sessions/ID/reward   with the session's key: closes it, with a reward, an answer to grade, or neither

The rollouts, and whose turn it is to get one, are in environments/agent.py; here are keys, messages and texts.

INVARIANT: a text is made tokens once. The messages of a turn begin with all that were said in the session, where the
policy's own answers are the tokens that it sampled; other messages are refused, and the session goes on as it was. A
turn that has begun is sampled to its end, also when its agent hangs up: the same messages again get its completion. A
key is good for its own session only, until that ends.
"""

from __future__ import annotations

import asyncio
import contextvars
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import zip_longest
from typing import Any

from nouscoder.domain.conversation import Message, Role
from nouscoder.domain.tokens import FinishReason
from nouscoder.generation.environments.agent import AgentFault, AgentSessions
from nouscoder.generation.metrics import ApiTokens
from nouscoder.generation.openai.completions import AnswerForm, Serving, event
from nouscoder.generation.openai.sampling import CompletionPiece, piece_of
from nouscoder.generation.openai.schema import (
    ApiFault,
    ChatRequest,
    ClaimRequest,
    CloseRequest,
    invalid,
    parsed_body,
)
from nouscoder.generation.openai.shares import Shares

KEY_BEGIN = "nc-session-"
_MOST_CLAIMS = 1024  # agents that wait for a session
_KEPT_ENDED = 4096  # sessions that have ended, so that their agents are told why


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn that has ended: its completion, and the tokens before it."""

    piece: CompletionPiece
    num_prompt_tokens: int


@dataclass(slots=True)
class AgentSession:
    """What was said in one session. `client` has claimed it. `ended_with`: the stop token of the newest answer."""

    session_id: str
    client: str
    sampling: dict[str, float]
    said: list[Message] = field(default_factory=list)
    asked: list[Message] = field(default_factory=list)
    answering: asyncio.Task[_Turn] | None = None
    ended_with: int | None = None
    num_tokens: int = 0
    num_turns: int = 0
    why_ended: str = ""


class Agents:
    """The sessions that agents have claimed here."""

    def __init__(self, desk: AgentSessions, serving: Serving) -> None:
        self._desk = desk
        self._serving = serving
        self._by_id: dict[str, AgentSession] = {}
        self._by_key: dict[bytes, AgentSession] = {}
        self._claims = Shares(_MOST_CLAIMS, "agents wait for a session")
        desk.on_end = self._ended

    def session_of(self, key: str) -> AgentSession:
        """The session of a key. Raises ApiFault."""
        session = self._by_key.get(_digest(key))
        if session is None:
            raise ApiFault(401, "this is not the key of a session of this service", code="invalid_api_key")
        _check_going_on(session)
        return session

    async def claim(self, body: bytes, client: str) -> dict[str, Any]:
        """Wait for a free session. Raises ApiFault when there is none in time."""
        request = await parsed_body(ClaimRequest, body or b"{}")
        try:
            with self._claims.place(client):
                async with asyncio.timeout(request.wait_s):
                    session_id, about = await self._desk.claim(client)
        except TimeoutError:
            message = f"no rollout waited for an agent within {request.wait_s:g} s; ask again"
            raise ApiFault(503, message, code="no_session") from None
        key = KEY_BEGIN + secrets.token_urlsafe(32)
        session = AgentSession(session_id, client, about["sampling"])
        self._by_id[session_id] = self._by_key[_digest(key)] = session
        # Of the sessions that have ended only the newest are known.
        if len(self._by_key) > len(self._by_id) + _KEPT_ENDED:
            ended = [digest for digest, session in self._by_key.items() if session.why_ended]
            for digest in ended[: len(ended) // 2]:
                del self._by_key[digest]
        return {"id": session_id, "key": key, "model": self._serving.name, **about}

    async def chat(self, session: AgentSession, body: bytes) -> tuple[bytes, str]:
        """The answer to a request for the next turn, and its media type. Raises ApiFault and EngineError."""
        request = await parsed_body(ChatRequest, body)
        given = request.model_fields_set
        for name, value in session.sampling.items():
            if name in given and getattr(request, name) != value:
                raise invalid(f"{name}: a rollout is sampled with the run's {value:g}; leave it out", name)
        for name, is_neutral in (("seed", request.seed is None), ("n", request.n == 1), ("stop", not request.stops)):
            if not is_neutral:
                raise invalid(f"{name} is decided by the run for a rollout; leave it out", name)
        try:
            async with asyncio.timeout(self._serving.limit_s):
                turn = await asyncio.shield(self._answering(session, request))
        except TimeoutError:
            raise self._serving.too_slow() from None
        form = AnswerForm(self._serving, is_chat=True, with_logprobs=request.logprobs)
        if not request.stream:
            return form.whole([turn.piece], turn.num_prompt_tokens), "application/json"
        events = [form.part(0, turn.piece, 0)]
        if request.stream_options.include_usage:
            events.append(form.usage_part(turn.num_prompt_tokens, [turn.piece]))
        return b"".join(map(event, events)) + b"data: [DONE]\n\n", "text/event-stream"

    async def close(self, session: AgentSession | None, session_id: str, body: bytes) -> dict[str, Any]:
        """End a session. Raises ApiFault."""
        if session is None or session.session_id != session_id:
            raise ApiFault(401, "the session's own key is required: Authorization: Bearer KEY", code="invalid_api_key")
        request = await parsed_body(CloseRequest, body or b"{}")
        if session.answering is not None and not session.answering.done():
            raise _conflict("a completion of this session is being sampled")
        try:
            await self._desk.close(session_id, request.reward, request.answer)
        except AgentFault as error:
            _check_going_on(session)
            raise _conflict(str(error)) from None
        return {"id": session_id, "turns": session.num_turns, "tokens": session.num_tokens}

    def _answering(self, session: AgentSession, request: ChatRequest) -> asyncio.Task[_Turn]:
        """The turn that these messages ask for, which may be in progress or have ended already."""
        messages = [message.message() for message in request.messages]
        running = session.answering
        if running is not None and messages == session.asked:
            return running
        if running is not None and not running.done():
            raise _conflict("another completion of this session is being sampled: a session has one at a time")
        if not _goes_on(session.said, messages):
            raise _conflict(
                f"the messages must begin with the {len(session.said)} that were said in this session, as they were,"
                " and then have new ones: claim another session for another conversation"
            )
        # In a context of its own: it may outlive the request, whose memory is counted.
        begun = asyncio.get_running_loop().create_task(
            self._turn(session, request, messages), context=contextvars.Context()
        )
        session.asked, session.answering = messages, begun
        begun.add_done_callback(lambda ended: _forget_failed(session, ended))
        return begun

    async def _turn(self, session: AgentSession, request: ChatRequest, messages: list[Message]) -> _Turn:
        if session.said:
            new = messages[len(session.said) :]
            given = await self._serving.encoder.of_replies(new, session.ended_with, session.client)
        else:
            given = await self._serving.encoder.of_chat(request, session.client)
        try:
            completion = await self._desk.turn(session.session_id, given, request.most_tokens)
        except AgentFault as error:
            _check_going_on(session)
            raise invalid(str(error), "messages", "context_length_exceeded") from None
        piece = piece_of(completion, self._serving.decode, self._serving.stop_ids)
        num_prompt_tokens = session.num_tokens + len(given)
        self._serving.counts.count_tokens(ApiTokens.PROMPT.value, len(given))
        self._serving.counts.count_tokens(ApiTokens.COMPLETION.value, len(completion.token_ids))
        session.said = [*messages, Message(Role.ASSISTANT, piece.text)]
        session.ended_with = completion.token_ids[-1] if completion.finish_reason is FinishReason.STOP else None
        session.num_tokens = num_prompt_tokens + len(completion.token_ids)
        session.num_turns += 1
        return _Turn(piece, num_prompt_tokens)

    def _ended(self, session_id: str, why: str) -> None:
        if session_id in self._by_id:
            session = self._by_id.pop(session_id)
            session.why_ended = why
            session.said, session.asked, session.answering = [], [], None


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


def _conflict(message: str) -> ApiFault:
    return ApiFault(409, message, code="session_conflict")


def _check_going_on(session: AgentSession) -> None:
    """Raises ApiFault for a session that has ended."""
    if session.why_ended:
        raise ApiFault(410, f"the session has ended: {session.why_ended}", code="session_ended")


def _goes_on(said: Sequence[Message], messages: Sequence[Message]) -> bool:
    """Whether `messages` are those that were said, and more. An agent may strip the spaces around an answer."""
    if len(messages) <= len(said):
        return False
    pairs = zip_longest(said, messages[: len(said)])
    return all(
        one == other or (one.role is other.role is Role.ASSISTANT and one.content.strip() == other.content.strip())
        for one, other in pairs
    )


def _forget_failed(session: AgentSession, ended: asyncio.Task[_Turn]) -> None:
    """A turn that failed may be asked for again."""
    if ended.cancelled() or ended.exception() is not None:
        session.answering = None
