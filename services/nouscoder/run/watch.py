"""Reads the state of a run from its services at intervals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TypeVar

from prometheus_client.parser import text_string_to_metric_families

from nouscoder.config import Config
from nouscoder.domain.run_status import RunStatus
from nouscoder.retry import Retry
from nouscoder.rpc.broker_client import PATIENCE_S, BrokerClient
from nouscoder.rpc.channel import PeerError, PeerUnreachable
from nouscoder.rpc.generation_client import GenerationClient, GenerationStatus
from nouscoder.rpc.learner_client import LearnerClient, LearnerStatus
from nouscoder.rpc.metrics_page import read_metrics
from nouscoder.rpc.tls import channel_credentials
from nouscoder.rpc.worker_id import observer_id
from nouscoder.run.snapshot import ProcessLine, Snapshot
from nouscoder.run.supervisor import SupervisedProcess

Answer = TypeVar("Answer")

_STARTING = Retry("the start of generation", (PeerUnreachable,), for_s=1800.0, wait_s=0.5, log_after_s=30.0)


def broker_of(config: Config, patience_s: float = PATIENCE_S) -> BrokerClient:
    """A client of the run's broker for what only watches: it is refused while the broker serves another run."""
    credentials = channel_credentials(config.tls)
    return BrokerClient(config.broker.grpc, observer_id("watch"), patience_s, credentials, config.asked_run)


_WINDOW_S = 10.0


async def generation_started(config: Config, show: Callable[[str, int, int], None]) -> None:
    """Wait until generation answers, and show for how long. Raises PeerError."""
    begun_s = time.monotonic()
    async with GenerationClient(config.generation.grpc, 0.0, channel_credentials(config.tls)) as client:
        phase = "generation is starting ({:.0f} s)"
        await _STARTING.call(client.status, lambda _: show(phase.format(time.monotonic() - begun_s), 0, 0))


class Rate:
    """The growth of a counter per second, averaged over about _WINDOW_S. A falling counter restarted at 0."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        self._total = 0.0
        self._last = 0.0

    def update(self, value: float, now_s: float) -> float:
        """The rate after a new reading."""
        self._total += value - self._last if value >= self._last else value
        self._last = value
        self._samples.append((now_s, self._total))
        while len(self._samples) > 2 and now_s - self._samples[1][0] > _WINDOW_S:
            self._samples.pop(0)
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


class RunWatch:
    """Reads broker, generation, learner and verifier. The figures of a service that does not answer are missing."""

    def __init__(self, config: Config) -> None:
        self._config = config
        credentials = channel_credentials(config.tls)
        self._generation = GenerationClient(config.generation.grpc, 0.0, credentials, config.asked_run)
        self._learner_client = LearnerClient(config.learner.grpc, credentials, config.asked_run)
        self._connections = AsyncExitStack()
        self._broker = broker_of(config, 0.0)
        self._tokens = Rate()
        self._tests = Rate()
        self._started_s = time.monotonic()
        self._pass_rates: dict[int, float] = {}
        self._first: tuple[int, float] | None = None
        self._learner: LearnerStatus | None = None
        self.status: RunStatus | None = None
        # Which services answered the last request.
        self.answered: dict[str, bool] = {}

    async def __aenter__(self) -> RunWatch:
        """Connect."""
        for client in (self._broker, self._generation, self._learner_client):
            await self._connections.enter_async_context(client)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnect."""
        await self._connections.aclose()

    async def snapshot(
        self, phase: str, processes: Iterable[SupervisedProcess], *, with_blockers: bool = False
    ) -> Snapshot:
        """The current state of the run, with what blocks it if it is asked for."""
        status, learner, generation, num_tests, blockers = await asyncio.gather(
            _or_none(self._broker.status()),
            _or_none(self._learner_client.status()),
            _or_none(self._generation.status()),
            asyncio.to_thread(read_counter, self._config.verifier.metrics, "nouscoder_verifier_tests"),
            _or_none(self._broker.why_stalled()) if with_blockers else _nobody_asked(),
        )
        self.status = status or self.status
        self.answered = {
            name: answer is not None
            for name, answer in (("broker", status), ("learner", learner), ("generation", generation))
        }
        # A service that does not answer is restarting or has finished the run: its last answer is kept.
        self._learner = learner or self._learner
        found = self._assemble(phase, tuple(processes), status, self._learner, generation, num_tests)
        return found if blockers is None else replace(found, blockers=tuple(one.reason for one in blockers))

    async def finish_run(self, reason: str) -> None:
        """End the run at the broker, so that no service works for it any more. Raises PeerError."""
        await self._broker.finish_run(reason)

    def _assemble(
        self,
        phase: str,
        processes: tuple[SupervisedProcess, ...],
        status: RunStatus | None,
        learner: LearnerStatus | None,
        generation: GenerationStatus | None,
        num_tests: float | None,
    ) -> Snapshot:
        now_s = time.monotonic()
        batch = status.batches_committed if status else 0
        if learner and batch:
            self._pass_rates.setdefault(batch, learner.pass_rate)
        return Snapshot(
            phase=phase,
            batch=batch,
            total_batches=self._config.run.total_batches,
            step=learner.step if learner else (status.step if status else 0),
            total_steps=self._config.total_steps,
            pass_rate=learner.pass_rate if learner and learner.step else None,
            reward_mean=learner.reward_mean if learner and learner.step else None,
            staleness_mean=learner.staleness_mean if learner and learner.step else None,
            staleness_max=int(learner.staleness_max) if learner and learner.step else None,
            tests_per_second=None if num_tests is None else self._tests.update(num_tests, now_s),
            tokens_per_second=self._tokens.update(generation.num_tokens, now_s) if generation else None,
            policy_version=status.policy_version if status else None,
            ledger=status.ledger if status else None,
            time_left_s=self._time_left_s(batch, now_s),
            elapsed_s=now_s - self._started_s,
            processes=tuple(ProcessLine(p.spec.name, p.state.value, p.pid, p.num_restarts) for p in processes),
            learner_state=learner.state if learner else "",
            pass_rates=tuple(self._pass_rates.values()),
        )

    def _time_left_s(self, batch: int, now_s: float) -> float | None:
        """The time for the remaining batches at the rate since this watch began."""
        self._first = self._first or (batch, now_s)
        done = batch - self._first[0]
        if done < 1:
            return None
        return (self._config.run.total_batches - batch) * (now_s - self._first[1]) / done


async def _or_none(question: Awaitable[Answer]) -> Answer | None:
    """The answer, or None when the service does not answer, because it may be restarting."""
    try:
        return await question
    except PeerError:
        return None


async def _nobody_asked() -> None:
    return None


def read_counter(metrics_address: str, family: str) -> float | None:
    """The sum of a counter's samples on a Prometheus page; None when the page cannot be read."""
    try:
        text = read_metrics(metrics_address, 1.0)
    except (OSError, ValueError):
        return None
    for found in text_string_to_metric_families(text):
        if found.name == family:
            return sum(sample.value for sample in found.samples if sample.name == f"{family}_total")
    return 0.0
