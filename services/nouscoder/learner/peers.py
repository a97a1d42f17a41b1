"""The protocol of the broker that the learner needs. rpc/broker_client.py implements it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from nouscoder.domain.learner_state import Restored, TrainedState
from nouscoder.domain.lease import Lease, LeasedBatch
from nouscoder.domain.ledger import Ledger
from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.problem_statistics import CurriculumState
from nouscoder.domain.run_status import RunStatus
from nouscoder.store.record_store import ByteRange


class Keeper(Protocol):
    """Sends heartbeats for leases."""

    def add(self, lease: Lease) -> None:
        """Renew this lease from now on."""
        ...

    def drop(self, lease_id: str) -> None:
        """Stop renewing the lease."""
        ...


class Broker(Protocol):
    """The broker's calls that the learner makes. They raise NousCoderError when it refuses or is unreachable."""

    async def status(self) -> RunStatus:
        """The current state of the run."""
        ...

    async def lease_batch(self, wait_s: float = ..., run_id: str = ..., batches: int = ...) -> LeasedBatch:
        """The next batch, or the previous one again if it has not been committed.

        Raises PeerBehind unless the broker holds this run and this number of batches.
        """
        ...

    async def restore_run(self, books: TrainedState) -> Restored:
        """Restore what Redis forgot from the books. Raises PeerRefused when Redis holds another run."""
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
