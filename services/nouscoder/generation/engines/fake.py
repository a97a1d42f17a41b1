"""The `fake` engine: scripted completions, with all rules of a real engine but without a model.

INVARIANT: as for the torch engine, a request ends exactly once, and each token has the version that was in use when it
was sampled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from random import Random

from nouscoder.domain.tokens import FinishReason, SampledTokens
from nouscoder.generation.engines.base import EngineError, EnginePlaces, SampleRequest
from nouscoder.generation.engines.stepped import Ended, Row, StepEngine

_LOGPROB = -0.5
_HEADER_BYTES = 8
_SCRIPT_TOKENS = 8

# The tokens that follow a request's prompt; the engine adds a stop token.
Script = Callable[[SampleRequest], Sequence[int]]


def default_script(request: SampleRequest) -> list[int]:
    """A few tokens of the prompt, chosen by the prompt and the seed, so that any tokenizer can decode them."""
    prompt = _prompt_tokens(request)
    if not prompt:
        return []
    draws = blake2b(f"{request.sampling.seed}/{prompt}".encode(), digest_size=_SCRIPT_TOKENS).digest()
    return [prompt[draw % len(prompt)] for draw in draws]


def script_of(median_tokens: int, sigma: float) -> Script:
    """Tokens of the prompt, as many as a log-normal distribution gives: median_tokens * exp(sigma * z), z ~ N(0, 1).

    The request's seed chooses them. `median_tokens` 0 gives `default_script`.
    """
    if not median_tokens:
        return default_script

    def script(request: SampleRequest) -> list[int]:
        source, prompt = Random(f"{request.sampling.seed}/{request.request_id}"), _prompt_tokens(request)
        length = round(median_tokens * math.exp(source.gauss(0.0, sigma)))
        return source.choices(prompt, k=max(1, length)) if prompt else []

    return script


def _prompt_tokens(request: SampleRequest) -> list[int]:
    prompt = request.prompt_token_ids[: len(request.prompt_token_ids) - request.num_kept]
    return [token for token in prompt if token not in request.stop_token_ids]


@dataclass(slots=True)
class _Row(Row):
    script: list[int] = field(default_factory=list)


class FakeEngine(StepEngine[_Row]):
    """Samples `script(request)` and a stop token; without one the script repeats. A step takes `step_s` seconds."""

    name = "fake"

    def __init__(
        self,
        *,
        max_running: int,
        max_tokens_total: int,
        guest_places: int = 0,
        script: Script = default_script,
        step_s: float = 0.0,
    ) -> None:
        super().__init__(EnginePlaces(max_running, guest_places), max_tokens_total)
        self._script = script
        self._step_s = step_s
        self._running: dict[str, _Row] = {}

    @property
    def running(self) -> Collection[_Row]:
        return self._running.values()

    def _row(self, request: SampleRequest, max_tokens: int) -> _Row:
        script = [*self._script(request), *sorted(request.stop_token_ids)[:1]]
        if not request.stop_token_ids:
            script *= request.num_kept + max_tokens  # only its limit ends it
        return _Row(request, max_tokens, script=script[request.num_kept :])

    def sampled(self, request_id: str, start: int) -> SampledTokens | None:
        """See `StepEngine`. Thousands may run, so they are not looked through."""
        row = self._running.get(request_id)
        return row.sampled(start) if row is not None and len(row.token_ids) > start else None

    def cancel(self, request_id: str) -> None:
        """Forget a request."""
        self._waiting.pop(request_id, None)
        self._running.pop(request_id, None)

    def load_policy(self, files: Sequence[Path], policy_version: int) -> None:
        """Use a new version. Only the length of each file's header is checked."""
        for file in files:
            try:
                with file.open("rb") as stream:
                    header_bytes = int.from_bytes(stream.read(_HEADER_BYTES), "little")
                num_bytes = file.stat().st_size
            except OSError as error:
                raise EngineError(f"{file} holds no readable weights: {error}") from error
            if not 0 < header_bytes <= num_bytes - _HEADER_BYTES:
                raise EngineError(f"{file} holds no readable weights: its header is invalid")
        self.policy_version = policy_version

    def step(self) -> Ended:
        """Sample one token for every request."""
        if self.policy_version is None:
            raise EngineError("no policy has been loaded")
        if self._step_s:
            time.sleep(self._step_s)
        for row in self._places.admitted(self._waiting.values(), self.running):
            self._running[row.request.request_id] = self._waiting.pop(row.request.request_id)
        finished: Ended = []
        for request_id, row in list(self._running.items()):
            row.take(row.script[len(row.token_ids)], _LOGPROB, self.policy_version)
            if len(row.token_ids) in (len(row.script), row.max_tokens):
                del self._running[request_id]
                stopped = row.request.is_ended(row.token_ids)
                reason = FinishReason.STOP if stopped else FinishReason.LENGTH
                finished.append((request_id, row.sampled().ended(reason)))
            self.num_tokens += 1
        return finished
