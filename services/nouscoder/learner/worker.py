"""The learner's loop: lease a batch, save it, train k steps, publish, commit, checkpoint; at the end finish the run.

INVARIANT: each batch takes effect once, steps and policy versions are consecutive, and each step has one log line, even
if the process is killed at any point or Redis forgets a part of the run. A batch is committed after it is saved and
trained. Its policy and its checkpoint may be written later, while the next batches are trained. After a restart
`_catch_up` starts from the newest undamaged checkpoint and trains the batches that were trained after it again from the
saved batches (bit for bit). It publishes the newest version again and has the broker compare its state with the
learner's state (broker/recovery.py); both are idempotent. docs/design/resume-and-kills.md lists the effects of a kill
at each point.

A lost lease does no harm, because the lock on the run folder allows one learner per run, and only it commits.

INVARIANT: `_next_batch` returns a batch only if the broker holds this run and as many batches as the learner
has trained, and if the learner has trained none of its groups. While the run is paused, no batch is leased.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TypeVar

from nouscoder.atomic_files import FolderInUse
from nouscoder.config import Config
from nouscoder.domain.batch import RecordedBatch
from nouscoder.domain.lease import Lease, LeasedBatch
from nouscoder.domain.run_status import RunStatus
from nouscoder.errors import NousCoderError
from nouscoder.learner.core import LearnerCore, LearnerError
from nouscoder.learner.metrics.prometheus import LearnerMetrics, WaitReason
from nouscoder.learner.metrics.step import TrainedBatch
from nouscoder.learner.model.computation import compute_dtype
from nouscoder.learner.parallel.operations import flops_of_sums, measured_peak_flops
from nouscoder.learner.publication.publication import Publication
from nouscoder.learner.publication.sender import PolicySender
from nouscoder.learner.recovery import Recovery
from nouscoder.learner.state.checkpoint_schedule import Checkpoints
from nouscoder.learner.state.curriculum_copy import CurriculumCopy
from nouscoder.learner.state.run_files import RunFiles
from nouscoder.learner.state.run_log import BatchSeconds
from nouscoder.learner.state.saved_batches import RecordsMissing
from nouscoder.learner.trainer import TrainingError
from nouscoder.retry import Retry
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.channel import PeerBehind, PeerError
from nouscoder.store.record_store import ByteRange

log = logging.getLogger(__name__)


Answer = TypeVar("Answer")
_CHECKPOINT_LIMIT_S = 600.0
_LEASE_WAIT_S = 5.0
_LOOK_AGAIN_S = 0.3
_STAY_S = 2.0
# Leases of a batch whose records Redis had forgotten, one after another. Redis forgets a batch with its records, so the
# next lease gives another batch.
_MAX_FORGOTTEN_BATCHES = 5


class LearnerState(StrEnum):
    """STARTING -> (WAITING_FOR_BATCH <-> PAUSED -> TRAINING -> PUBLISHING -> CHECKPOINTING)* -> FINISHED.

    PUBLISHING and CHECKPOINTING last until the state is copied; the copies are written in the background.
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
class TrainingStatus:
    """The current state of the learner. `last` is None before the first batch of this process."""

    state: LearnerState
    state_s: float
    step: int
    policy_version: int
    last: TrainedBatch | None


