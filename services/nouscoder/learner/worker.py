"""The learner's loop: lease a batch, save it, train k steps, checkpoint, publish, commit, log; then finish the run.

INVARIANT: each batch takes effect once, steps and policy versions are consecutive, and each step has one log line,
wherever the process dies:
  before the checkpoint    the state on disk is that before the batch. The broker gives the same batch again (same id,
                           same rollouts), and training is repeatable, so even a policy file comes out the same.
  after the checkpoint     `_catch_up` publishes the checkpoint's policy (the same version and checksum again is
                           welcome) and commits its batch (idempotent), so the broker never gives that batch again.
  after the commit         the log lines are taken from the checkpoint.
  after FinishRun          nothing is left to train on: the learner only says so and ends.
With learner.start_after the learner waits for that file in the run folder before it trains, for example until the
first policy has been evaluated.
A checkpoint that tears after its batch was committed is made again from the saved batch. A lost lease does no harm:
the folder's lock lets one learner work on a run, and only it commits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from nouscoder.config import Config
from nouscoder.domain.batch import Batch
from nouscoder.domain.lease import Lease, LeasedBatch
from nouscoder.domain.ledger import Ledger
from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.run_status import RunStatus
from nouscoder.learner.core import FolderInUse, LearnerCore, LearnerError
from nouscoder.learner.flops import measured_peak_flops
from nouscoder.learner.metrics import LearnerMetrics, WaitReason
from nouscoder.learner.trainer import TrainedBatch
from nouscoder.retry import Retry

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
_LEASE_WAIT_S = 5.0
_CHECKPOINT_LIMIT_S = 600.0
_LOOK_AGAIN_S = 0.3


class Keeper(Protocol):
    """Beats for leases."""

    def add(self, lease: Lease) -> None:
        """Keep it alive from now on."""
        ...

    def drop(self, lease_id: str) -> None:
        """Stop."""
        ...


class Broker(Protocol):
    """What the learner needs of the broker; see rpc/broker_client.py."""

    async def status(self) -> RunStatus:
        """The run at one instant."""
        ...

    async def lease_batch(self, wait_s: float = ...) -> LeasedBatch:
        """The next batch, or the same as before when it has not been committed."""
        ...

    async def publish_policy(self, manifest: PolicyManifest) -> int:
        """Idempotent for the same version and checksum."""
        ...

    async def commit_batch(self, batch_id: int, step: int) -> bool:
        """Idempotent. True: it was known."""
        ...

    async def finish_run(self, reason: str) -> Ledger:
        """Idempotent."""
        ...

    def keep_leases(self) -> AbstractAsyncContextManager[Keeper]:
        """A keeper of leases."""
        ...


class LearnerState(StrEnum):
    """STARTING -> (WAITING_FOR_BATCH <-> PAUSED -> TRAINING -> CHECKPOINTING -> PUBLISHING)* -> FINISHED.

    WAITING_FOR_EVALUATION comes after STARTING when learner.start_after names a file.
    """

    STARTING = "starting"
    WAITING_FOR_EVALUATION = "waiting_for_evaluation"
    WAITING_FOR_BATCH = "waiting_for_batch"
    TRAINING = "training"
    CHECKPOINTING = "checkpointing"
    PUBLISHING = "publishing"
    PAUSED = "paused"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class LearnerStatus:
    """What the learner is doing. `last` is None before the first batch of this process."""

    state: LearnerState
    state_s: float
    step: int
    policy_version: int
    last: TrainedBatch | None


class LearnerWorker:
    """Drives one LearnerCore, whose work runs in one dedicated thread, off the event loop."""

    def __init__(self, config: Config, broker: Broker, metrics: LearnerMetrics, core: LearnerCore) -> None:
        self._config = config
        self._broker = broker
        self._metrics = metrics
        self._core = core
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="training")
        self._state = LearnerState.STARTING
        self._state_since = time.monotonic()
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._last: TrainedBatch | None = None
        self._peak_flops = config.learner.peak_flops
        self._is_closing = False

    async def run(self) -> None:
        """Train until the run's batches are done, then end the run. Raises NousCoderError."""
        await self._start()
        if not self._peak_flops:
            self._peak_flops = await self._in_thread(lambda: measured_peak_flops(self._config.learner.device))
        await self._pass_evaluation()
        status = await self._broker.status()
        if status.finished:
            log.info("the run is finished: nothing is left to train on", extra={"step": self._core.progress.step})
            self._enter(LearnerState.FINISHED)
            return
        await self._catch_up(status)
        while self._core.progress.policy_version < self._config.run.total_batches:
            leased, wait_s = await self._next_batch()
            if leased is None:
                log.warning("the run was finished by another", extra={"step": self._core.progress.step})
                break
            async with self._broker.keep_leases() as keeper:
                batch, lease = leased
                keeper.add(lease)
                await self._train_on(batch, wait_s)
                keeper.drop(lease.lease_id)
        else:
            await self._broker.finish_run("every batch is trained")
        self._enter(LearnerState.FINISHED)

    async def close(self) -> None:
        """Stop the thread before its next optimizer step, and let the run folder go."""
        self._core.interrupt()
        self._is_closing = True
        await asyncio.to_thread(self._thread.shutdown, wait=True)
        self._core.close()

    def pause(self) -> None:
        """Take no further batch; the one in training is finished."""
        self._may_run.clear()

    def resume(self) -> None:
        """Go on."""
        self._may_run.set()

    async def checkpoint(self) -> tuple[Path, int]:
        """Have the state after the running batch on disk; answers where, and its step.

        Raises LearnerError when that takes longer than 600 seconds or the learner is still starting or stopping.
        """
        if self._is_closing:
            raise LearnerError("the learner is stopping: its newest checkpoint is the one to resume from")
        if self._state is LearnerState.STARTING:
            raise LearnerError("the learner is still starting: there is nothing to checkpoint yet")
        try:
            path = await asyncio.wait_for(self._in_thread(self._core.checkpoint), _CHECKPOINT_LIMIT_S)
        except TimeoutError:
            raise LearnerError(f"no checkpoint was possible within {_CHECKPOINT_LIMIT_S:.0f} s") from None
        return path, int(path.name)

    def status(self) -> LearnerStatus:
        """What it is doing now."""
        progress = self._core.progress
        state_s = time.monotonic() - self._state_since
        return LearnerStatus(self._state, state_s, progress.step, progress.policy_version, self._last)

    async def _start(self) -> None:
        """Load the state. Wait up to learner.folder_patience_s while another learner still holds the run folder."""
        patience_s = self._config.learner.folder_patience_s
        folder = Retry("opening the run folder", (FolderInUse,), for_s=patience_s, max_wait_s=0.5)
        await folder.call(lambda: self._in_thread(self._core.start))

    async def _pass_evaluation(self) -> None:
        """Wait for the file learner.start_after, for at most learner.batch_patience_s. Raises LearnerError."""
        if not self._config.learner.start_after:
            return
        file = self._config.run.folder / self._config.learner.start_after
        if file.exists():
            return
        self._enter(LearnerState.WAITING_FOR_EVALUATION)
        log.info("waiting for the evaluation of the first policy", extra={"file": str(file)})
        started = told = time.monotonic()
        while not file.exists():
            await asyncio.sleep(_LOOK_AGAIN_S)
            now = time.monotonic()
            self._metrics.waited(WaitReason.EVALUATION, now - told)
            told = now
            if now - started > self._config.learner.batch_patience_s:
                raise LearnerError(f"{file} did not come in {now - started:.0f} s: is `nouscoder train` at work?")

    async def _catch_up(self, status: RunStatus) -> None:
        """Bring broker and checkpoint to the same batch; see the invariant."""
        while self._core.progress.policy_version < status.batches_committed:
            batch_id = self._core.progress.batch_id + 1
            log.warning("training a committed batch again: its checkpoint was lost", extra={"batch_id": batch_id})
            self._last = await self._in_thread(partial(self._core.replay_saved, batch_id))
        progress = self._core.progress
        if status.policy_version is None or status.policy_version < progress.policy_version:
            await self._publish()
        elif status.policy_version > progress.policy_version + 1:
            raise LearnerError(
                f"the broker knows policy version {status.policy_version} and the newest checkpoint makes version"
                f" {progress.policy_version}: checkpoints of this run are missing"
            )
        self._metrics.published(progress.policy_version)
        if progress.batch_id >= 0:
            await self._broker.commit_batch(progress.batch_id, progress.step)

    async def _next_batch(self) -> tuple[tuple[Batch, Lease] | None, float]:
        """The next batch with its lease, None when the run is finished; and the seconds waited."""
        await self._pass_pause()
        self._enter(LearnerState.WAITING_FOR_BATCH)
        started = told = time.monotonic()
        while True:
            leased = await self._broker.lease_batch(_LEASE_WAIT_S)
            now = time.monotonic()
            self._metrics.waited(WaitReason.BATCH, now - told)
            told = now
            wait_s = now - started
            if leased.batch is not None and leased.lease is not None:
                return (leased.batch, leased.lease), wait_s
            if leased.run_finished:
                return None, wait_s
            if wait_s > self._config.learner.batch_patience_s:
                raise LearnerError(f"no batch came in {wait_s:.0f} s: ask the broker why with `nouscoder why-stalled`")
            if not self._may_run.is_set():
                await self._pass_pause()
                told = time.monotonic()
                self._enter(LearnerState.WAITING_FOR_BATCH)

    async def _pass_pause(self) -> None:
        if self._may_run.is_set():
            return
        self._enter(LearnerState.PAUSED)
        started = time.monotonic()
        await self._may_run.wait()  # a person paused it, and a person or the end of the process ends it
        self._metrics.waited(WaitReason.PAUSED, time.monotonic() - started)

    async def _train_on(self, batch: Batch, wait_s: float) -> None:
        self._enter(LearnerState.TRAINING)
        await self._in_thread(lambda: self._core.save_batch(batch))
        self._last = await self._in_thread(lambda: self._core.train(batch, wait_s))
        num_parameters = self._core.model.num_parameters()
        self._metrics.trained(self._last, num_parameters, self._peak_flops)

        self._enter(LearnerState.CHECKPOINTING)
        started = time.monotonic()
        await self._in_thread(self._core.checkpoint)
        checkpoint_s = time.monotonic() - started
        self._metrics.waited(WaitReason.CHECKPOINT, checkpoint_s)

        started = time.monotonic()
        await self._publish()
        publish_s = time.monotonic() - started
        self._metrics.waited(WaitReason.PUBLISH, publish_s)

        await self._broker.commit_batch(batch.batch_id, self._core.progress.step)
        await self._in_thread(lambda: self._core.write_log(checkpoint_s, publish_s))

    async def _publish(self) -> None:
        self._enter(LearnerState.PUBLISHING)
        manifest = await self._in_thread(self._core.write_policy)
        await self._broker.publish_policy(manifest)
        self._metrics.published(manifest.policy_version)

    def _enter(self, state: LearnerState) -> None:
        self._state = state
        self._state_since = time.monotonic()

    async def _in_thread(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
