"""Samples completions for the API, in a bounded number of the engine's places.

INVARIANT: at most `slots` samples of the API are asked of the engine at a time. Clients take turns with their
completions: a request for n completions takes n turns, and those after its first one get one slot in ten while first
ones wait. When a sample ends in any way, a client that hangs up included, the engine has no request of it. The texts
that `TextStream.add` and `end` return, joined, are the text of all tokens up to the first stop string. The tokens that
a stream holds for its client are counted in the memory budget.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from nouscoder.domain.rollout import Sampling
from nouscoder.domain.tokens import Completion, FinishReason
from nouscoder.errors import first_error
from nouscoder.generation.engines.base import Engine, SampleRequest
from nouscoder.http_server.fair_queue import FairSlots
from nouscoder.http_server.memory_budget import charge_decoded

# What a tokenizer writes for bytes that are not, or not yet, a character.
_REPLACEMENT = "\ufffd"
_READ_EVERY_S = 0.05  # how often the tokens of a running sample are read
_TOKENS_AT_ONCE = 64  # decoded in the event loop
_BYTES_OF_SAMPLED = 128  # id, log-probability, text
_MOST_WAITING = 100_000  # more than the completions of all requests that have a place


class TextStream:
    """Decodes tokens as they come. Text that may still change, or may begin a stop string, is held back."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = stops
        self._ids: list[int] = []
        # Tokens up to `_read` have been decoded; those from `_prefix` on are the context of the next ones, because a
        # token's text can depend on the token before.
        self._prefix = 0
        self._read = 0
        self._held = ""
        self.stopped = False

    def add(self, token_id: int) -> str:
        """The text that is certain now. After a stop string `stopped` is set, and there is no more text."""
        self._ids.append(token_id)
        return self._released(self._decoded(is_last=False), is_last=False)

    def end(self) -> str:
        """The rest of the text."""
        return self._released(self._decoded(is_last=True), is_last=True)

    def _decoded(self, *, is_last: bool) -> str:
        before = self._decode(self._ids[self._prefix : self._read])
        now = self._decode(self._ids[self._prefix :])
        if now.endswith(_REPLACEMENT) and not is_last:
            return ""  # perhaps the first bytes of a character
        self._prefix, self._read = self._read, len(self._ids)
        return now[len(before) :]

    def _released(self, text: str, *, is_last: bool) -> str:
        if self.stopped:
            return ""
        held = self._held + text
        places = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            return held[: min(places)]
        keep = 0 if is_last else max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that may be the beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


@dataclass(frozen=True, slots=True)
class WantedCompletion:
    """One completion: of `prompt_token_ids` [prompt tokens], ended by any of the texts in `stops` too."""

    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    stops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionEnd:
    """How a completion ended: why, after how many tokens (the stop token included), and sampled by which versions.

    A stop string ends a completion between two tokens of the engine; the versions are then those in use meanwhile.
    """

    finish_reason: FinishReason
    num_tokens: int
    oldest_version: int
    newest_version: int


