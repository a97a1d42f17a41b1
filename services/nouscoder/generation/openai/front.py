"""The process of the API: `python -m nouscoder.generation.openai.front LINK LISTENING`, with two open sockets.

It has the tokenizer and everything of HTTP, and asks the worker for samples (process.py). It ends when the link closes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from nouscoder.config.generation import OpenAISection
from nouscoder.domain.tokens import Completion, FinishReason, SampledTokens
from nouscoder.errors import Unusable
from nouscoder.generation.engines.base import EngineError, EngineStopped, SampleRequest
from nouscoder.generation.openai.link import Link, Record, request_record, tokens_of
from nouscoder.http_server.memory_budget import return_large_blocks
from nouscoder.logs import configure_logs

_NICENESS = 10  # the worker comes first, also where there are few cores
_COUNTS_EVERY_S = 0.5


class LinkedEngine:
    """A GuestEngine that is in the worker."""

    def __init__(self, link: Link, policy_version: int | None) -> None:
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
            case {"id": str() as name, "error": message} if name in self._futures:
                kind = EngineStopped if record.get("is_stopped") else EngineError
                self._futures[name].set_exception(kind(message))
            case {"id": str() as name, "end": reason, "tokens": tokens} if name in self._futures:
                self._futures[name].set_result(tokens_of(tokens).ended(FinishReason(reason)))
            case {"id": str() as name, "tokens": tokens} if name in self._pieces:
                self._pieces[name].append(tokens_of(tokens))

    def _ended(self, name: str, future: asyncio.Future[Completion]) -> None:
        del self._futures[name]
        self._pieces.pop(name, None)
        if future.cancelled():
            self._link.send({"cancel": name})


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

    async def send(self, link: Link) -> None:
        """Never returns."""
        while True:
            await asyncio.sleep(_COUNTS_EVERY_S)
            if self._counts:
                link.send({"counts": self._counts})
                self._counts = []


async def serve(link_number: int, listening_number: int) -> None:
    """Serve until the link closes."""
    link = await Link.on(socket.socket(fileno=link_number))
    records = link.records()
    begin = (await anext(records))["start"]
    engine, counts = LinkedEngine(link, begin["policy_version"]), LinkedCounts()
    async with AsyncExitStack() as stack:
        try:
            await _listen(begin, engine, counts, socket.socket(fileno=listening_number), stack)
        except Unusable as error:
            link.send({"unusable": str(error)})
            return
        sending = asyncio.create_task(counts.send(link))
        link.send({"ready": True})
        await _follow(records, engine)
        sending.cancel()


async def _listen(
    begin: Record, engine: LinkedEngine, counts: LinkedCounts, listening: socket.socket, stack: AsyncExitStack
) -> None:
    """Raises Unusable."""
    from nouscoder.generation.openai.api import serve_api

    settings = OpenAISection.model_validate(begin["settings"])
    folder, capacity, thinking = Path(begin["folder"]), begin["capacity"], begin["thinking"]
    await serve_api(settings, begin["name"], folder, capacity, engine, counts, listening, stack, thinking=thinking)


async def _follow(records: AsyncIterator[Record], engine: LinkedEngine) -> None:
    async for record in records:
        engine.take(record)


if __name__ == "__main__":
    os.nice(_NICENESS)
    return_large_blocks()
    os.environ.update(TOKENIZERS_PARALLELISM="false", TRANSFORMERS_NO_ADVISORY_WARNINGS="1")
    # A tokenizer needs no torch, which the library would load: 260 MiB, and most of the time to start.
    sys.modules["torch"] = None  # type: ignore[assignment]
    configure_logs("generation-api")
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2])))
