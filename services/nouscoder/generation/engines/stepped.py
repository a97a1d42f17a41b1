"""Makes an Engine from a StepEngine, which decodes one step at a time: `torch` or `fake`. What these two share is here.

One thread runs the decoding steps, and the event loop waits for results.

INVARIANT: only the thread uses the step engine, so weights and requests change only between two steps. Every returned
future ends exactly once: with its completion, with an error, or cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from nouscoder.domain.tokens import Completion, ExpertChoices, FinishReason, SampledTokens, float32, int32, spans_of
from nouscoder.generation.engines.base import (
    EngineError,
    EnginePlaces,
    EngineStopped,
    SampleRequest,
    checked_max_tokens,
)
from nouscoder.generation.metrics import GenerationMetrics, IdleReason

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

# The time after which an idle thread updates the idle counter. A command ends the wait at once.
_IDLE_TICK_S = 0.2
_JOIN_LIMIT_S = 60.0


RouterChoices = npt.NDArray[np.unsignedinteger[Any]]
Ended = list[tuple[str, Completion]]


@dataclass(slots=True)
class Row:
    """A completion cut at `max_tokens`. `experts`: those of the cached tokens, [positions, layers, top_k] in parts."""

    request: SampleRequest
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: list[RouterChoices] = field(default_factory=list)

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids [prompt tokens]."""
        return tuple(self.request.prompt_token_ids)

    @property
    def cached_tokens(self) -> int:
        """The number of tokens whose keys and values are in the cache: all but the newest."""
        return len(self.request.prompt_token_ids) + len(self.token_ids) - 1

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ends with its newest token; None while it continues."""
        if self.request.is_ended(self.token_ids):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) == self.max_tokens else None

    def take(self, token_id: int, logprob: float, policy_version: int) -> None:
        """Append a sampled token."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.versions.append(policy_version)

    def sampled(self, start: int = 0) -> SampledTokens:
        """The tokens from number `start` on."""
        return SampledTokens(
            int32(self.token_ids[start:]),
            float32(self.logprobs[start:]),
            spans_of(self.versions[start:]),
            experts=_expert_choices(self.experts[start:]),  # the first are those of the prompt
        )


def _expert_choices(parts: Sequence[RouterChoices]) -> ExpertChoices | None:
    """Those [positions, layers, top_k] of consecutive positions, as a completion has them. None when there are none."""
    if not parts:
        return None
    whole = np.concatenate(parts)
    return ExpertChoices(whole.reshape(-1).data, *whole.shape[1:])


RowT = TypeVar("RowT", bound=Row)


class StepEngine(ABC, Generic[RowT]):
    """Continuous batching in steps. A request ends once: as a completion or by `cancel`. One thread calls it."""

    name: str

    def __init__(self, places: EnginePlaces, capacity: int) -> None:
        """Prompt and completion together have at most `capacity` tokens."""
        self._places = places
        self._capacity = capacity
        self._waiting: dict[str, RowT] = {}
        self.policy_version: int | None = None  # of the weights in use; None before the first `load_policy`
        self.num_tokens = 0  # sampled since the start

    @property
    @abstractmethod
    def running(self) -> Collection[RowT]:
        """Requests being decoded."""

    @property
    def num_running(self) -> int:
        """Their number."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Requests waiting for a place."""
        return len(self._waiting)

    @property
    def progress(self) -> dict[str, int]:
        """Tokens sampled so far of each running request, by request id."""
        return {row.request.request_id: len(row.token_ids) for row in self.running}

    def add(self, request: SampleRequest) -> None:
        """Queue a request. Raises EngineError when its prompt is empty or too long, or its id is in use."""
        ids_in_use = self._waiting.keys() | self.progress.keys()
        self._waiting[request.request_id] = self._row(request, checked_max_tokens(request, ids_in_use, self._capacity))

    @abstractmethod
    def _row(self, request: SampleRequest, max_tokens: int) -> RowT:
        """The row of a new request."""

    def sampled(self, request_id: str, start: int) -> SampledTokens | None:
        """The tokens of a running request from number `start` on; None when there is none."""
        for row in self.running:
            if row.request.request_id == request_id and len(row.token_ids) > start:
                return row.sampled(start)
        return None

    @abstractmethod
    def cancel(self, request_id: str) -> None:
        """Remove a waiting or running request. Unknown ids are ignored."""

    @abstractmethod
    def step(self) -> Ended:
        """Admit waiting requests, and decode one token of each running one. Returns those that have ended.

        Raises EngineError before a policy is loaded, and for NaN logits.
        """

    @abstractmethod
    def load_policy(self, files: Sequence[Path], policy_version: int) -> None:
        """Load new weights. Raises EngineError and keeps the old weights when they do not fit."""


