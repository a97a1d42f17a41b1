"""The grading worker: a client of the broker and of this service's own grader.

lease rollouts -> open their tests by digest (fetched once) -> grade -> submit each verdict at once.

INVARIANT: the worker holds at most `capacity` leases. Each ends exactly once: its verdict is submitted, or its work is
cancelled because the lease was lost. An infrastructure failure is submitted as internal_error and never as another
verdict; the broker then leases the rollout again. While the broker does not answer, the worker waits and keeps only its
leases.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import grpc

from nouscoder.config import Config
from nouscoder.domain.lease import Lease, LeasedGrading, LeasedGradings
from nouscoder.domain.submission import Tests
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.errors import NousCoderError
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.channel import PeerError, PeerUnreachable
from nouscoder.rpc.worker_identity import held_worker_id
from nouscoder.store.blobs import open_blobs
from nouscoder.store.tests import TestStore
from nouscoder.store.tests_cache import TestsCache
from nouscoder.verifier.api.streaming import grade_patiently
from nouscoder.verifier.grading.grader import QueueFull
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.grading.verdict_cache import Grading

log = logging.getLogger(__name__)

LEASE_WAIT_S = 5.0
TICK_S = 0.2
PAUSE_S = 1.0


OpenTests = Callable[[str], AbstractAsyncContextManager[Tests]]


class Broker(Protocol):
    """The calls to a broker that the worker needs; implemented by rpc.broker_client.BrokerClient."""

    async def lease_grading(self, max_rollouts: int, wait_s: float = ...) -> LeasedGradings:
        """Lease up to `max_rollouts` rollouts to grade. Waits up to `wait_s` seconds for the first."""
        ...

    async def submit_verdicts(self, verdicts: Iterable[tuple[str, str, Verdict]]) -> frozenset[str]:
        """Submit (lease_id, rollout_id, verdict) triples. Returns the rollout ids that were refused."""
        ...


class Keeper(Protocol):
    """Renews leases; implemented by rpc.broker_client.LeaseKeeper."""

    def add(self, lease: Lease) -> None:
        """Renew this lease until it is dropped or lost."""
        ...

    def drop(self, lease_id: str) -> None:
        """Stop renewing a lease."""
        ...

    def take_lost(self) -> frozenset[str]:
        """The ids of the leases lost since the last call."""
        ...


async def grade_rollouts(
    config: Config, grader: Grading, cache: TestsCache, credentials: grpc.ChannelCredentials | None = None
) -> None:
    """Grade the rollouts of this run's broker until cancelled. Raises BlobsUnusable."""
    store = TestStore(open_blobs(config.problems.tests)) if config.problems.tests else None
    with held_worker_id("verifier", config.run.name) as worker_id:
        client = BrokerClient(config.broker.grpc, worker_id, config.run.peer_patience_s, credentials=credentials)
        async with client as broker, broker.keep_leases() as keeper:
            source = store or broker
            await GradingWorker(broker, keeper, grader, lambda digest: cache.opened(digest, source)).run()


class GradingWorker:
    """Leases two rollouts for each slot of `grader`, so that every slot stays busy."""

    def __init__(self, broker: Broker, keeper: Keeper, grader: Grading, opened: OpenTests) -> None:
        """`opened` opens the tests of a digest while they are in use."""
        self.capacity = 2 * grader.num_slots
        self._broker = broker
        self._keeper = keeper
        self._grader = grader
        self._opened = opened
        self._in_hand: dict[str, asyncio.Task[None]] = {}
        self._room = asyncio.Event()

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._drop_lost())
                while True:
                    await self._lease(group)
        finally:
            for lease_id in list(self._in_hand):
                self._keeper.drop(lease_id)

    async def _lease(self, group: asyncio.TaskGroup) -> None:
        """Lease rollouts once, up to the capacity."""
        room = self.capacity - len(self._in_hand)
        if room <= 0:
            self._room.clear()
            await self._room.wait()  # bounded: each submission in progress has a time limit
            return
        try:
            leased = await self._broker.lease_grading(room, LEASE_WAIT_S)
        except PeerUnreachable as error:
            log.warning("waiting for the broker", extra={"detail": str(error)})
            return
        except PeerError as error:
            log.warning("the broker leases nothing", extra={"detail": str(error)})
            await asyncio.sleep(PAUSE_S)
            return
        for grading in leased.gradings:
            self._take(grading, group)
        if leased.run_finished and not leased.gradings:
            await asyncio.sleep(PAUSE_S)

    def _take(self, grading: LeasedGrading, group: asyncio.TaskGroup) -> None:
        lease_id = grading.lease.lease_id
        self._keeper.add(grading.lease)
        task = group.create_task(self._work(grading))
        self._in_hand[lease_id] = task
        task.add_done_callback(lambda _: self._leave(lease_id))

    def _leave(self, lease_id: str) -> None:
        self._keeper.drop(lease_id)
        self._in_hand.pop(lease_id, None)
        self._room.set()

    async def _drop_lost(self) -> None:
        """Cancel the work on lost leases, which another worker may hold."""
        while True:
            for lease_id in self._keeper.take_lost():
                task = self._in_hand.get(lease_id)
                if task is not None:
                    log.warning("lease lost", extra={"lease_id": lease_id})
                    task.cancel()
            await asyncio.sleep(TICK_S)

    async def _work(self, grading: LeasedGrading) -> None:
        try:
            verdict = await self._verdict(grading)
            submitted = (grading.lease.lease_id, grading.rollout_id, verdict)
            refused = await self._broker.submit_verdicts([submitted])
        except PeerError as error:
            # The lease expires and the rollout is graded again, so only work is lost.
            log.warning("verdict not submitted", extra={"rollout_id": grading.rollout_id, "detail": str(error)})
            return
        if refused:
            log.warning("verdict refused: the lease was lost", extra={"rollout_id": grading.rollout_id})

    async def _verdict(self, grading: LeasedGrading) -> Verdict:
        """The verdict of a rollout. Raises PeerUnreachable when the broker that has its tests does not answer."""
        try:
            digest = grading.tests_digest
            async with self._opened(digest) as tests:
                submission = grading.rules.submission(tests, grading.text, grading.problem_id, digest)
                return await grade_patiently(self._grader, submission)
        except PeerUnreachable:
            raise
        except (NousCoderError, OSError, InvalidSubmission, QueueFull) as error:
            log.error("cannot grade", extra={"problem_id": grading.problem_id, "detail": str(error)})
            return _internal_error(self._grader.backend, f"problem {grading.problem_id}: {error}")


def _internal_error(backend: str, detail: str) -> Verdict:
    return Verdict(VerdictKind.INTERNAL_ERROR, 0, 0, 0, 0.0, backend, detail=detail)
