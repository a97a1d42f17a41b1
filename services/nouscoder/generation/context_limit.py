"""Holds the rollouts of a run to its context limit, which may be below what the engine was started for."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from nouscoder.domain.tokens import Completion
from nouscoder.generation.engines.base import EngineError, SampleRequest, checked_max_tokens
from nouscoder.generation.environments.base import Sampler


class ContextLimit:
    """Passes requests to `sampler`, cut so that prompt and completion have at most `max_tokens_total` tokens."""

    def __init__(self, sampler: Sampler, max_tokens_total: int) -> None:
        self._sampler = sampler
        self._max_tokens_total = max_tokens_total

    def sample(self, request: SampleRequest) -> asyncio.Future[Completion]:
        """A future of the completion. It raises EngineError when the prompt leaves no room."""
        try:
            max_new_tokens = checked_max_tokens(request, (), self._max_tokens_total)
        except EngineError as error:
            refused: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
            refused.set_exception(error)
            return refused
        sampling = replace(request.sampling, max_new_tokens=max_new_tokens)
        return self._sampler.sample(replace(request, sampling=sampling))
