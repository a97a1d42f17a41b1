"""The grading worker: a client of the broker and of this service's own grader.

lease rollouts -> open their tests by digest (fetched once) -> grade -> submit each verdict at once, together with those
that came while the call before was in progress.

INVARIANT: the worker holds at most `capacity` leases. Each ends exactly once: its verdict is submitted, its work is
cancelled because the lease was lost, or it is released when the worker stops. An infrastructure failure is submitted
as internal_error and never as another verdict; the broker then leases the rollout again. While the broker does not
answer, the worker waits and keeps only its leases.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from nouscoder.config import Config
from nouscoder.domain.lease import LeasedGrading, WorkReport
from nouscoder.domain.submission import Tests
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.errors import NousCoderError
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.channel import PeerError, PeerUnreachable
from nouscoder.rpc.tls import ChannelTls
from nouscoder.rpc.worker_id import held_worker_id
from nouscoder.store.blobs import open_blobs
from nouscoder.store.tests import TestStore
from nouscoder.store.tests_cache import TestsCache
from nouscoder.verifier.api.streaming import grade_patiently
from nouscoder.verifier.grading.grader import Grading, QueueFull
from nouscoder.verifier.grading.validation import InvalidSubmission

log = logging.getLogger(__name__)

LEASE_WAIT_S = 20.0
TICK_S = 0.2
PAUSE_S = 1.0
_STOP_LIMIT_S = 2.0
OpenTests = Callable[[str], AbstractAsyncContextManager[Tests]]


async def grade_rollouts(
    config: Config, grader: Grading, cache: TestsCache, credentials: ChannelTls | None = None
) -> None:
    """Grade the rollouts of this run's broker until cancelled. Raises Unusable."""
    store = TestStore(open_blobs(config.problems.tests)) if config.problems.tests else None
    with held_worker_id("verifier", config.run.name) as worker_id:
        client = BrokerClient(config.broker.grpc, worker_id, config.run.peer_patience_s, credentials=credentials)
        async with client as broker:
            source = store or broker
            await GradingWorker(broker, grader, lambda digest: cache.opened(digest, source)).run()


@dataclass(slots=True)
class _InHand:
    """The work under one lease, and how many tests it has graded."""

    task: asyncio.Task[None]
    num_tests: int = 0


@dataclass(slots=True, eq=False)
class _Graded:
    """A verdict on its way to the broker."""

    lease_id: str
    rollout_id: str
    verdict: Verdict
    submitted: asyncio.Event = field(default_factory=asyncio.Event)


class GradingWorker:
    """Leases two rollouts for each slot of `grader`, so that every slot stays busy."""

    def __init__(self, broker: BrokerClient, grader: Grading, opened: OpenTests) -> None:
        """`opened` opens the tests of a digest while they are in use."""
        self.capacity = 2 * grader.num_slots
        self._broker = broker
        self._grader = grader
        self._opened = opened
        self._in_hand: dict[str, _InHand] = {}
        self._num_tests = 0
        self._graded: list[_Graded] = []
        self._some_graded = asyncio.Event()
        self._room = asyncio.Event()

    async def run(self) -> None:
        """Work until cancelled, then submit finished verdicts and release the other leases."""
        async with self._broker.keep_leases(self._report) as keeper:
            self._keeper = keeper
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._drop_lost())
                    group.create_task(self._submit())
                    while True:
                        await self._lease(group)
            finally:
                try:
                    async with asyncio.timeout(_STOP_LIMIT_S):
                        if self._graded:
                            await self._submit_all(self._graded)
                        await self._broker.release_leases()
                    log.info("leases given back")
                except (TimeoutError, PeerError) as error:
                    log.warning("leases not released, they will expire", extra={"detail": str(error)})
                for lease_id in list(self._in_hand):
                    self._keeper.drop(lease_id)

    def _report(self) -> WorkReport:
        """Tests graded under each lease. Work that still waits for a slot counts the tests of all leases."""
        return WorkReport({lease_id: held.num_tests or self._num_tests for lease_id, held in self._in_hand.items()})

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
        self._in_hand[lease_id] = _InHand(task)
        task.add_done_callback(lambda _: self._leave(lease_id))

    def _leave(self, lease_id: str) -> None:
        self._keeper.drop(lease_id)
        self._in_hand.pop(lease_id, None)
        self._room.set()

    async def _drop_lost(self) -> None:
        """Cancel the work on lost leases: another worker may hold them, or their group has ended."""
        while True:
            for lease_id, reason in self._keeper.take_lost().items():
                held = self._in_hand.get(lease_id)
                if held is not None:
                    log.info("lease lost, grading cancelled", extra={"lease_id": lease_id, "reason": reason.value})
                    held.task.cancel()
            await asyncio.sleep(TICK_S)

    async def _work(self, grading: LeasedGrading) -> None:
        try:
            verdict = await self._verdict(grading)
        except PeerError as error:
            # The lease expires and the rollout is graded again, so only work is lost.
            log.warning("not graded", extra={"rollout_id": grading.rollout_id, "detail": str(error)})
            return
        graded = _Graded(grading.lease.lease_id, grading.rollout_id, verdict)
        self._graded.append(graded)
        self._some_graded.set()
        await graded.submitted.wait()  # bounded: the call has a time limit

    async def _submit(self) -> None:
        while True:
            await self._some_graded.wait()
            self._some_graded.clear()
            graded = list(self._graded)
            await self._submit_all(graded)
            del self._graded[: len(graded)]
            for item in graded:
                item.submitted.set()

    async def _submit_all(self, graded: Sequence[_Graded]) -> None:
        """Submit together, or one by one if the broker refuses that. A refused rollout is graded again."""
        try:
            refused = await self._broker.submit_verdicts([(g.lease_id, g.rollout_id, g.verdict) for g in graded])
        except PeerError as error:
            if len(graded) > 1 and not isinstance(error, PeerUnreachable):
                for item in graded:
                    await self._submit_all([item])
                return
            rollout_ids = [item.rollout_id for item in graded]
            log.warning("verdicts not submitted", extra={"rollout_ids": rollout_ids, "detail": str(error)})
            return
        if refused:
            log.warning("verdicts refused: the leases were lost", extra={"rollout_ids": sorted(refused)})

    async def _verdict(self, grading: LeasedGrading) -> Verdict:
        """The verdict of a rollout. Raises PeerUnreachable when the broker that has its tests does not answer."""
        try:
            digest = grading.tests_digest
            async with self._opened(digest) as tests:
                submission = grading.rules.submission(tests, grading.text, grading.problem_id, digest)
                return await grade_patiently(self._grader, submission, lambda _: self._count(grading.lease.lease_id))
        except PeerUnreachable:
            raise
        except (NousCoderError, OSError, InvalidSubmission, QueueFull) as error:
            log.error("cannot grade", extra={"problem_id": grading.problem_id, "detail": str(error)})
            return _internal_error(self._grader.backend, f"problem {grading.problem_id}: {error}")

    def _count(self, lease_id: str) -> None:
        self._num_tests += 1
        held = self._in_hand.get(lease_id)
        if held is not None:
            held.num_tests += 1


def _internal_error(backend: str, detail: str) -> Verdict:
    return Verdict(VerdictKind.INTERNAL_ERROR, 0, 0, 0, 0.0, backend, detail=detail)
