"""The grading worker: a client of the broker and of this service's own grader.

lease rollouts -> open their tests by digest, fetched once -> grade -> hand in each verdict as it comes.

INVARIANT: at most `capacity` leases are in hand; each leaves exactly once: its verdict is handed in, or its work is
dropped because the lease was lost. A failure of ours is handed in as internal_error, never as another verdict, and the
broker gives the rollout to somebody again. A broker that is away is waited for; nothing is remembered across it but
the leases in hand.
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
    """What the worker asks of a broker; rpc.broker_client.BrokerClient is one."""

    async def lease_grading(self, max_rollouts: int, wait_s: float = ...) -> LeasedGradings:
        """Rollouts to grade."""
        ...

    async def submit_verdicts(self, verdicts: Iterable[tuple[str, str, Verdict]]) -> frozenset[str]:
        """Hand in (lease_id, rollout_id, verdict); the rollout ids refused."""
        ...


class Keeper(Protocol):
    """What keeps leases alive; rpc.broker_client.LeaseKeeper is one."""

    def add(self, lease: Lease) -> None:
        """Keep it alive."""
        ...

    def drop(self, lease_id: str) -> None:
        """Let it go."""
        ...

    def take_lost(self) -> frozenset[str]:
        """Those lost since the last call."""
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
    """Keeps every slot of `grader` busy, with as many rollouts again leased ahead."""

    def __init__(self, broker: Broker, keeper: Keeper, grader: Grading, opened: OpenTests) -> None:
        """`opened` gives the tests of a digest, for as long as they are in use."""
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
        """Fill the room there is, once."""
        room = self.capacity - len(self._in_hand)
        if room <= 0:
            self._room.clear()
            await self._room.wait()  # ends with any submission in hand, each of which has its own limit
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
        """Stop the work on leases that somebody else may hold by now."""
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
            handed_in = (grading.lease.lease_id, grading.rollout_id, verdict)
            refused = await self._broker.submit_verdicts([handed_in])
        except PeerError as error:
            # The lease runs out and the rollout is graded again: work is lost, not the rollout.
            log.warning("verdict not handed in", extra={"rollout_id": grading.rollout_id, "detail": str(error)})
            return
        if refused:
            log.warning("verdict refused: the lease was lost", extra={"rollout_id": grading.rollout_id})

    async def _verdict(self, grading: LeasedGrading) -> Verdict:
        """The verdict of a rollout. Raises PeerUnreachable when its tests cannot be had for want of a broker."""
        try:
            digest = grading.tests_digest
            async with self._opened(digest) as tests:
                submission = grading.rules.submission(tests, grading.text, grading.problem_id, digest)
                return await grade_patiently(self._grader, submission)
        except PeerUnreachable:
            raise
        except (NousCoderError, OSError, InvalidSubmission, QueueFull) as error:
            log.error("cannot grade", extra={"problem_id": grading.problem_id, "detail": str(error)})
            return _ours(self._grader.backend, f"problem {grading.problem_id}: {error}")


def _ours(backend: str, detail: str) -> Verdict:
    return Verdict(VerdictKind.INTERNAL_ERROR, 0, 0, 0, 0.0, backend, detail=detail)
