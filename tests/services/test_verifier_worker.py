"""The grading worker: every lease ends once, lost work is cancelled, infrastructure failures are internal_error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from nouscoder.broker.core import Broker
from nouscoder.broker.process import serve_broker
from nouscoder.config import load_config
from nouscoder.domain.lease import Lease, LeasedGrading, LeasedGradings, LeaseLoss, WorkReport
from nouscoder.domain.problem import GradingRules
from nouscoder.domain.submission import StdinCase, StdinTests, Tests
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.channel import PeerError, PeerRefused, PeerUnreachable
from nouscoder.store.tests import UnknownTests
from nouscoder.store.tests_cache import TestsCache
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.base import RunResult, SandboxError
from nouscoder.verifier.sandbox.fake import FakeSandbox, ended
from nouscoder.verifier.worker import GradingWorker

TESTS = StdinTests((StdinCase("a", "a"),))
KNOWN, UNKNOWN = ("sha256:" + digit * 64 for digit in "01")


def wrong(_: bytes) -> RunResult:
    """A program with wrong output."""
    return ended(b"b")


def broken(_: bytes) -> RunResult:
    """A sandbox that fails."""
    raise SandboxError("gone")


async def new_grader(num_slots: int = 2) -> Grader:
    """A grader with the fake sandbox. The programs `wrong` and `broken` fail, others echo."""
    sandbox = FakeSandbox({"wrong": wrong, "broken": broken}, num_slots=num_slots)
    await sandbox.start()
    return Grader(sandbox, VerifierMetrics(CollectorRegistry()))


class ListBroker:
    """A broker in memory that also keeps the leases."""

    def __init__(self, texts: Iterable[str], digest: str = KNOWN) -> None:
        self.waiting = [
            LeasedGrading(Lease(f"l{n}", 5.0, 1), f"r{n}", "p", text, digest, GradingRules(text_is_code=True))
            for n, text in enumerate(texts)
        ]
        self.kept: set[str] = set()
        self.most_kept = 0
        self.lost: set[str] = set()
        self.verdicts: dict[str, list[Verdict]] = {}
        self.troubles: list[PeerError] = []
        self.has_released = False
        self.unwelcome = ""
        self.messages: list[int] = []
        self.tests_known = asyncio.Event()
        self.tests_known.set()

    async def lease_grading(self, max_rollouts: int, wait_s: float = 10.0) -> LeasedGradings:
        if self.troubles:
            raise self.troubles.pop()
        leased, self.waiting = self.waiting[:max_rollouts], self.waiting[max_rollouts:]
        if not leased:
            await asyncio.sleep(0.01)
        return LeasedGradings(tuple(leased))

    @asynccontextmanager
    async def opened(self, digest: str) -> AsyncIterator[Tests]:
        await self.tests_known.wait()
        if digest != KNOWN:
            raise UnknownTests("no such tests")
        yield TESTS

    @asynccontextmanager
    async def keep_leases(self, report: Callable[[], WorkReport]) -> AsyncIterator[ListBroker]:
        self.report = report
        yield self

    async def release_leases(self) -> None:
        self.has_released = True

    async def submit_verdicts(self, verdicts: Iterable[tuple[str, str, Verdict]]) -> frozenset[str]:
        items = list(verdicts)
        self.messages.append(len(items))
        await asyncio.sleep(0.01)
        if any(rollout_id == self.unwelcome for _, rollout_id, _ in items):
            raise PeerRefused("the lease is on another rollout")
        for lease_id, rollout_id, verdict in items:
            assert lease_id in self.kept, "a lease must be kept until its verdict is submitted"
            self.verdicts.setdefault(rollout_id, []).append(verdict)
        return frozenset()

    def add(self, lease: Lease) -> None:
        self.kept.add(lease.lease_id)
        self.most_kept = max(self.most_kept, len(self.kept))

    def drop(self, lease_id: str) -> None:
        self.kept.discard(lease_id)

    def take_lost(self) -> dict[str, LeaseLoss]:
        lost, self.lost = dict.fromkeys(self.lost, LeaseLoss.STALE), set()
        return lost


@asynccontextmanager
async def working(broker: ListBroker, grader: Grader) -> AsyncIterator[GradingWorker]:
    """A worker that runs in the background."""
    worker = GradingWorker(broker, grader, broker.opened)  # type: ignore[arg-type]
    task = asyncio.ensure_future(worker.run())
    try:
        yield worker
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def settled(condition: Callable[[], bool]) -> None:
    """Wait, at most 10 s, until `condition` holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_every_lease_gets_one_verdict_and_at_most_capacity_leases_are_held() -> None:
    broker = ListBroker(["cat" if n % 3 else "wrong" for n in range(50)])
    async with working(broker, await new_grader()) as worker:
        await settled(lambda: len(broker.verdicts) == 50 and not broker.kept)
        assert broker.most_kept == worker.capacity == 4
    for number in range(50):
        (verdict,) = broker.verdicts[f"r{number}"]
        assert verdict.kind is (VerdictKind.ACCEPTED if number % 3 else VerdictKind.WRONG_ANSWER)
        assert verdict.first_failure is None, "hidden tests must not be in the run's records"


