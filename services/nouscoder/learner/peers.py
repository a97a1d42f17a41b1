"""What the learner needs of the broker, as types. rpc/broker_client.py provides it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from nouscoder.domain.lease import Lease, LeasedBatch
from nouscoder.domain.ledger import Ledger
from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.run_status import RunStatus
from nouscoder.store.record_store import ByteRange


class Keeper(Protocol):
    """Sends heartbeats for leases."""

    def add(self, lease: Lease) -> None:
        """Keep the lease alive from now on."""
        ...

    def drop(self, lease_id: str) -> None:
        """Stop keeping the lease alive."""
        ...


class Broker(Protocol):
    """The broker's calls that the learner makes. Each raises NousCoderError when the broker refuses or stays away."""

    async def status(self) -> RunStatus:
        """The run at one instant."""
        ...

    async def lease_batch(self, wait_s: float = ...) -> LeasedBatch:
        """The next batch, or the same as before when it has not been committed."""
        ...

    def stream_records(self, ranges: Sequence[ByteRange]) -> AsyncIterator[tuple[int, bytes]]:
        """The bytes of the ranges, in order: (the range's place, bytes)."""
        ...

    async def publish_policy(self, manifest: PolicyManifest) -> int:
        """Idempotent for the same version and weights."""
        ...

    async def commit_batch(self, batch_id: int, step: int) -> bool:
        """Idempotent. True: it had been committed before."""
        ...

    async def finish_run(self, reason: str) -> Ledger:
        """Idempotent."""
        ...

    def keep_leases(self) -> AbstractAsyncContextManager[Keeper]:
        """A keeper of leases, which stops at the end of the context."""
        ...
