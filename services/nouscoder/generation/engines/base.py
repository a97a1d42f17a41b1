"""The interface between the generation service and engines: token ids in, a completion out.

An engine has no text, no problem and no tokenizer. Each request names the tokens that end its completion.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, TypeVar

from nouscoder.domain.rollout import Sampling
from nouscoder.domain.tokens import Completion, SampledTokens
from nouscoder.errors import NousCoderError, Unusable


class EngineError(NousCoderError):
    """The engine cannot serve a request. The message names the request or the invalid file."""


class PromptTooLong(EngineError):
    """The prompt leaves no room for a token of the completion. The message has both numbers."""


class EngineUnusable(EngineError, Unusable):
    """The engine can never work with the configured policy folder or device."""


class EngineStopped(EngineError):
    """The engine no longer runs: it failed, or the service is stopping."""


class StopTexts:
    """Texts that end an answer. `decode` makes text of token ids; it may be called in any thread."""

    def __init__(self, texts: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._texts = texts
        self._decode = decode
        # A token has a byte at least. The first one of a window may lose a space.
        self.num_tokens = 2 + max(len(text.encode()) for text in texts)

    def end(self, token_ids: Sequence[int]) -> bool:
        """Whether one of the texts is at the end of an answer with these tokens [tokens]: in the last `num_tokens`."""
        text = self._decode(token_ids[-self.num_tokens :])
        return any(stop in text for stop in self._texts)


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request for the completion of `prompt_token_ids` [prompt tokens]. It ends with one of `stop_token_ids`.

    The stop token is part of the completion. Without one the completion is cut at `sampling.max_new_tokens` tokens, or
    at the capacity of the engine. `request_id` is unique among the current requests of an engine. One that `is_guest`
    comes from the API in OpenAI's form, and gets one of the places for guests. The last `num_kept` tokens of the prompt
    are the first tokens of the same answer, which were sampled earlier: the random stream of the request goes on after
    them. They are not in the completion, and `max_new_tokens` does not count them.

    Only the `top_k` most likely tokens are candidates (0: all), and those with at least `min_p` of the probability of
    the most likely one. As with top-p, log-probabilities are those of all tokens. `stops`: texts that end it too.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    stop_token_ids: frozenset[int]
    is_guest: bool = False
    num_kept: int = 0
    top_k: int = 0
    min_p: float = 0.0
    stops: StopTexts | None = None

    def is_ended(self, token_ids: Sequence[int]) -> bool:
        """Whether the completion `token_ids` [tokens, at least one] ends with its newest token."""
        if token_ids[-1] in self.stop_token_ids:
            return True
        if self.stops is None:
            return False
        window = self.stops.num_tokens
        kept = self.prompt_token_ids[len(self.prompt_token_ids) - self.num_kept :]
        return self.stops.end([*kept[-window:], *token_ids[-window:]])


def seed_from(*parts: object) -> int:
    """A seed that depends on these parts."""
    return int.from_bytes(blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "little")


def seed_of(request: SampleRequest) -> int:
    """The request's seed. Seed 0 is replaced by one from the request id, so that repeated requests sample the same."""
    if request.sampling.seed:
        return request.sampling.seed % 2**64
    return seed_from(request.request_id)


class Sampler(Protocol):
    """What environments need of an engine."""

    def sample(self, request: SampleRequest) -> asyncio.Future[Completion]:
        """A future of the completion. Cancelling it cancels the request.

        It raises EngineError when the prompt is empty or too long, when the id is in use, or when the engine stops.
        """


class Engine(Sampler, Protocol):
    """Samples many requests at once, and can load new weights meanwhile.

    Every request ends exactly once: with its completion, with an error, or cancelled. All methods must be called in the
    event loop. `open_engine` opens and closes an engine.
    """

    name: str

    @property
    def policy_version(self) -> int | None:
        """Version of the weights in use; None before the first `load_policy`."""

    async def sampled(self, starts: Mapping[str, int]) -> dict[str, SampledTokens]:
        """For each request being decoded: its sampled tokens from number `starts[request_id]` on.

        Requests without such a token, and unknown ones, are left out. Raises EngineStopped.
        """

    async def load_policy(self, files: Sequence[Path], policy_version: int) -> float:
        """Load new weights. Running requests continue, and their next tokens have the new version.

        `files` are the policy's safetensors shards, or those of a base and then an adapter of it. Returns the seconds
        for which decoding paused. Raises EngineError and keeps the old weights when they cannot be read or do not fit.
        """

    async def pause(self, limit_s: float) -> None:
        """Stop decoding until `resume`, for at most `limit_s` seconds. Another call sets the limit again."""

    async def resume(self) -> None:
        """End a pause."""

    async def failed(self) -> None:
        """Wait until the engine fails, then raise its error."""

    @property
    def num_running(self) -> int:
        """Requests being decoded."""

    @property
    def num_waiting(self) -> int:
        """Requests waiting for a place."""

    @property
    def num_tokens(self) -> int:
        """Tokens sampled since the start."""

    @property
    def progress(self) -> Mapping[str, int]:
        """Tokens sampled so far of each request being decoded, by request id."""

    @property
    def paused(self) -> bool:
        """Whether decoding is paused."""

    @property
    def idle_s(self) -> float:
        """Seconds without decoding since the start."""


class WaitingRow(Protocol):
    """What an engine keeps of a waiting request."""

    request: SampleRequest


WaitingT = TypeVar("WaitingT", bound=WaitingRow)


@dataclass(frozen=True, slots=True)
class EnginePlaces:
    """How many requests are decoded at a time. Guests have places beside those of rollouts, and never take theirs."""

    rollouts: int
    guests: int = 0

    @property
    def total(self) -> int:
        """All places."""
        return self.rollouts + self.guests

    def admitted(self, waiting: Iterable[WaitingT], running: Iterable[WaitingT]) -> list[WaitingT]:
        """The waiting requests that have a place beside the running ones: guests, then rollouts, the oldest first."""
        kinds = [row.request.is_guest for row in running]
        free_of_guests, free_of_rollouts = self.guests - sum(kinds), self.rollouts - kinds.count(False)
        guests: list[WaitingT] = []
        rollouts: list[WaitingT] = []
        for row in waiting:
            if row.request.is_guest:
                guests.append(row)
            elif len(rollouts) < free_of_rollouts:
                rollouts.append(row)
        return guests[: max(0, free_of_guests)] + rollouts


def checked_max_tokens(request: SampleRequest, ids_in_use: Collection[str], capacity: int) -> int:
    """The most tokens of the completion, with the prompt at most `capacity`. Raises EngineError naming the request."""
    name = f"request {request.request_id}"
    num_prompt_tokens = len(request.prompt_token_ids)
    if request.request_id in ids_in_use:
        raise EngineError(f"{name}: the id is in use")
    if not num_prompt_tokens:
        raise EngineError(f"{name}: the prompt is empty")
    room = capacity - num_prompt_tokens
    if room < 1:
        kind = EngineError if request.num_kept else PromptTooLong  # kept tokens are not of the prompt
        raise kind(f"{name}: a prompt of {num_prompt_tokens} tokens leaves no room in a total of {capacity}")
    if request.sampling.max_new_tokens < 1:
        raise EngineError(f"{name}: max_new_tokens must be at least 1")
    return min(room, request.sampling.max_new_tokens)