@dataclass(frozen=True, slots=True)
class CompletionPiece:
    """A part of a completion; the last has an end. Text that may begin a stop string comes later than its tokens."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    ending: CompletionEnd | None = None


class ApiSampler:
    """Samples on one engine. `decode` is the tokenizer's, and a token of `stop_ids` ends a completion."""

    def __init__(
        self, engine: Engine, decode: Callable[[Sequence[int]], str], stop_ids: frozenset[int], slots: int
    ) -> None:
        self._engine = engine
        self._decode = decode
        self._stop_ids = stop_ids
        self._slots = FairSlots(slots, _MOST_WAITING, lambda waiting, busy: None)

    async def whole(self, wanted: Sequence[WantedCompletion], client: str) -> list[CompletionPiece]:
        """The completions, each as one piece, whose memory is counted. Raises EngineError and MemoryBudgetExceeded."""
        running = [
            asyncio.create_task(self._whole(one, client, is_first=not position)) for position, one in enumerate(wanted)
        ]
        try:
            return list(await asyncio.gather(*running))
        finally:
            await _end(running)

    async def pieces(
        self, wanted: Sequence[WantedCompletion], client: str, limit_s: float
    ) -> AsyncGenerator[tuple[int, CompletionPiece]]:
        """The pieces as they come, with their completion's place. Raises as `whole`, and TimeoutError."""
        coming: asyncio.Queue[tuple[int, CompletionPiece] | BaseException] = asyncio.Queue()

        async def take(position: int, one: WantedCompletion) -> None:
            async with aclosing(self._pieces(one, client, is_first=not position)) as pieces:
                async for piece in pieces:
                    charge_decoded(_BYTES_OF_SAMPLED * len(piece.token_ids))
                    coming.put_nowait((position, piece))

        async def produce() -> None:
            try:
                async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
                    for position, one in enumerate(wanted):
                        group.create_task(take(position, one))
            except* Exception as errors:  # whatever it is, the reader of the pieces must get it
                coming.put_nowait(first_error(errors))

        producing = asyncio.create_task(produce())
        try:
            unfinished = len(wanted)
            while unfinished:
                found = await coming.get()
                if isinstance(found, BaseException):
                    raise found
                yield found
                unfinished -= found[1].ending is not None
        finally:
            await _end([producing])

    async def _whole(self, wanted: WantedCompletion, client: str, *, is_first: bool) -> CompletionPiece:
        if wanted.stops:
            async with aclosing(self._pieces(wanted, client, is_first=is_first)) as pieces:
                whole = _joined([piece async for piece in pieces])
        else:
            async with self._slots.slot(client, in_background=not is_first):
                completion = await self._engine.sample(self._request(wanted))
            whole = piece_of(completion, self._decode, self._stop_ids)
        charge_decoded(_BYTES_OF_SAMPLED * len(whole.token_ids))
        return whole

    async def _pieces(
        self, wanted: WantedCompletion, client: str, *, is_first: bool
    ) -> AsyncGenerator[CompletionPiece]:
        text, num_read = TextStream(self._decode, wanted.stops), 0

        async def read(token_ids: Sequence[int], logprobs: Sequence[float]) -> CompletionPiece:
            nonlocal num_read
            parts, num_before = [], num_read
            for token_id in token_ids:
                if text.stopped:
                    break
                parts.append(text.add(token_id))
                num_read += 1
                if num_read % _TOKENS_AT_ONCE == 0:
                    await asyncio.sleep(0)
            num_new = num_read - num_before
            return CompletionPiece("".join(parts), token_ids[:num_new], logprobs[:num_new])

        async with self._slots.slot(client, in_background=not is_first):
            version = self._engine.policy_version or 0
            request = self._request(wanted)
            completing = self._engine.sample(request)
            try:
                while not (await asyncio.wait({completing}, timeout=_READ_EVERY_S))[0]:
                    sampled = (await self._engine.sampled({request.request_id: num_read})).get(request.request_id)
                    if sampled is None:
                        continue
                    piece = await read(sampled.token_ids.tolist(), sampled.logprobs.tolist())
                    if text.stopped:
                        newest = self._engine.policy_version or version
                        ending = CompletionEnd(FinishReason.STOP, num_read, version, newest)
                        yield replace(piece, ending=ending)
                        return
                    if piece.token_ids:
                        yield piece
                completion = completing.result()
            finally:
                completing.cancel()
        shown = _shown(completion, self._stop_ids)
        piece = await read(completion.token_ids[num_read:shown].tolist(), completion.logprobs[num_read:shown].tolist())
        ending = ended_as(completion)
        if text.stopped:
            ending = replace(ending, finish_reason=FinishReason.STOP, num_tokens=num_read)
        yield replace(piece, text=piece.text + text.end(), ending=ending)

    def _request(self, wanted: WantedCompletion) -> SampleRequest:
        name = f"http-{secrets.token_hex(12)}"
        return SampleRequest(name, wanted.prompt_token_ids, wanted.sampling, self._stop_ids, is_guest=True)


def _shown(completion: Completion, stop_ids: frozenset[int]) -> int:
    """The number of tokens without the stop token."""
    is_stopped = completion.finish_reason is FinishReason.STOP and completion.token_ids[-1] in stop_ids
    return len(completion.token_ids) - is_stopped


def piece_of(
    completion: Completion, decode: Callable[[Sequence[int]], str], stop_ids: frozenset[int]
) -> CompletionPiece:
    """A completion of an engine as one piece, without its stop token."""
    shown = _shown(completion, stop_ids)
    token_ids, logprobs = completion.token_ids[:shown].tolist(), completion.logprobs[:shown].tolist()
    return CompletionPiece(decode(token_ids), token_ids, logprobs, ended_as(completion))


def ended_as(completion: Completion) -> CompletionEnd:
    """How a completion of an engine ended."""
    versions = [span.policy_version for span in completion.versions]
    return CompletionEnd(completion.finish_reason, len(completion.token_ids), min(versions), max(versions))


def _joined(pieces: Sequence[CompletionPiece]) -> CompletionPiece:
    return CompletionPiece(
        text="".join(piece.text for piece in pieces),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        logprobs=[logprob for piece in pieces for logprob in piece.logprobs],
        ending=pieces[-1].ending,
    )


async def _end(tasks: Sequence[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