class LearnerWorker:
    """Runs one LearnerCore, whose work is done in one dedicated thread outside the event loop."""

    def __init__(
        self,
        config: Config,
        broker: BrokerClient,
        metrics: LearnerMetrics,
        core: LearnerCore,
        sender: PolicySender | None = None,
    ) -> None:
        """`sender` gets each published policy."""
        self._config = config
        self._broker = broker
        self._metrics = metrics
        self._core = core
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="training")
        self._curriculum = CurriculumCopy(config.run.folder, broker)
        self._recovery = Recovery(core, broker, self._curriculum)
        self._publication = Publication(core, broker, metrics, self._thread, self._recovery, sender)
        kept = RunFiles.of(config).kept
        self.checkpoints = Checkpoints(config.learner, core, metrics, self._thread, self._publication, kept)
        self._enter(LearnerState.STARTING)
        self._may_lease = asyncio.Event()
        self._may_lease.set()
        self._num_forgotten = 0
        self._last: TrainedBatch | None = None
        self._peak_flops = config.learner.peak_flops
        self._is_closing = False

    async def run(self) -> None:
        """Train until the run's batches are done, then finish the run. Raises NousCoderError."""
        # Waits while another learner holds the run folder.
        patience_s = self._config.learner.folder_patience_s
        folder = Retry("opening the run folder", (FolderInUse,), for_s=patience_s, max_wait_s=0.5)
        await folder.call(lambda: self._in_thread(self._core.start))
        if not self._peak_flops:
            device, dtype = self._config.learner.device, compute_dtype(self._config.learner)
            self._peak_flops = await self._in_thread(lambda: measured_peak_flops(device, dtype))
        await self._wait_for_evaluation()
        await self._to_the_end(await self._broker.status())

    async def stay(self) -> None:
        """After `run`: train again whenever the run goes on with more batches. Never returns. Raises NousCoderError."""
        while True:
            await asyncio.sleep(_STAY_S)
            try:
                status = await self._broker.status()
            except PeerError as error:
                log.info("the broker is away after the run", extra={"reason": str(error)})
                continue
            if not status.finished and self._core.progress.policy_version < self._config.run.total_batches:
                self.checkpoints.more_batches()
                await self._to_the_end(status)

    async def _to_the_end(self, status: RunStatus) -> None:
        if status.run_id not in ("", self._core.identity.run_id):
            await self._recovery.settle(None)  # refuses, and says whose state it is
        if status.finished:
            log.info("the run is finished: nothing is left to train on", extra={"step": self._core.progress.step})
        else:
            await self._catch_up(status)
            await self._train_batches()
        self.checkpoints.no_more_batches()
        self._enter(LearnerState.FINISHED)

    async def stop(self) -> None:
        """Stop before the next optimizer step, write a checkpoint if no batch is incomplete, and close."""
        self._core.interrupt()
        self._is_closing = True
        try:
            if self._state is not LearnerState.STARTING:
                async with asyncio.timeout(_CHECKPOINT_LIMIT_S):
                    await self.checkpoints.now()
        except (NousCoderError, TimeoutError) as error:
            log.info("stopped without a checkpoint: a resume replays saved batches", extra={"reason": str(error)})
        finally:
            await self.close()

    async def close(self) -> None:
        """Stop before the next optimizer step, complete files in progress, and unlock the run folder."""
        self._core.interrupt()
        self._is_closing = True
        await asyncio.to_thread(self._thread.shutdown, wait=True)
        await self._publication.close()
        await self.checkpoints.close()
        await asyncio.to_thread(self._core.close)

    def pause(self) -> None:
        """Lease no further batch. The one in training is completed."""
        self._may_lease.clear()

    def resume(self) -> None:
        """End a pause."""
        self._may_lease.set()

    async def checkpoint(self) -> tuple[Path, int]:
        """Write the state after the batch in training to disk. Returns its path and its step.

        Raises LearnerError when that takes longer than 600 seconds or the learner is still starting or stopping.
        """
        if self._is_closing:
            raise LearnerError("the learner is stopping: resume from its newest checkpoint")
        if self._state is LearnerState.STARTING:
            raise LearnerError("the learner is still starting: there is nothing to checkpoint yet")
        try:
            async with asyncio.timeout(_CHECKPOINT_LIMIT_S):
                path = await self.checkpoints.now()
        except TimeoutError:
            raise LearnerError(f"no checkpoint was possible within {_CHECKPOINT_LIMIT_S:.0f} s") from None
        return path, int(path.name)

    def status(self) -> TrainingStatus:
        """The current state."""
        progress = self._core.progress
        return TrainingStatus(
            self._state, time.monotonic() - self._since, progress.step, progress.policy_version, self._last
        )

    async def _wait_for_evaluation(self) -> None:
        """Wait for the file learner.start_after, for at most learner.batch_patience_s. Raises LearnerError."""
        if not self._config.learner.start_after:
            return
        file = self._config.run.folder / self._config.learner.start_after
        if file.exists():
            return
        self._enter(LearnerState.WAITING_FOR_EVALUATION)
        log.info("waiting for the evaluation of the first policy", extra={"file": str(file)})
        started = counted = time.monotonic()
        while not file.exists():
            await asyncio.sleep(_LOOK_AGAIN_S)
            now = time.monotonic()
            self._metrics.waited(WaitReason.EVALUATION, now - counted)
            counted = now
            if now - started > self._config.learner.batch_patience_s:
                raise LearnerError(f"{file} did not appear within {now - started:.0f} s: does `nouscoder train` run?")

    async def _catch_up(self, status: RunStatus) -> None:
        """Bring the state in memory and the broker to the same batch (see the invariant)."""
        known_version = -1 if status.policy_version is None else status.policy_version
        self._publication.known(known_version)
        while self._core.progress.policy_version < status.batches_committed or self._core.next_was_trained():
            batch_id = self._core.progress.batch_id + 1
            log.info("training a batch again: no checkpoint holds it yet", extra={"batch_id": batch_id})
            self._last = await self._in_thread(partial(self._train_again, batch_id))
        if not status.run_id:
            await self._recovery.settle(None)  # first: a comparison after the publication would end the first leases
        if self._core.progress.policy_version >= known_version:
            await self._publication.begin()
            await self._publication.settle()
        await self._recovery.settle(self._publication.newest)

    def _train_again(self, batch_id: int) -> TrainedBatch:
        return self._core.train(self._core.load_batch(batch_id))

    async def _train_batches(self) -> None:
        """Train the remaining batches of the run. At the end all are published and in a checkpoint."""
        seconds = BatchSeconds()
        while self._core.progress.policy_version < self._config.run.total_batches:
            leased, wait_s = await self._next_batch()
            if leased is None:
                log.warning("another client finished the run", extra={"step": self._core.progress.step})
                await self.checkpoints.now()
                return
            batch, lease = leased
            async with self._broker.keep_leases() as keeper:
                keeper.add(lease)
                self._enter(LearnerState.TRAINING)
                if not await self._save(batch):
                    continue
                await self._train_on(batch, replace(seconds, wait_for_batch=wait_s))
                seconds = await self._hand_over(batch)
                keeper.drop(lease.lease_id)
            await self._curriculum.after_batch()
        await self.checkpoints.now()
        await self._curriculum.now()
        await self._recovery.settle(self._publication.newest)
        await self._broker.finish_run("every batch is trained")

    async def _next_batch(self) -> tuple[tuple[RecordedBatch, Lease] | None, float]:
        """The next batch with its lease (None when the run is finished), and the seconds waited.

        Raises LearnerError after learner.batch_patience_s seconds without a batch. Pauses do not count.
        """
        await self._pass_pause()
        self._enter(LearnerState.WAITING_FOR_BATCH)
        started = counted = time.monotonic()
        while True:
            self._publication.raise_if_failed()
            self._core.check_ranks()
            leased = await self._lease()
            now = time.monotonic()
            self._metrics.waited(WaitReason.BATCH, now - counted)
            counted = now
            wait_s = now - started
            if leased.batch is not None and leased.lease is not None:
                return (leased.batch, leased.lease), wait_s
            if leased.run_finished:
                return None, wait_s
            if wait_s > self._config.learner.batch_patience_s:
                raise LearnerError(f"no batch within {wait_s:.0f} s: `nouscoder why-stalled` shows the reason")
            if not self._may_lease.is_set():
                await self._pass_pause()
                started = counted = time.monotonic()
                self._enter(LearnerState.WAITING_FOR_BATCH)

    async def _save(self, batch: RecordedBatch) -> bool:
        """Have the batch on the disk. False: Redis has forgotten it since it was leased. Raises SavedBatchError."""
        try:
            await self._core.save_batch(batch, self._records_of(batch))
        except RecordsMissing as error:
            self._num_forgotten += 1
            if self._num_forgotten > _MAX_FORGOTTEN_BATCHES:
                raise
            log.warning("a leased batch was forgotten: asking for another", extra={"reason": str(error)})
            await self._recovery.settle(self._publication.newest)
            return False
        self._num_forgotten = 0
        return True

    async def _lease(self) -> LeasedBatch:
        """A lease on the next batch; none also when the broker had to be restored first. Raises LearnerError."""
        done = self._core.progress
        try:
            leased = await self._broker.lease_batch(_LEASE_WAIT_S, self._core.identity.run_id, done.batch_id + 1)
        except PeerBehind:
            if not await self._recovery.settle(self._publication.newest):
                await asyncio.sleep(_LOOK_AGAIN_S)
            return LeasedBatch()
        if leased.batch is None or not any(number in done.groups for number in leased.batch.group_numbers):
            return leased
        if not await self._recovery.settle(self._publication.newest):
            raise LearnerError(f"batch {leased.batch.batch_id} holds a group that was trained on before")
        return LeasedBatch()

    async def _pass_pause(self) -> None:
        if self._may_lease.is_set():
            return
        self._enter(LearnerState.PAUSED)
        started = time.monotonic()
        await self._may_lease.wait()  # unbounded: a person ends the pause, or the process exits
        self._metrics.waited(WaitReason.PAUSED, time.monotonic() - started)

    async def _records_of(self, batch: RecordedBatch) -> AsyncIterator[bytes]:
        """The bytes of the batch's records, as they arrive."""
        ranges = [ByteRange(recorded.record, 0, recorded.header.record_bytes) for recorded in batch.rollouts]
        async for _, data in self._broker.stream_records(ranges):
            yield data

    async def _train_on(self, recorded: RecordedBatch, seconds: BatchSeconds) -> None:
        """Take the steps of a saved batch. `seconds` are those since the batch before."""
        batch = await self._in_thread(lambda: self._core.load_batch(recorded.batch_id))
        try:
            self._last = await self._in_thread(lambda: self._core.train(batch, seconds))
        except (LearnerError, TrainingError, RuntimeError) as error:  # RuntimeError is torch's
            # The broker holds a batch back that fails again and again.
            try:
                await self._broker.report_batch_failure(recorded.batch_id, str(error))
            except PeerError as trouble:
                log.warning(
                    "the failed batch is not reported", extra={"batch_id": recorded.batch_id, "reason": str(trouble)}
                )
            raise
        flops = flops_of_sums(self._core.model, self._last.model_tokens, self._last.squared_tokens)
        self._metrics.trained(self._last, flops, self._peak_flops * self._core.ranks.size)

    async def _hand_over(self, batch: RecordedBatch) -> BatchSeconds:
        """Begin to publish the new policy, commit the batch, and begin a checkpoint if it is due."""
        self._enter(LearnerState.PUBLISHING)
        started = time.monotonic()
        await self._publication.begin()
        publish_s = time.monotonic() - started
        self._metrics.waited(WaitReason.PUBLISH, publish_s)

        try:
            await self._broker.commit_batch(batch.batch_id, self._core.progress.step, batch.group_numbers)
        except PeerBehind:
            await self._recovery.settle(self._publication.newest)

        self._enter(LearnerState.CHECKPOINTING)
        started = time.monotonic()
        await self.checkpoints.after_batch()
        checkpoint_s = time.monotonic() - started
        self._metrics.waited(WaitReason.CHECKPOINT, checkpoint_s)
        return BatchSeconds(checkpoint=checkpoint_s, publish=publish_s)

    def _enter(self, state: LearnerState) -> None:
        self._state, self._since = state, time.monotonic()

    async def _in_thread(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
