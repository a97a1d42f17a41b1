"""The process of the API: `python -m nouscoder.generation.openai.front LINK LISTENING`, with two open sockets.

It has the tokenizer and everything of HTTP, and asks the worker for samples (process.py). It ends when the link closes.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from nouscoder.config.generation import OpenAISection
from nouscoder.domain.tokens import Completion, SampledTokens
from nouscoder.errors import Unusable
from nouscoder.generation.engines.base import EngineStopped, SampleRequest
from nouscoder.generation.openai.link import FrontLink, Record, completion_of, error_of, request_record, tokens_of
from nouscoder.http_server.memory_budget import return_large_blocks
from nouscoder.logs import configure_logs

_NICENESS = 10  # the worker comes first, also where there are few cores
_COUNTS_EVERY_S = 0.5


class LinkedEngine:
    """A GuestEngine that is in the worker."""

    def __init__(self, link: FrontLink, policy_version: int | None) -> None:
        self._link = link
        self._futures: dict[str, asyncio.Future[Completion]] = {}
        self._pieces: dict[str, list[SampledTokens]] = {}  # of the samples that are followed
        self.policy_version = policy_version

    def sample(self, request: SampleRequest) -> asyncio.Future[Completion]:
        """As Engine.sample."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._futures[request.request_id] = future
        future.add_done_callback(lambda ended: self._ended(request.request_id, ended))
        self._link.send({"sample": request_record(request)})
        return future

    async def sampled(self, starts: Mapping[str, int]) -> dict[str, SampledTokens]:
        """As Engine.sampled. The worker sends the pieces of a sample from the first call on."""
        found = {}
        for name, start in starts.items():
            if name not in self._pieces and name in self._futures:
                self._pieces[name] = []
                self._link.send({"follow": name})
            pieces = self._pieces.get(name)
            if not pieces:
                continue
            if len(pieces) > 1:
                pieces[:] = [SampledTokens.concatenated(pieces)]
            if len(pieces[0].token_ids) > start:
                found[name] = pieces[0].after(start)
        return found

    def take(self, record: Record) -> None:
        """Handle a message of the worker."""
        match record:
            case {"policy": int() as version}:
                self.policy_version = version
            case {"id": str() as name, "error": _} if name in self._futures:
                self._futures[name].set_exception(error_of(record))
            case {"id": str() as name, "end": _} if name in self._futures:
                self._futures[name].set_result(completion_of(record))
            case {"id": str() as name, "tokens": tokens} if name in self._pieces:
                self._pieces[name].append(tokens_of(tokens))

    def _ended(self, name: str, future: asyncio.Future[Completion]) -> None:
        del self._futures[name]
        self._pieces.pop(name, None)
        if future.cancelled():
            self._link.send({"cancel": name})


