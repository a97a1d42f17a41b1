"""Where the learner's batches come from: each is leased from the broker, and saved on the disk before it is trained.

INVARIANT: `next` returns a batch only if the broker holds this run and as many batches as the learner has trained, and
if the learner has trained none of its groups. While the run is paused, no batch is leased.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

from nouscoder.config.learner import LearnerSection
from nouscoder.domain.batch import RecordedBatch
from nouscoder.domain.lease import Lease, LeasedBatch
from nouscoder.learner.core import LearnerCore, LearnerError
from nouscoder.learner.metrics import LearnerMetrics, WaitReason
from nouscoder.learner.peers import Broker
from nouscoder.learner.publication import Publication
from nouscoder.learner.recovery import Recovery
from nouscoder.learner.saved_batches import RecordsMissing
from nouscoder.learner.state import LearnerState, StateClock
from nouscoder.rpc.channel import PeerBehind
from nouscoder.store.record_store import ByteRange

log = logging.getLogger(__name__)

_LEASE_WAIT_S = 5.0
_LOOK_AGAIN_S = 0.3
# Leases of a batch whose records Redis had forgotten, one after another. Redis forgets a batch with its records, so the
# next lease gives another batch.
_MAX_FORGOTTEN_BATCHES = 5


class BatchSource:
    """Leases and saves batches, one after another."""

    def __init__(
        self,
        section: LearnerSection,
        broker: Broker,
        metrics: LearnerMetrics,
        core: LearnerCore,
        publication: Publication,
        recovery: Recovery,
        clock: StateClock,
    ) -> None:
        self._section = section
        self._broker = broker
        self._metrics = metrics
        self._core = core
        self._publication = publication
        self._recovery = recovery
        self._clock = clock
        self._may_lease = asyncio.Event()
        self._may_lease.set()
        self._num_forgotten = 0

    def pause(self) -> None:
        """Lease no further batch."""
        self._may_lease.clear()

    def resume(self) -> None:
        """End a pause."""
        self._may_lease.set()

    async def next(self) -> tuple[tuple[RecordedBatch, Lease] | None, float]:
        """The next batch with its lease (None when the run is finished), and the seconds waited.

        Raises LearnerError after learner.batch_patience_s seconds without a batch. Pauses do not count.
        """
        await self._pass_pause()
        self._clock.enter(LearnerState.WAITING_FOR_BATCH)
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
            if wait_s > self._section.batch_patience_s:
                raise LearnerError(f"no batch within {wait_s:.0f} s: `nouscoder why-stalled` shows the reason")
            if not self._may_lease.is_set():
                await self._pass_pause()
                started = counted = time.monotonic()
                self._clock.enter(LearnerState.WAITING_FOR_BATCH)

    async def save(self, batch: RecordedBatch) -> bool:
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
        self._clock.enter(LearnerState.PAUSED)
        started = time.monotonic()
        await self._may_lease.wait()  # unbounded: a person ends the pause, or the process exits
        self._metrics.waited(WaitReason.PAUSED, time.monotonic() - started)

    async def _records_of(self, batch: RecordedBatch) -> AsyncIterator[bytes]:
        """The bytes of the batch's records, as they arrive."""
        ranges = [ByteRange(recorded.record, 0, recorded.header.record_bytes) for recorded in batch.rollouts]
        async for _, data in self._broker.stream_records(ranges):
            yield data
