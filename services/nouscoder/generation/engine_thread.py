"""The one thread that drives the engine, and the asyncio side of it.

INVARIANT: the engine is touched by this thread only, so that weights change and tasks come and go between two steps;
and every future given out ends exactly once: with its rollout, with an error, or cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from nouscoder.domain.rollout import Rollout, Task
from nouscoder.generation.engines.base import Engine, EngineError
from nouscoder.generation.metrics import GenerationMetrics, IdleReason

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

# How long an idle thread waits before it counts the time; a command ends the wait at once.
_IDLE_TICK_S = 0.2
_JOIN_LIMIT_S = 60.0


class EngineStopped(EngineError):
    """The engine does not run any more: it failed, or the service is going down."""


class EngineThread:
    """Use as `async with EngineThread(engine, metrics) as thread:`. Methods belong to the event loop."""

    def __init__(self, engine: Engine, metrics: GenerationMetrics) -> None:
        self.engine_name = engine.name
        self.paused = False
        self.idle_s = 0.0
        self._engine = engine
        self._metrics = metrics
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = False
        # On the event loop's side: futures not ended yet. On the thread's side: those of tasks in the engine.
        self._open: set[asyncio.Future[Any]] = set()
        self._sampling: dict[str, asyncio.Future[Rollout]] = {}

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
            self._end_all(EngineStopped("the engine is going down"))
        self._failure.exception()  # looked at, so that asyncio does not report it as forgotten

    @property
    def policy_version(self) -> int | None:
        """Version of the weights in use."""
        return self._engine.policy_version

    @property
    def num_running(self) -> int:
        """Rollouts being decoded."""
        return self._engine.num_running

    @property
    def num_waiting(self) -> int:
        """Rollouts waiting for a place."""
        return self._engine.num_waiting

    @property
    def num_tokens(self) -> int:
        """Tokens sampled since the start."""
        return self._engine.num_tokens

    def sample(self, task: Task) -> asyncio.Future[Rollout]:
        """The rollout to come. Cancelling the future cancels the task. EngineError names a task that cannot be."""
        future: asyncio.Future[Rollout] = self._new_future()
        future.add_done_callback(lambda ended: self._forget(task.rollout_id, ended) if ended.cancelled() else None)
        self._commands.put(lambda: self._add(task, future))
        return future

    async def sample_all(self, tasks: Sequence[Task]) -> AsyncIterator[Rollout]:
        """Each rollout as it ends. Leaving early cancels the rest. Raises EngineError at the first that cannot be."""
        futures = [self.sample(task) for task in tasks]
        try:
            for following in asyncio.as_completed(futures):
                yield await following
        finally:
            for future in futures:
                if not future.cancel() and not future.cancelled():
                    future.exception()  # looked at, so that asyncio does not report it as forgotten

    async def load_policy(self, files: Sequence[Path], policy_version: int) -> float:
        """Take over weights between two steps; answers the seconds decoding stood still. Raises EngineError."""

        def load() -> float:
            started_s = time.monotonic()
            self._engine.load_policy(files, policy_version)
            pause_s = time.monotonic() - started_s
            self._metrics.policy_update_seconds.observe(pause_s)
            self._metrics.policy_version.set(policy_version)
            return pause_s

        return await self._ask(load)

    async def pause(self) -> None:
        """No step runs any more when this returns."""
        await self._ask(lambda: setattr(self, "paused", True))

    async def resume(self) -> None:
        """Go on."""
        await self._ask(lambda: setattr(self, "paused", False))

    async def failed(self) -> None:
        """Wait until the engine fails, then raise its error."""
        await asyncio.shield(self._failure)

    def _new_future(self) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        if self._failure.done():
            future.set_exception(EngineStopped("the engine does not run any more"))
        else:
            self._open.add(future)
            future.add_done_callback(self._open.discard)
        return future

    def _ask(self, work: Callable[[], Answer]) -> asyncio.Future[Answer]:
        """Have `work` done on the thread, between two steps."""
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

    def _forget(self, rollout_id: str, future: asyncio.Future[Rollout]) -> None:
        def command() -> None:
            if self._sampling.get(rollout_id) is future:
                del self._sampling[rollout_id]
                self._engine.cancel(rollout_id)

        self._commands.put(command)

    def _end_all(self, error: EngineError) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)
        for future in list(self._open):
            _set_error(future, error)
            future.exception()

    # From here on: the thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                reason = self._idle_reason()
                if reason is None:
                    self._step()
                else:
                    self._wait(reason)
                self._do_commands()
        except Exception as error:  # whatever it was, those who wait must hear of it
            log.exception("the engine failed")
            stopped = EngineStopped(f"the engine failed: {error}")
            stopped.__cause__ = error
            self._post(self._end_all, stopped)

    def _idle_reason(self) -> IdleReason | None:
        if self._engine.policy_version is None:
            return IdleReason.NO_POLICY
        if self.paused:
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
        self.idle_s += waited_s
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
        self._metrics.running_rollouts.set(self._engine.num_running)
        if ended:
            delivery = [(self._sampling.pop(rollout.rollout_id), rollout) for rollout in ended]
            self._post(_deliver, delivery)

    def _add(self, task: Task, future: asyncio.Future[Rollout]) -> None:
        try:
            self._engine.add(task)
        except EngineError as error:
            self._post(_set_error, future, error)
        else:
            self._sampling[task.rollout_id] = future

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


def _deliver(delivery: list[tuple[asyncio.Future[Rollout], Rollout]]) -> None:
    for future, rollout in delivery:
        _set_result(future, rollout)