class LinkedSessions:
    """AgentSessions that are in the worker."""

    def __init__(self, link: FrontLink) -> None:
        self._link = link
        self._asked: dict[str, asyncio.Future[Any]] = {}
        self._is_over = False
        self.on_end: Callable[[str, str], None] = lambda session_id, why: None

    async def claim(self) -> tuple[str, dict[str, Any]]:
        """As AgentSessions.claim."""
        name, claimed = self._ask({})
        self._link.send({"claim": name})
        try:
            session: tuple[str, dict[str, Any]] = await claimed
        except asyncio.CancelledError:
            self._link.send({"unclaim": name})
            if claimed.done() and not claimed.cancelled():
                self.give_back(claimed.result()[0])
            raise
        return session

    def turn(self, session_id: str, given: Sequence[int], max_tokens: int | None) -> asyncio.Future[Completion]:
        """As AgentSessions.turn."""
        return self._ask({"turn": session_id, "given": list(given), "max_tokens": max_tokens})[1]

    def close(self, session_id: str, reward: float | None, answer: str | None) -> asyncio.Future[None]:
        """As AgentSessions.close."""
        return self._ask({"close": session_id, "reward": reward, "answer": answer})[1]

    def give_back(self, session_id: str) -> None:
        """As AgentSessions.give_back."""
        self._link.send({"give_back": session_id})

    def end(self) -> None:
        """The worker is gone. Nobody answers any more, so what is asked from now on fails at once."""
        self._is_over = True
        for asked in list(self._asked.values()):
            if not asked.done():
                asked.set_exception(EngineStopped("the service is stopping"))
                asked.exception()  # retrieved, because nobody may wait for it any more

    def take(self, record: Record) -> None:
        """Handle a message of the worker."""
        asked = self._asked.get(record.get("id", ""))
        if "session_ended" in record:
            self.on_end(record["session_ended"], record["why"])
        elif asked is None or asked.done():
            if "session" in record:
                self.give_back(record["session"])
        elif "error" in record:
            asked.set_exception(error_of(record))
        elif "session" in record:
            asked.set_result((record["session"], record["about"]))
        else:
            asked.set_result(None if "closed" in record else completion_of(record))

    def _ask(self, record: Record) -> tuple[str, asyncio.Future[Any]]:
        """The name of a request, which is sent if there is one, and the future of its answer."""
        name = f"agent-{secrets.token_hex(12)}"
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._is_over:
            future.set_exception(EngineStopped("the service is stopping"))
            return name, future
        self._asked[name] = future
        future.add_done_callback(lambda _: self._asked.pop(name, None))
        if record:
            self._link.send({**record, "id": name})
        return name, future


class LinkedCounts:
    """What ApiMetrics has, sent to the worker twice a second."""

    def __init__(self) -> None:
        self._counts: list[list[Any]] = []

    def count_request(self, route: str, status: str, seconds: float) -> None:
        """As ApiMetrics.count_request."""
        self._counts.append(["request", route, status, seconds])

    def count_tokens(self, kind: str, number: int) -> None:
        """As ApiMetrics.count_tokens."""
        self._counts.append(["tokens", kind, number])

    async def send(self, link: FrontLink) -> None:
        """Never returns."""
        while True:
            await asyncio.sleep(_COUNTS_EVERY_S)
            if self._counts:
                link.send({"counts": self._counts})
                self._counts = []


async def serve(link_number: int, listening_number: int) -> None:
    """Serve until the link closes."""
    link = await FrontLink.on(socket.socket(fileno=link_number))
    records = link.records()
    begin = (await anext(records))["start"]
    engine, counts = LinkedEngine(link, begin["policy_version"]), LinkedCounts()
    sessions = LinkedSessions(link) if begin["has_agents"] else None
    async with AsyncExitStack() as stack:
        try:
            # Its libraries are loaded here, after torch is kept out.
            from nouscoder.generation.openai.api import serve_api

            settings = OpenAISection.model_validate(begin["settings"])
            folder, listening = Path(begin["folder"]), socket.socket(fileno=listening_number)
            parts = (begin["name"], folder, begin["capacity"], engine, counts, listening, stack)
            await serve_api(settings, *parts, thinking=begin["thinking"], date=begin["date"], sessions=sessions)
        except Unusable as error:
            link.send({"unusable": str(error)})
            return
        sending = asyncio.create_task(counts.send(link))
        link.send({"ready": True})
        async for record in records:
            engine.take(record)
            if sessions is not None:
                sessions.take(record)
        if sessions is not None:
            sessions.end()
        sending.cancel()


if __name__ == "__main__":
    os.nice(_NICENESS)
    return_large_blocks()
    os.environ.update(TOKENIZERS_PARALLELISM="false", TRANSFORMERS_NO_ADVISORY_WARNINGS="1")
    # A tokenizer needs no torch, which the library would load: 260 MiB, and most of the time to start.
    sys.modules["torch"] = None  # type: ignore[assignment]
    configure_logs("generation-api")
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2])))
