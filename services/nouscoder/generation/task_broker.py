"""The calls to the broker that a generation worker needs; implemented by BrokerClient."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Protocol

from nouscoder.domain.lease import LeasedTasks, WorkReport
from nouscoder.domain.partial import PartialRollout
from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.rollout import Rollout
from nouscoder.rpc.worker import LeaseKeeper


class TaskBroker(Protocol):
    """Every call raises PeerError."""

    async def lease_tasks(self, max_tasks: int, wait_s: float = 10.0) -> LeasedTasks:
        """Lease up to `max_tasks` tasks. Waits up to `wait_s` seconds for the first."""
        ...

    async def submit_rollouts(self, rollouts: Iterable[tuple[str, Rollout]]) -> frozenset[str]:
        """Submit (lease_id, rollout) pairs. Returns the rollout ids that were refused."""
        ...

    async def keep_partials(self, pieces: Mapping[str, PartialRollout]) -> dict[str, int | None]:
        """Have the broker keep a piece of a rollout for each lease id; a piece from token 0 on replaces what it keeps.

        Returns how many tokens it keeps of each rollout then; None: the lease is lost.
        """
        ...

    def watch_policy(self) -> AsyncIterator[PolicyManifest]:
        """The newest policy, then each newer one."""
        ...

    async def release_leases(self, lease_ids: Sequence[str] = ()) -> None:
        """Give these leases back; none: all that this worker holds."""
        ...

    def keep_leases(self, report: Callable[[], WorkReport]) -> LeaseKeeper:
        """A keeper of leases."""
        ...
