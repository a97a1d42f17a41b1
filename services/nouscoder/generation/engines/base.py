"""The seam between the generation service and what samples tokens: token ids in, a completion out.

An engine knows no text, no problem and no tokenizer. What ends a completion is part of each request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nouscoder.domain.rollout import Completion, Sampling
from nouscoder.errors import NousCoderError, Unusable


class EngineError(NousCoderError):
    """The engine cannot do what it was asked; the message names the request or file at fault."""


class EngineUnusable(EngineError, Unusable):
    """The engine can never work with the policy folder or the device it was given."""


class EngineStopped(EngineError):
    """The engine does not run any more: it failed, or the service is going down."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A completion to sample: it follows `prompt_token_ids` [prompt tokens] and ends with one of `stop_token_ids`.

    The stop token is part of the completion. Without one the completion is cut at `sampling.max_new_tokens` tokens, or
    where the engine has no room. `request_id` is unique among the requests that an engine has.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    stop_token_ids: frozenset[int]


class Engine(Protocol):
    """Samples many requests at once, and takes over new weights while it does.

    Every request ends exactly once: with its completion, with an error, or cancelled. All methods belong to the event
    loop. Use as an asynchronous context manager is up to `open_engine`.
    """

    name: str

    def sample(self, request: SampleRequest) -> asyncio.Future[Completion]:
        """The completion to come. Cancelling the future cancels the request.

        It ends with EngineError when the prompt is empty or leaves no room, when the id is in use, or when the engine
        stops.
        """
        ...

    async def load_policy(self, files: Sequence[Path], policy_version: int) -> float:
        """Take over new weights; running requests go on, and their next tokens carry the new version.

        `files` are the policy's safetensors shards. Returns the seconds for which decoding stood still. Raises
        EngineError, with the old weights untouched, when they cannot be read or do not fit.
        """
        ...

    async def pause(self, limit_s: float) -> None:
        """Decode nothing until `resume`, but for `limit_s` seconds at most. Pausing again sets the limit anew."""
        ...

    async def resume(self) -> None:
        """End a pause."""
        ...

    async def failed(self) -> None:
        """Wait until the engine fails, then raise its error."""
        ...

    @property
    def policy_version(self) -> int | None:
        """Version of the weights in use; None before the first `load_policy`."""
        ...

    @property
    def num_running(self) -> int:
        """Requests being decoded."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests waiting for a place."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens sampled since the start."""
        ...

    @property
    def paused(self) -> bool:
        """Decoding stands still on request."""
        ...

    @property
    def idle_s(self) -> float:
        """Seconds without decoding since the start."""
        ...
