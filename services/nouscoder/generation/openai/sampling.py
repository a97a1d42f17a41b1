"""Samples completions for the API, in a bounded number of the engine's places.

INVARIANT: at most `slots` samples of the API are in the engine at a time, so rollouts keep all other places. When a
sample ends in any way, a client that hangs up included, the engine has no request of it.

They go before rollouts that wait for a place, so a person waits for the end of one rollout, not of all that wait.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from nouscoder.domain.rollout import Sampling
from nouscoder.domain.tokens import Completion, FinishReason
from nouscoder.generation.engines.base import Engine, SampleRequest
from nouscoder.generation.openai.text_stream import TextStream

# How often the tokens of a running sample are read, and how many pieces a slow reader may leave unread.
_READ_EVERY_S = 0.05
_UNREAD_PIECES = 256


@dataclass(frozen=True, slots=True)
class Wanted:
    """One completion: of `prompt_token_ids` [prompt tokens], ended by any of the texts in `stops` too."""

    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    stops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ending:
    """How a completion ended: why, after how many tokens (the stop token included), and sampled by which versions.

    A stop string ends a completion between two tokens of the engine; the versions are then those in use meanwhile.
    """

    finish_reason: FinishReason
    num_tokens: int
    oldest_version: int
    newest_version: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a completion: its text, and the tokens of the text with their log-probabilities. The last has an end.

    Text that is held back, because it may begin a stop string, comes later than its tokens.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    ending: Ending | None = None


class Samples:
    """Samples on one engine. `decode` is the tokenizer's, and a token of `stop_ids` ends a completion."""

    def __init__(
        self, engine: Engine, decode: Callable[[Sequence[int]], str], stop_ids: frozenset[int], slots: int
    ) -> None:
        self._engine = engine
        self._decode = decode
        self._stop_ids = stop_ids
        self._slots = asyncio.Semaphore(slots)

    async def whole(self, wanted: Sequence[Wanted]) -> list[Piece]:
        """The completions, each as one piece. Raises EngineError."""
        running = [asyncio.create_task(self._whole(one)) for one in wanted]
        try:
            return list(await asyncio.gather(*running))
        finally:
            await _end(running)

    async def pieces(self, wanted: Sequence[Wanted], limit_s: float) -> AsyncIterator[tuple[int, Piece]]:
        """The pieces of all completions as they come, each with the position of its completion.

        Raises EngineError, and TimeoutError after `limit_s` seconds.
        """
        coming: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue(_UNREAD_PIECES)

        async def read(position: int, one: Wanted) -> None:
            try:
                async with asyncio.timeout(limit_s), aclosing(self._pieces(one)) as pieces:  # type: ignore[type-var]
                    async for piece in pieces:
                        await coming.put((position, piece))
            except Exception as error:  # whatever it is, the reader of the pieces must get it
                await coming.put((position, error))

        running = [asyncio.create_task(read(position, one)) for position, one in enumerate(wanted)]
        try:
            unfinished = len(wanted)
            while unfinished:
                position, piece = await coming.get()
                if isinstance(piece, Exception):
                    raise piece
                yield position, piece
                unfinished -= piece.ending is not None
        finally:
            await _end(running)

    async def _whole(self, wanted: Wanted) -> Piece:
        if wanted.stops:
            async with aclosing(self._pieces(wanted)) as pieces:  # type: ignore[type-var]
                return _joined([piece async for piece in pieces])
        completion = await (await self._in_slot(self._request(wanted)))
        shown = _shown(completion)
        token_ids = completion.token_ids[:shown].tolist()
        return Piece(self._decode(token_ids), token_ids, completion.logprobs[:shown].tolist(), _ending(completion))

    async def _pieces(self, wanted: Wanted) -> AsyncIterator[Piece]:
        text, num_read = TextStream(self._decode, wanted.stops), 0

        def read(token_ids: Sequence[int], logprobs: Sequence[float]) -> Piece:
            nonlocal num_read
            parts, num_before = [], num_read
            for token_id in token_ids:
                if text.stopped:
                    break
                parts.append(text.add(token_id))
                num_read += 1
            num_new = num_read - num_before
            return Piece("".join(parts), token_ids[:num_new], logprobs[:num_new])

        request = self._request(wanted)
        completing = await self._in_slot(request)
        version = self._engine.policy_version or 0
        try:
            while not (await asyncio.wait({completing}, timeout=_READ_EVERY_S))[0]:
                found = await self._engine.sampled({request.request_id: num_read})
                sampled = found.get(request.request_id)
                if sampled is None:
                    continue
                piece = read(sampled.token_ids.tolist(), sampled.logprobs.tolist())
                if text.stopped:
                    newest = self._engine.policy_version or version
                    ending = Ending(FinishReason.STOP, num_read, version, newest)
                    yield Piece(piece.text, piece.token_ids, piece.logprobs, ending)
                    return
                if piece.token_ids:
                    yield piece
            completion = completing.result()
        finally:
            completing.cancel()
        shown = _shown(completion)
        piece = read(completion.token_ids[num_read:shown].tolist(), completion.logprobs[num_read:shown].tolist())
        ending = _ending(completion)
        if text.stopped:
            ending = Ending(FinishReason.STOP, num_read, ending.oldest_version, ending.newest_version)
        yield Piece(piece.text + text.end(), piece.token_ids, piece.logprobs, ending)

    async def _in_slot(self, request: SampleRequest) -> asyncio.Future[Completion]:
        """Wait for a slot and sample. The slot is free when the engine has ended, also if nobody reads the pieces."""
        await self._slots.acquire()
        completing = self._engine.sample(request)
        completing.add_done_callback(lambda _: self._slots.release())
        return completing

    def _request(self, wanted: Wanted) -> SampleRequest:
        return SampleRequest(
            request_id=f"http-{secrets.token_hex(12)}",
            prompt_token_ids=wanted.prompt_token_ids,
            sampling=wanted.sampling,
            stop_token_ids=self._stop_ids,
            goes_first=True,
        )


def _shown(completion: Completion) -> int:
    """The number of tokens without the stop token."""
    return len(completion.token_ids) - (completion.finish_reason is FinishReason.STOP)


def _ending(completion: Completion) -> Ending:
    versions = [span.policy_version for span in completion.versions]
    return Ending(completion.finish_reason, len(completion.token_ids), min(versions), max(versions))


def _joined(pieces: Sequence[Piece]) -> Piece:
    return Piece(
        text="".join(piece.text for piece in pieces),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        logprobs=[logprob for piece in pieces for logprob in piece.logprobs],
        ending=pieces[-1].ending,
    )


async def _end(tasks: Sequence[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
