"""The `fake` engine: scripted completions, with all rules of a real engine but without a model.

INVARIANT: as for the torch engine, a request ends exactly once, and each token has the version that was in use when it
was sampled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from random import Random

from nouscoder.domain.tokens import Completion, FinishReason, SampledTokens, float32, int32, spans_of
from nouscoder.generation.engines.base import EngineError, EnginePlaces, SampleRequest, checked_max_tokens

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
class _Row:
    request: SampleRequest
    script: list[int]
    max_tokens: int
    versions: list[int] = field(default_factory=list)


class FakeEngine:
    """Samples `script(request)` token by token, then a stop token. Without stop tokens the script repeats.

    Each step takes at least `step_s` seconds, in which the thread sleeps.
    """

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
        self._places = EnginePlaces(max_running, guest_places)
        self._max_tokens_total = max_tokens_total
        self._script = script
        self._step_s = step_s
        self._waiting: dict[str, _Row] = {}
        self._running: dict[str, _Row] = {}
        self.policy_version: int | None = None
        self.num_tokens = 0

    @property
    def num_running(self) -> int:
        """Requests being decoded."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests waiting for a place."""
        return len(self._waiting)

    @property
    def progress(self) -> dict[str, int]:
        """Tokens sampled so far of each running request, by request id."""
        return {request_id: len(row.versions) for request_id, row in self._running.items()}

    def add(self, request: SampleRequest) -> None:
        """Queue a request. Raises EngineError naming it."""
        max_tokens = checked_max_tokens(request, self._waiting.keys() | self._running.keys(), self._max_tokens_total)
        script = [*self._script(request), *sorted(request.stop_token_ids)[:1]]
        if not request.stop_token_ids:
            script *= request.num_kept + max_tokens  # only its limit ends it
        self._waiting[request.request_id] = _Row(request, script[request.num_kept :], max_tokens)

    def cancel(self, request_id: str) -> None:
        """Forget a request."""
        self._waiting.pop(request_id, None)
        self._running.pop(request_id, None)

    def sampled(self, request_id: str, start: int) -> SampledTokens | None:
        """The tokens of a running request from number `start` on."""
        row = self._running.get(request_id)
        return _sampled(row).after(start) if row is not None and len(row.versions) > start else None

    def load_policy(self, files: Sequence[Path], policy_version: int) -> None:
        """Use a new version. Only the length of each file's header is checked."""
        for file in files:
            _check_header(file)
        self.policy_version = policy_version

    def step(self) -> list[tuple[str, Completion]]:
        """Sample one token for every request."""
        if self.policy_version is None:
            raise EngineError("no policy has been loaded")
        if self._step_s:
            time.sleep(self._step_s)
        for row in self._places.admitted(self._waiting.values(), self._running.values()):
            self._running[row.request.request_id] = self._waiting.pop(row.request.request_id)
        finished: list[tuple[str, Completion]] = []
        for request_id, row in list(self._running.items()):
            row.versions.append(self.policy_version)
            if len(row.versions) in (len(row.script), row.max_tokens):
                del self._running[request_id]
                finished.append((request_id, _completion(row)))
            self.num_tokens += 1
        return finished


def _check_header(file: Path) -> None:
    try:
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(_HEADER_BYTES), "little")
        num_bytes = file.stat().st_size
    except OSError as error:
        raise EngineError(f"{file} holds no readable weights: {error}") from error
    if not 0 < header_bytes <= num_bytes - _HEADER_BYTES:
        raise EngineError(f"{file} holds no readable weights: its header is invalid")


def _sampled(row: _Row) -> SampledTokens:
    token_ids = row.script[: len(row.versions)]
    return SampledTokens(int32(token_ids), float32([_LOGPROB] * len(token_ids)), spans_of(row.versions))


def _completion(row: _Row) -> Completion:
    sampled = _sampled(row)
    stopped = row.request.is_ended(sampled.token_ids)
    return sampled.ended(FinishReason.STOP if stopped else FinishReason.LENGTH)
