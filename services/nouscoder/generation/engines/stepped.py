"""Makes an Engine from a StepEngine, which decodes one step at a time: `torch` or `fake`.

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from nouscoder.domain.tokens import Completion, SampledTokens
from nouscoder.generation.engines.base import EngineError, EngineStopped, SampleRequest
from nouscoder.generation.metrics import GenerationMetrics, IdleReason

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

# The time after which an idle thread updates the idle counter. A command ends the wait at once.
_IDLE_TICK_S = 0.2
_JOIN_LIMIT_S = 60.0


class StepEngine(Protocol):
    """Continuous batching in steps: requests wait, run together, and end as completions.

    Every added request ends exactly once, as a completion or by `cancel`. One thread calls all methods.
    """

    name: str
    policy_version: int | None  # of the weights in use; None before the first `load_policy`
    num_tokens: int  # sampled since the start

    def add(self, request: SampleRequest) -> None:
        """Queue a request. Raises EngineError when its prompt is empty or too long, or its id is in use."""

    def cancel(self, request_id: str) -> None:
        """Remove a waiting or running request. Unknown ids are ignored."""

    def step(self) -> list[tuple[str, Completion]]:
        """Admit waiting requests while there is room, and decode one token for each running request.

        Returns the requests that have ended, as (request id, completion) pairs. Raises EngineError before a policy is
        loaded, and for NaN logits.
        """

    def sampled(self, request_id: str, start: int) -> SampledTokens | None:
        """The tokens of a running request from number `start` on; None when there is none."""

    def load_policy(self, files: Sequence[Path], policy_version: int) -> None:
        """Load new weights. Raises EngineError and keeps the old weights when they do not fit."""

    @property
    def num_running(self) -> int:
        """Requests being decoded."""

    @property
    def num_waiting(self) -> int:
        """Requests waiting for a place."""

    @property
    def progress(self) -> Mapping[str, int]:
        """Tokens sampled so far of each running request, by request id."""


class SteppedEngine:
    """An Engine. Use as `async with SteppedEngine(step_engine, metrics) as engine:`."""

    def __init__(self, engine: StepEngine, metrics: GenerationMetrics) -> None:
        self.name = engine.name
        self._engine = engine
        self._metrics = metrics
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = False
        self._paused_until_s: float | None = None
        self._idle_s = 0.0
        self._progress: Mapping[str, int] = {}
        # These belong to the event loop: unfinished futures, and those of them that no guest waits for.
        self._open: set[asyncio.Future[Any]] = set()
        self._rollouts: set[asyncio.Future[Completion]] = set()
        # This belongs to the thread: futures by request.
        self._sampling: dict[str, asyncio.Future[Completion]] = {}

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._commands.put(self._close)
        await asyncio.to_thread(self._thread.join, _JOIN_LIMIT_S)
        if not self._failure.done():
            self._end_all(EngineStopped("the engine is stopping"))
        self._failure.exception()  # retrieved, so that asyncio does not report it as never retrieved

    @property
    def policy_version(self) -> int | None:
        """Version of the weights in use."""
        return self._engine.policy_version

    @property
    def num_running(self) -> int:
        """Requests being decoded."""
        return self._engine.num_running

    @property
    def num_waiting(self) -> int:
        """Requests waiting for a place."""
        return self._engine.num_waiting

    @property
    def num_rollouts(self) -> int:
        """Requests that no guest made and that have not ended."""
        return len(self._rollouts)

    @property
    def progress(self) -> Mapping[str, int]:
        """Tokens sampled so far of each request being decoded, by request id, after the last step."""
        return self._progress

    @property
    def num_tokens(self) -> int:
        """Tokens sampled since the start."""
        return self._engine.num_tokens

    @property
    def paused(self) -> bool:
        """Whether decoding is paused."""
        return self._paused_until_s is not None

    @property
    def idle_s(self) -> float:
        """Seconds without decoding since the start."""
        return self._idle_s

    def sample(self, request: SampleRequest) -> asyncio.Future[Completion]:
        """A future of the completion. Cancelling it cancels the request."""
        future: asyncio.Future[Completion] = self._new_future()
        if not request.is_guest and not future.done():
            self._rollouts.add(future)
            future.add_done_callback(self._rollouts.discard)
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
        """End a pause."""
        await self._ask(lambda: setattr(self, "_paused_until_s", None))

    async def failed(self) -> None:
        """Wait until the engine fails, then raise its error."""
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
                    self._step()
                else:
                    self._wait(reason)
                self._do_commands()
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

    def _wait(self, reason: IdleReason) -> None:
        started_s = time.monotonic()
        try:
            command = self._commands.get(timeout=_IDLE_TICK_S)
        except queue.Empty:
            command = None
        waited_s = time.monotonic() - started_s
        self._idle_s += waited_s
        self._metrics.idle_seconds.labels(reason.value).inc(waited_s)
        if command is not None:
            command()

    def _do_commands(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _step(self) -> None:
        tokens_before = self._engine.num_tokens
        ended = self._engine.step()
        self._metrics.tokens.inc(self._engine.num_tokens - tokens_before)
        self._progress = self._engine.progress
        self._metrics.running_rollouts.set(self._engine.num_running)
        if ended:
            delivery = [(self._sampling.pop(request_id), completion) for request_id, completion in ended]
            self._post(_deliver, delivery)

    def _add(self, request: SampleRequest, future: asyncio.Future[Completion]) -> None:
        try:
            self._engine.add(request)
        except EngineError as error:
            self._post(_set_error, future, error)
        else:
            self._sampling[request.request_id] = future

    def _close(self) -> None:
        self._closing = True

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