async def test_infrastructure_failures_are_submitted_only_as_internal_error() -> None:
    broker = ListBroker(["broken"])
    async with working(broker, await new_grader()):
        await settled(lambda: len(broker.verdicts) == 1)
    assert broker.verdicts["r0"][0].is_ours
    unknown = ListBroker(["cat"], digest=UNKNOWN)
    async with working(unknown, await new_grader()):
        await settled(lambda: len(unknown.verdicts) == 1)
    assert unknown.verdicts["r0"][0].is_ours
    assert "no such tests" in unknown.verdicts["r0"][0].detail


async def test_the_work_on_a_lost_lease_is_cancelled() -> None:
    broker = ListBroker(["cat", "cat"])
    broker.tests_known.clear()
    async with working(broker, await new_grader(1)):
        await settled(lambda: len(broker.kept) == 2)
        broker.lost = {"l0"}
        await settled(lambda: broker.kept == {"l1"})
        broker.tests_known.set()
        await settled(lambda: not broker.kept)
    assert list(broker.verdicts) == ["r1"]


async def test_the_worker_continues_after_the_broker_was_unreachable() -> None:
    broker = ListBroker(["cat"])
    broker.troubles = [PeerUnreachable("away"), PeerUnreachable("away")]
    async with working(broker, await new_grader()):
        await settled(lambda: len(broker.verdicts) == 1)
    assert not broker.troubles, "it was unreachable twice"
    assert list(broker.verdicts) == ["r0"]


async def test_stopping_drops_every_lease() -> None:
    broker = ListBroker(["cat"] * 4)
    broker.tests_known.clear()
    async with working(broker, await new_grader()):
        await settled(lambda: len(broker.kept) == 4)
    assert not broker.kept
    assert not broker.verdicts
    assert broker.has_released, "others get the work at once"


async def test_a_verdict_that_the_broker_refuses_costs_only_itself_and_others_go_together() -> None:
    broker = ListBroker(["cat"] * 40)
    broker.unwelcome = "r7"
    async with working(broker, await new_grader(8)):
        await settled(lambda: len(broker.verdicts) == 39 and not broker.kept)
    assert "r7" not in broker.verdicts
    assert max(broker.messages) > 1


async def test_progress_is_reported_as_tests_graded() -> None:
    broker = ListBroker(["cat"])
    broker.tests_known.clear()
    async with working(broker, await new_grader(1)) as worker:
        await settled(lambda: broker.kept == {"l0"})
        assert broker.report() == WorkReport({"l0": 0})
        worker._count("l0")
        assert broker.report() == WorkReport({"l0": 1})


async def test_a_real_broker_s_rollouts_are_graded_over_grpc(
    broker_rig: Any, new_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    config = load_config(None, [*_small(), "broker.grpc='127.0.0.1:0'"])
    broker = new_broker(config=config)
    async with AsyncExitStack() as stack:
        address = await serve_broker(broker, config, asyncio.Event(), stack)
        await broker.publish_policy(broker_rig.manifest(0))
        sampled = await broker_rig.sample(broker)
        assert sampled
        client = await stack.enter_async_context(BrokerClient(address, "verifier-h-0-1"))
        task = asyncio.ensure_future(_grading(client, tmp_path))
        async with asyncio.timeout(60):
            while (await broker.status()).rollouts_graded < len(sampled):
                await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (await broker.status()).ledger.balanced


async def _grading(client: BrokerClient, folder: Path) -> None:
    cache = TestsCache(folder, 1024**2)
    opened = partial(cache.opened, source=client)
    await GradingWorker(client, await new_grader(), opened).run()


def _small() -> list[str]:
    return ["run.name=verifier-worker", "broker.group_size=4", "broker.batch_size=8", "broker.pipeline_k=2"]
