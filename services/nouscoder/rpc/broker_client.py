"""A worker's view of the broker: domain objects in and out, the stubs hidden.

Every method but `watch_policy` waits at most `patience_s` seconds for a broker that does not answer, then raises
PeerUnreachable; it raises PeerRefused (a PeerError) when the broker refuses what was asked, with its sentence.
A retry is always safe: the broker's transitions are idempotent.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import Self

from nouscoder.batch import Batch
from nouscoder.lease import GradingTests, Lease, LeasedBatch, LeasedGradings, LeasedTasks
from nouscoder.ledger import Ledger
from nouscoder.policy import PolicyManifest
from nouscoder.rollout import Rollout
from nouscoder.rpc.channel import open_channel
from nouscoder.run_status import Blocker, RunStatus
from nouscoder.verdict import Verdict


def new_worker_id(service: str, slot: int = 0) -> str:
    """service-hostname-slot, the same over restarts, then -incarnation. Call it once in a process.

    No two live workers of a run may share what is before the incarnation: the newer one takes the older one's leases.
    """
    return f"{service}-{socket.gethostname()}-{slot}-{os.getpid()}.{secrets.token_hex(3)}"


class BrokerClient:
    """Use as `async with BrokerClient(config.broker.grpc, new_worker_id("generation")) as broker:`."""

    def __init__(self, address: str, worker_id: str, patience_s: float = 60.0, num_cached_tests: int = 1024) -> None:
        self.worker_id = worker_id

    async def __aenter__(self) -> Self:
        raise NotImplementedError

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raise NotImplementedError

    async def lease_tasks(self, max_tasks: int, wait_s: float = 10.0) -> LeasedTasks:
        """Up to `max_tasks` rollouts to sample, or none after `wait_s` seconds."""
        raise NotImplementedError

    async def submit_rollouts(self, rollouts: Iterable[tuple[str, Rollout]]) -> frozenset[str]:
        """Hand in (lease_id, rollout) pairs; answers the rollout ids refused because their lease was lost."""
        raise NotImplementedError

    async def lease_grading(self, max_rollouts: int, wait_s: float = 10.0) -> LeasedGradings:
        """Up to `max_rollouts` rollouts to grade, or none after `wait_s` seconds."""
        raise NotImplementedError

    async def get_tests(self, problem_id: str) -> GradingTests:
        """A problem's tests; the most recently used are kept."""
        raise NotImplementedError

    async def submit_verdicts(self, verdicts: Iterable[tuple[str, str, Verdict]]) -> frozenset[str]:
        """Hand in (lease_id, rollout_id, verdict); answers the rollout ids refused because their lease was lost."""
        raise NotImplementedError

    async def lease_batch(self, wait_s: float = 10.0) -> LeasedBatch:
        """The next batch, or the same as before when it has not been committed."""
        raise NotImplementedError

    async def commit_batch(self, batch_id: int, step: int) -> bool:
        """A durable checkpoint holds the batch; `step` counts the run's optimizer steps. True: it was known."""
        raise NotImplementedError

    async def publish_policy(self, manifest: PolicyManifest) -> int:
        """Announce a policy; answers the newest version. PeerRefused unless it is the newest + 1 or the same again."""
        raise NotImplementedError

    def watch_policy(self) -> AsyncIterator[PolicyManifest]:
        """The newest policy, then each newer one, for ever: it connects again whenever the broker comes back."""
        raise NotImplementedError

    def keep_leases(self) -> LeaseKeeper:
        """A keeper of leases: `async with broker.keep_leases() as keeper: keeper.add(lease) ...`."""
        raise NotImplementedError

    async def finish_run(self, reason: str) -> Ledger:
        """End the run; answers the last state of the ledger."""
        raise NotImplementedError

    async def status(self) -> RunStatus:
        """The run at one instant."""
        raise NotImplementedError

    async def why_stalled(self) -> tuple[Blocker, ...]:
        """What blocks the next step, worst first; empty when nothing does."""
        raise NotImplementedError


class LeaseKeeper:
    """Beats for the leases it was given, so that they live as long as the worker works on them.

    INVARIANT: a lease that was added is beaten for until it is dropped or reported lost, never longer.
    """

    def add(self, lease: Lease) -> None:
        """Keep this lease alive from now on."""
        raise NotImplementedError

    def drop(self, lease_id: str) -> None:
        """The work is handed in or given up: stop beating for it. Unknown ids are ignored."""
        raise NotImplementedError

    def take_lost(self) -> frozenset[str]:
        """Lease ids lost since the last call (and no longer kept): drop the work on them."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        raise NotImplementedError

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raise NotImplementedError
