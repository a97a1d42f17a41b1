"""What the learner asks of the broker, and its copy of the curriculum, from which a wiped Redis is restored.

INVARIANT: the file holds a complete state of this run, as the broker reported it. A copy that is missing,
damaged or old costs statistics, and some problems may be sampled again. It never stops a run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from nouscoder.atomic_files import StorageError, write_whole
from nouscoder.domain.curriculum import CurriculumState
from nouscoder.domain.learner_state import Restored, TrainedState
from nouscoder.domain.lease import Lease, LeasedBatch
from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.run_status import Ledger, RunStatus
from nouscoder.rpc.channel import PeerError
from nouscoder.store.record_store import ByteRange

log = logging.getLogger(__name__)

FILE = "curriculum.json"
_EVERY_S = 60.0


class Keeper(Protocol):
    """Sends heartbeats for leases."""

    def add(self, lease: Lease) -> None:
        """Renew this lease from now on."""
        ...

    def drop(self, lease_id: str) -> None:
        """Stop renewing the lease."""
        ...


class LearnerBroker(Protocol):
    """The broker's calls that the learner makes (rpc/broker_client.py).

    They raise NousCoderError when it refuses or is unreachable.
    """

    async def status(self) -> RunStatus:
        """The current state of the run."""
        ...

    async def lease_batch(self, wait_s: float = ..., run_id: str = ..., batches: int = ...) -> LeasedBatch:
        """The next batch, or the previous one again if it has not been committed.

        Raises PeerBehind unless the broker holds this run and this number of batches.
        """
        ...

    async def restore_run(self, trained: TrainedState) -> Restored:
        """Restore what Redis forgot from the learner's state. Raises PeerRefused when Redis holds another run."""
        ...

    async def read_curriculum(self) -> tuple[str, CurriculumState]:
        """The name of the run, and its curriculum's cursor and statistics."""
        ...

    def stream_records(self, ranges: Sequence[ByteRange]) -> AsyncIterator[tuple[int, bytes]]:
        """The bytes of the ranges in order, as pairs (index of the range, bytes)."""
        ...

    async def publish_policy(self, manifest: PolicyManifest) -> int:
        """Publish a policy. Idempotent for the same version and weights. Raises PeerBehind if versions are missing."""
        ...

    async def commit_batch(self, batch_id: int, step: int, groups: Iterable[int] = ...) -> bool:
        """Commit a batch. Idempotent. Returns True when it was committed before. Raises PeerBehind if it is missing."""
        ...

    async def report_batch_failure(self, batch_id: int, reason: str) -> bool:
        """Say that a batch cannot be trained on. Returns True if the batch is now held back."""
        ...

    async def finish_run(self, reason: str) -> Ledger:
        """Idempotent."""
        ...

    def keep_leases(self) -> AbstractAsyncContextManager[Keeper]:
        """A keeper of leases, which stops when the context ends."""
        ...


class CurriculumCopy:
    """The copy in a run folder, made again after a batch when the last one is a minute old.

    A broker that does not answer delays the learner by one attempt of at most 10 seconds.
    """

    def __init__(self, run_folder: Path, broker: LearnerBroker) -> None:
        self._file = run_folder / FILE
        self._broker = broker
        self._made_at: float | None = None

    async def state(self) -> CurriculumState:
        """The state in the copy; an empty state when there is none."""
        try:
            return await asyncio.to_thread(read_copy, self._file) or CurriculumState()
        except ValueError as error:
            log.warning("the copy of the curriculum is damaged", extra={"file": str(self._file), "fault": str(error)})
            return CurriculumState()

    async def after_batch(self) -> None:
        """Make the copy again if it is due."""
        if self._made_at is None or time.monotonic() - self._made_at >= _EVERY_S:
            await self.now()

    async def now(self) -> None:
        """Make the copy again. A failure is logged: the next one holds all that this one would."""
        try:
            _, state = await self._broker.read_curriculum()
            data = await asyncio.to_thread(lambda: json.dumps(state.to_json()).encode())
            await asyncio.to_thread(write_whole, self._file, data)
        except (PeerError, StorageError) as error:
            log.warning("the curriculum was not copied", extra={"reason": str(error)})
        self._made_at = time.monotonic()


def read_copy(file: Path) -> CurriculumState | None:
    """The state in a copy; None when there is none. Raises ValueError when it is damaged."""
    try:
        found = json.loads(file.read_bytes())
        return CurriculumState.of_records(int(found["cursor"]), found["problems"].items())
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, AttributeError, OSError) as error:
        raise ValueError(f"{file} is not a copy of a curriculum: {error!r}") from error