class SteppedEngine:
    """An Engine. Use as `async with SteppedEngine(step_engine, metrics) as engine:`."""

    def __init__(self, engine: StepEngine[Any], metrics: GenerationMetrics) -> None:
        self.name = engine.name
        self._engine = engine
        self._metrics = metrics
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = False
        self._paused_until_s: float | None = None
        self.idle_s = 0.0
        self.progress: Mapping[str, int] = {}  # after the last step
        self._open: set[asyncio.Future[Any]] = set()  # unfinished futures, in the event loop
        # This belongs to the thread: futures by request.
        self._sampling: dict[str, asyncio.Future[Completion]] = {}

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._commands.put(lambda: setattr(self, "_closing", True))
        await asyncio.to_thread(self._thread.join, _JOIN_LIMIT_S)
        if not self._failure.done():
            self._end_all(EngineStopped("the engine is stopping"))
        self._failure.exception()  # retrieved, so that asyncio does not report it as never retrieved

    @property
    def policy_version(self) -> int | None:
        return self._engine.policy_version

    @property
    def num_running(self) -> int:
        return self._engine.num_running

    @property
    def num_waiting(self) -> int:
        return self._engine.num_waiting

    @property
    def num_tokens(self) -> int:
        return self._engine.num_tokens

    @property
    def paused(self) -> bool:
        return self._paused_until_s is not None

    def sample(self, request: SampleRequest) -> asyncio.Future[Completion]:
        """A future of the completion. Cancelling it cancels the request."""
        future: asyncio.Future[Completion] = self._new_future()
        future.add_done_callback(lambda ended: self._forget(request.request_id, ended) if ended.cancelled() else None)
        self._commands.put(lambda: self._add(request, future))
        return future

    async def sampled(self, starts: Mapping[str, int]) -> dict[str, SampledTokens]:
        """Sampled tokens of running requests, read between two steps."""

        def read() -> dict[str, SampledTokens]:
            found = {name: self._engine.sampled(name, start) for name, start in starts.items()}
            return {name: tokens for name, tokens in found.items() if tokens is not None}

        return await self._ask(read)

    async def load_policy(self, files: Sequence[Path], policy_version: int) -> float:
        """Load weights between two steps. Returns the seconds for which decoding paused."""

        def load() -> float:
            started_s = time.monotonic()
            self._engine.load_policy(files, policy_version)
            pause_s = time.monotonic() - started_s
            self._metrics.policy_update_seconds.observe(pause_s)
            self._metrics.policy_version.set(policy_version)
            return pause_s

        return await self._ask(load)

    async def pause(self, limit_s: float) -> None:
        """Pause until `resume`, for at most `limit_s` seconds. No step runs when this returns."""
        await self._ask(lambda: setattr(self, "_paused_until_s", time.monotonic() + limit_s))

    async def resume(self) -> None:
        await self._ask(lambda: setattr(self, "_paused_until_s", None))

    async def failed(self) -> None:
        await asyncio.shield(self._failure)

    def _new_future(self) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        if self._failure.done():
            future.set_exception(EngineStopped("the engine no longer runs"))
        else:
            self._open.add(future)
            future.add_done_callback(self._open.discard)
        return future

    def _ask(self, work: Callable[[], Answer]) -> asyncio.Future[Answer]:
        """Run `work` in the thread between two steps."""
        future: asyncio.Future[Answer] = self._new_future()

        def command() -> None:
            try:
                answer = work()
            except EngineError as error:
                self._post(_set_error, future, error)
            else:
                self._post(_set_result, future, answer)

        self._commands.put(command)
        return future

    def _forget(self, request_id: str, future: asyncio.Future[Completion]) -> None:
        def command() -> None:
            if self._sampling.get(request_id) is future:
                del self._sampling[request_id]
                self._engine.cancel(request_id)

        self._commands.put(command)

    def _end_all(self, error: EngineError) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)
        for future in list(self._open):
            _set_error(future, error)
            future.exception()

    # The methods below run in the thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                reason = self._idle_reason()
                if reason is None:
                    tokens_before = self._engine.num_tokens
                    ended = self._engine.step()
                    self._metrics.tokens.inc(self._engine.num_tokens - tokens_before)
                    self.progress = self._engine.progress
                    self._metrics.running_rollouts.set(self._engine.num_running)
                    if ended:
                        delivery = [(self._sampling.pop(request_id), completion) for request_id, completion in ended]
                        self._post(_deliver, delivery)
                else:
                    started_s = time.monotonic()
                    try:
                        command = self._commands.get(timeout=_IDLE_TICK_S)
                    except queue.Empty:
                        command = None
                    waited_s = time.monotonic() - started_s
                    self.idle_s += waited_s
                    self._metrics.idle_seconds.labels(reason.value).inc(waited_s)
                    if command is not None:
                        command()
                while not self._commands.empty():
                    self._commands.get()()
        except Exception as error:  # waiting callers must get any error
            log.exception("the engine failed")
            stopped = EngineStopped(f"the engine failed: {error}")
            stopped.__cause__ = error
            self._post(self._end_all, stopped)

    def _idle_reason(self) -> IdleReason | None:
        if self._paused_until_s is not None and time.monotonic() >= self._paused_until_s:
            self._paused_until_s = None
            log.warning("the pause reached its time limit: decoding continues")
        if self._engine.policy_version is None:
            return IdleReason.NO_POLICY
        if self._paused_until_s is not None:
            return IdleReason.PAUSED
        if not self._engine.num_running and not self._engine.num_waiting:
            return IdleReason.NO_TASKS
        return None

    def _add(self, request: SampleRequest, future: asyncio.Future[Completion]) -> None:
        try:
            self._engine.add(request)
        except EngineError as error:
            self._post(_set_error, future, error)
        else:
            self._sampling[request.request_id] = future

    def _post(self, call: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(call, *arguments)


def _set_result(future: asyncio.Future[Answer], answer: Answer) -> None:
    if not future.done():
        future.set_result(answer)


def _set_error(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _deliver(delivery: list[tuple[asyncio.Future[Completion], Completion]]) -> None:
    for future, completion in delivery:
        _set_result(future, completion)
