"""The `vllm` engine: vLLM's AsyncLLM in this process, with weights that change in flight.

INVARIANT: vLLM decodes only with the whole weights of one version: after a failed update the old version is loaded
again, or the engine fails. No request is given to vLLM while there is no policy, during a pause, or during an update.

An update: the files are checked, or the workers receive the policy from the learner's memory and check it, while
decoding goes on; decoding pauses between two steps and keeps every request; each worker loads the weights; the caches
that hold older keys and values are dealt with; decoding continues.

    on_update    running requests                                prefix cache
    recompute    are computed again with the new weights         is emptied
    keep         keep their keys and values of older weights     stays, with one key per version

vLLM's engine process labels each token with the version that sampled it, so the spans are exact.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from nouscoder.config.generation import GenerationSection
from nouscoder.domain.policy import PolicyManifest, Rendezvous
from nouscoder.domain.tokens import Completion, SampledTokens
from nouscoder.generation.engines.architecture import Architecture
from nouscoder.generation.engines.base import EngineError, EnginePlaces, EngineStopped, SampleRequest
from nouscoder.generation.engines.vllm_control import VllmControl, VllmStaging
from nouscoder.generation.engines.vllm_requests import VllmRequests
from nouscoder.generation.engines.vllm_start import start_vllm
from nouscoder.generation.metrics import GenerationMetrics, IdleReason

log = logging.getLogger(__name__)

_TICK_S = 0.2


class IdleClock:
    """Counts the seconds without decoding: each belongs to at most one reason, and is counted once."""

    def __init__(self, metrics: GenerationMetrics) -> None:
        self._metrics = metrics
        self._reason: IdleReason | None = None
        self._since_s = time.monotonic()
        self._idle_s = 0.0

    def set(self, reason: IdleReason | None) -> None:
        """The reason from now on; None while tokens are decoded. Repeating the reason updates the counter."""
        now_s = time.monotonic()
        if self._reason is not None:
            self._idle_s += now_s - self._since_s
            self._metrics.idle_seconds.labels(self._reason.value).inc(now_s - self._since_s)
        self._reason, self._since_s = reason, now_s

    @property
    def idle_s(self) -> float:
        """Seconds so far, with the current pause."""
        return self._idle_s + (0.0 if self._reason is None else time.monotonic() - self._since_s)


class VllmEngine:
    """An Engine. Use as `async with VllmEngine(settings, folder, metrics) as engine:`."""

    name = "vllm"

    def __init__(self, settings: GenerationSection, folder: Path, metrics: GenerationMetrics) -> None:
        """Read the architecture of `folder`. Raises EngineUnusable."""
        self._settings = settings
        self._folder = folder
        self._metrics = metrics
        self._architecture = Architecture(folder)
        self._capacity = min(settings.engine_tokens, self._architecture.max_tokens)
        self._places = EnginePlaces(settings.max_running, settings.guest_places)
        self.policy_version: int | None = None  # of the weights in use
        self._weights: dict[str, Any] = {}  # where those in use came from: the fields of PolicyUpdateInfo
        self._paused_until_s: float | None = None
        self._updating = False
        self._changing = asyncio.Lock()  # held for each change of vLLM's state: pause, resume, update
        self._clock = IdleClock(metrics)
        self.num_tokens = 0  # sampled since the start

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._llm: Any = await asyncio.to_thread(
            start_vllm, self._settings, self._folder, self._capacity, self._on_step
        )
        self._control = VllmControl(self._llm, self._settings.vllm.update_limit_s)
        self._staging = VllmStaging(self._control, self._architecture, self._settings.vllm.transfer_limit_s)
        self._requests = VllmRequests(self._llm, self._capacity, self._admit, self._fail)
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watching.cancel()
        self._fail(EngineStopped("the engine is stopping"))
        await asyncio.gather(self._watching, return_exceptions=True)
        async with self._changing:
            await asyncio.to_thread(self._llm.shutdown)
        self._failure.exception()  # retrieved, so that asyncio does not report it as never retrieved

    @property
    def num_running(self) -> int:
        """Requests given to vLLM."""
        return self._requests.num_running

    @property
    def num_waiting(self) -> int:
        return self._requests.num_waiting

    @property
    def progress(self) -> Mapping[str, int]:
        return self._requests.progress

    @property
    def paused(self) -> bool:
        return self._paused_until_s is not None

    @property
    def idle_s(self) -> float:
        return self._clock.idle_s

    def sample(self, request: SampleRequest) -> asyncio.Future[Completion]:
        """A future of the completion. Cancelling it cancels the request."""
        future: asyncio.Future[Completion] = self._loop.create_future()
        try:
            if self._failure.done():
                raise EngineStopped("the engine no longer runs")
            self._requests.add(request, future)
        except EngineError as error:
            future.set_exception(error)
        else:
            self._admit()
        return future

    async def sampled(self, starts: Mapping[str, int]) -> dict[str, SampledTokens]:
        """Sampled tokens of running requests, as far as vLLM has told them."""
        self._check_runs()
        return self._requests.sampled(starts)

    async def load_policy(self, files: Sequence[Path], policy_version: int) -> float:
        """As Engine.load_policy. A caller that is cancelled does not interrupt an update that has begun."""
        self._check_runs()
        source = f"policy version {policy_version}, {files[-1]}"
        await asyncio.to_thread(self._architecture.check, files, source)
        weights = {"paths": [str(file) for file in files]}
        return await asyncio.shield(asyncio.ensure_future(self._update(weights, policy_version)))

    @property
    def num_receivers(self) -> int:
        """Processes that receive a policy, each as a rank of the rendezvous, from 1 on: each worker the whole one."""
        return self._settings.vllm.tensor_parallel_size

    @property
    def version_in_memory(self) -> int | None:
        """The version in use, if it was received from the learner's memory: its bytes are still here."""
        version: int | None = self._weights.get("staged")
        return version

    async def stage_policy(self, manifest: PolicyManifest, rendezvous: Rendezvous) -> None:
        """Receive and check a policy while sampling goes on. Raises EngineError when it does not come whole."""
        self._check_runs()
        await self._staging.stage(manifest, rendezvous, self.version_in_memory)

    async def load_staged(self, policy_version: int) -> float:
        """As `load_policy`, with the policy that was staged last."""
        self._check_runs()
        self._staging.check(policy_version)
        weights = {"staged": policy_version}
        return await asyncio.shield(asyncio.ensure_future(self._update(weights, policy_version)))

    async def pause(self, limit_s: float) -> None:
        """Pause as Engine.pause. When this returns, every token that was sampled is counted and among `sampled`."""
        async with self._change():
            self._paused_until_s = time.monotonic() + limit_s
            try:
                await self._control.pause()
                await self._control.await_outputs()
            except EngineError:
                self._paused_until_s = None
                raise

    async def resume(self) -> None:
        async with self._change():
            self._paused_until_s = None
            await self._control.resume()

    async def failed(self) -> None:
        await asyncio.shield(self._failure)

    def _admit(self) -> None:
        """Give waiting requests to vLLM while there is room."""
        if self.policy_version is not None and not (self.paused or self._updating or self._failure.done()):
            self._requests.admit(self._places, self.policy_version)
        self._account()

    def _on_step(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self._metrics.tokens.inc(num_tokens)

    @asynccontextmanager
    async def _change(self) -> AsyncIterator[None]:
        """The right to change vLLM's state. The engine fails when vLLM does."""
        async with self._changing:
            self._check_runs()
            try:
                yield
            except EngineStopped as error:
                self._fail(error)
                raise
            finally:
                self._admit()

    async def _update(self, weights: dict[str, Any], policy_version: int) -> float:
        async with self._change():
            self._updating = True
            started_s = time.monotonic()
            try:
                await self._requests.all_taken()
                self._check_runs()
                await self._control.pause()
                await self._replace(weights, policy_version)
            finally:
                # Also after a failed update: the engine never stays paused.
                self._updating = False
                if not self.paused:
                    await self._control.resume()
            pause_s = time.monotonic() - started_s
        self._metrics.policy_update_seconds.observe(pause_s)
        self._metrics.policy_version.set(policy_version)
        return pause_s

    async def _replace(self, weights: dict[str, Any], policy_version: int) -> None:
        """Load weights while vLLM is paused. Raises EngineError, with the old ones loaded again."""
        if self._settings.vllm.on_update == "recompute":
            await self._control.forget_keys_and_values()
        try:
            await self._control.load(weights, policy_version)
        except EngineStopped:
            raise
        except EngineError as error:
            if self.policy_version is not None:
                await self._load_again(self.policy_version, error)
            raise
        self.policy_version, self._weights = policy_version, weights
        if self._settings.vllm.on_update == "keep":
            self._requests.restart_unstarted(policy_version)

    async def _load_again(self, policy_version: int, cause: EngineError) -> None:
        """Load the weights in use again, because a failed load may have left others in a part of the layers."""
        log.error("an update failed; the old weights are loaded again", extra={"reason": str(cause)})
        try:
            await self._control.load(self._weights, policy_version)
        except EngineError as error:
            message = f"an update failed ({cause}), and the weights before it cannot be loaded again: {error}"
            raise EngineStopped(message) from error

    async def _watch(self) -> None:
        """Ends a pause at its limit, notices a dead vLLM, and keeps the idle counter current."""
        while not self._failure.done():
            await asyncio.sleep(_TICK_S)
            self._account()
            if self._llm.errored:
                self._fail(EngineStopped("the engine failed: vLLM's engine process has ended"))
                return
            is_over = self._paused_until_s is not None and time.monotonic() >= self._paused_until_s
            if is_over and not self._changing.locked():
                log.warning("the pause reached its time limit: decoding continues")
                await self.resume()

    def _account(self) -> None:
        self._metrics.running_rollouts.set(self._requests.num_running)
        self._clock.set(self._idle_reason())

    def _idle_reason(self) -> IdleReason | None:
        if self.policy_version is None:
            return IdleReason.NO_POLICY
        if self.paused or self._updating:
            return IdleReason.PAUSED
        return None if self._requests.num_running else IdleReason.NO_TASKS

    def _check_runs(self) -> None:
        if self._failure.done():
            raise EngineStopped("the engine no longer runs")

    def _fail(self, error: EngineStopped) -> None:
        """End every request with `error`, once."""
        if self._failure.done():
            return
        if error.__cause__ is not None:
            log.error("the engine failed", exc_info=error)
        self._failure.set_exception(error)
        self._requests.end_all(error)
