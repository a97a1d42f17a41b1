"""The interface of an engine that decodes one step at a time: `torch` and `fake`. stepped.py makes an Engine of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from nouscoder.domain.tokens import Completion, SampledTokens
from nouscoder.generation.engines.base import SampleRequest


class StepEngine(Protocol):
    """Continuous batching in steps: requests wait, run together, and end as completions.

    Every added request ends exactly once, as a completion or by `cancel`. One thread calls all methods.
    """

    name: str

    def add(self, request: SampleRequest) -> None:
        """Queue a request. Raises EngineError when its prompt is empty or too long, or its id is in use."""
        ...

    def cancel(self, request_id: str) -> None:
        """Remove a waiting or running request. Unknown ids are ignored."""
        ...

    def step(self) -> list[tuple[str, Completion]]:
        """Admit waiting requests while there is room, and decode one token for each running request.

        Returns the requests that have ended, as (request id, completion) pairs. Raises EngineError before a policy is
        loaded, and for NaN logits.
        """
        ...

    def sampled(self, request_id: str, start: int) -> SampledTokens | None:
        """The tokens of a running request from number `start` on; None when there is none."""
        ...

    def load_policy(self, files: Sequence[Path], policy_version: int) -> None:
        """Load new weights. Raises EngineError and keeps the old weights when they do not fit."""
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
    def progress(self) -> Mapping[str, int]:
        """Tokens sampled so far of each running request, by request id."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens sampled since the start."""
        ...
