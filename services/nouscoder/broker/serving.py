"""The broker's process: its start, its gRPC server, its metrics, and its background work.

The sweeper expires leases by a clock of the run, which advances only while the broker and Redis work. Redis' own clock
may be set forwards or back, and a worker cannot send heartbeats while the broker or Redis stands still. So leases are
measured by the run's clock in Redis. Once a period the broker advances it by the monotonic time that it observed. The
clock does not advance while the broker is stopped, its event loop is blocked, or Redis does not answer (an absence),
nor for lease_s seconds after that, so every live worker can send a heartbeat first. This extra time ends when the clock
advances by another broker, because that one served the workers meanwhile.

INVARIANT: a lease expires only after lease_s seconds without a heartbeat in which the broker and Redis worked. The
lease of a dead worker is taken back after lease_s, plus, for each absence, its length and lease_s.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nouscoder.broker import streams
from nouscoder.broker.core import Broker
from nouscoder.broker.errors import BrokerError, BrokerUnavailable, Refused
from nouscoder.broker.records import Records
from nouscoder.broker.redis_address import configured_url
from nouscoder.broker.redis_client import Stages
from nouscoder.broker.redis_server import start_redis
from nouscoder.broker.service import FULL_NAME, STATUS_CODES, add_to_server
from nouscoder.broker.store import Store
from nouscoder.broker.streams import read_oldest_s
from nouscoder.broker.wakeups import Waits
from nouscoder.config import Config
from nouscoder.data.problem_index import open_index
from nouscoder.domain.lease import LeaseLoss
from nouscoder.domain.run_status import RunStatus
from nouscoder.errors import Unusable
from nouscoder.retry import Retry
from nouscoder.rpc.server import Health, Served, run_until_stopped, start_grpc, stop_event
from nouscoder.rpc.tls import server_credentials

log = logging.getLogger(__name__)


# glibc's allocator keeps large freed buffers for the next ones. By default it gives their memory back to the kernel,
# which clears every page of the next buffer again. For the broker, through which messages of 2 MB with rollout records
# pass, that was a tenth of its CPU time.

# Parameters of mallopt(3), from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# The largest threshold that glibc accepts. Larger buffers come from the kernel as before.
KEPT_BYTES = 32 * 1024**2


def keep_freed_buffers() -> bool:
    """Keep up to KEPT_BYTES of freed memory at the end of the heap. False: this C library has no such setting."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    return all(set_option(option, KEPT_BYTES) == 1 for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))


class BrokerCollector(Collector):
    """Exports `latest`, or nothing while it is None: a broker that cannot reach Redis exports no old numbers."""

    def __init__(self) -> None:
        self.latest: RunStatus | None = None
        self.oldest_s: Mapping[str, float] = {}
        self.redis_memory_ratio = 0.0  # of maxmemory; 0 without maxmemory

    def collect(self) -> Iterator[Metric]:
        """The metrics of one instant."""
        if (status := self.latest) is None:
            return
        ledger = status.ledger
        final = {state: getattr(ledger, state) for state in ("trained", "filtered", "stale", "abandoned", "lost")}
        yield _gauge("nouscoder_broker_ledger_rollouts", "Rollouts by state", state={**ledger.in_flight, **final})
        yield _gauge(
            "nouscoder_broker_ledger_balanced",
            "1 while admitted = trained + filtered + stale + abandoned + lost + in flight",
            ledger.balanced,
        )
        yield _counter(
            "nouscoder_broker_admitted_rollouts",
            "Rollouts admitted: the sum of the states of nouscoder_broker_ledger_rollouts",
            ledger.admitted,
        )
        yield from _of_streams(status)
        yield _gauge(
            "nouscoder_broker_oldest_age_seconds",
            "Age of the oldest unfinished entry, 0 without one",
            stream={stream: self.oldest_s.get(stream, 0.0) for stream in ("tasks", "grading")},
        )
        yield _gauge(
            "nouscoder_broker_admission_slots_free", "Rollouts that may be admitted now", status.admission_slots_free
        )
        yield _gauge(
            "nouscoder_broker_policy_version",
            "Newest policy version, -1 before the first",
            -1 if status.policy_version is None else status.policy_version,
        )
        yield _counter("nouscoder_broker_steps", "Optimizer steps of the run's committed batches", status.step)
        yield _gauge(
            "nouscoder_broker_redis_memory_used_ratio",
            "Share of Redis' maxmemory in use, 0 without maxmemory",
            self.redis_memory_ratio,
        )
        yield _counter("nouscoder_broker_rollouts_graded", "Rollouts that got a verdict", status.rollouts_graded)
        yield _counter("nouscoder_broker_rollouts_accepted", "Rollouts accepted", status.rollouts_accepted)
        yield _gauge("nouscoder_broker_run_finished", "1 once the run is finished", status.finished)
        yield from _of_problems(status)


def _of_streams(status: RunStatus) -> Iterator[Metric]:
    streams = status.streams
    yield _gauge("nouscoder_broker_stream_lag", "Entries nobody holds", stream={s.stream: s.lag for s in streams})
    yield _gauge(
        "nouscoder_broker_pending_leases", "Entries under lease", stream={s.stream: s.pending for s in streams}
    )
    yield _counter(
        "nouscoder_broker_dead_letters",
        "Entries given up after too many deliveries",
        stream={s.stream: s.dead_letters for s in streams},
    )
    yield _counter(
        "nouscoder_broker_redeliveries",
        "Entries given again after a lease or grading failed",
        stream={s.stream: s.redeliveries for s in streams},
    )


def _of_problems(status: RunStatus) -> Iterator[Metric]:
    again = (LeaseLoss.EXPIRED, LeaseLoss.PROGRESS, LeaseLoss.RESTORED)
    yield _counter(
        "nouscoder_broker_cancelled_rollouts",
        "Rollouts that ended without a verdict because their group or the run had ended",
        reason={reason.value: status.cancelled.get(reason.value, 0) for reason in LeaseLoss if reason not in again},
    )
    refused = status.refused_problems
    yield _gauge(
        "nouscoder_broker_problems",
        "Problems: asked, refused by generation, left out because their prompts are too long",
        state={"asked": status.num_problems - refused, "refused": refused, "left_out": status.left_out_problems},
    )


def _gauge(name: str, text: str, value: float | None = None, **by_label: Mapping[str, float]) -> Metric:
    return _filled(GaugeMetricFamily(name, text, value, labels=[*by_label] or None), by_label)


def _counter(name: str, text: str, value: float | None = None, **by_label: Mapping[str, float]) -> Metric:
    return _filled(CounterMetricFamily(name, text, value, labels=[*by_label] or None), by_label)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, by_label: Mapping[str, Mapping[str, float]]) -> Metric:
    for values in by_label.values():
        for label, value in values.items():
            family.add_metric([label], value)
    return family


# The sweeper and the run's clock.

_LONGEST_PERIOD_S = 1.0
_PERIODS_A_LEASE = 5
# A gap longer than a period plus this share of a lease is an absence. Workers send three heartbeats in a lease.
_GAP_SHARE = 0.25


class Sweeper:
    """Call `sweep` once a period. `now_s` is a monotonic clock."""

    def __init__(self, store: Store, lease_s: float, now_s: Callable[[], float]) -> None:
        self.period_s = min(_LONGEST_PERIOD_S, lease_s / _PERIODS_A_LEASE)
        self._store = store
        self._lease_s = lease_s
        self._now_s = now_s
        self._name = secrets.token_hex(8)
        self._seen_tick = -1
        self._seen_clock_ms = 0
        self._last_s: float | None = None
        self._was_away = False  # an absence ended at the last look
        self._still_s = lease_s  # the clock starts after this time: before its start the broker was absent

    async def sweep(self) -> int:
        """Advance the clock, then take back expired leases; returns how many. Raises BrokerUnavailable."""
        counted_ms = round(1000 * self._observe())
        try:
            tick, clock_ms = map(int, await self._store.run("tick", self._name, self._seen_tick, counted_ms))
            if clock_ms > self._seen_clock_ms and self._seen_tick >= 0 and not self._was_away:
                self._still_s = 0.0  # the clock runs: another broker served the holders all the time
            self._seen_tick, self._seen_clock_ms = tick, clock_ms
            return await streams.sweep(self._store)
        except BrokerUnavailable:
            self._still_s = self._lease_s
            self._seen_tick = -1  # what was seen before this absence tells nothing about now
            raise

    def _observe(self) -> float:
        """By how many seconds the clock advances: by none for lease_s after an absence.

        An absence counts as one period of that time, so leases expire even on a machine where every period is late.
        """
        now_s = self._now_s()
        gap_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        self._was_away = was_away = gap_s > self.period_s + _GAP_SHARE * self._lease_s
        observed_s = self.period_s if was_away else gap_s
        if not self._still_s:
            self._still_s = self._lease_s if was_away else 0.0
            return observed_s
        counted_s = max(0.0, observed_s - self._still_s)
        self._still_s = max(0.0, self._still_s - observed_s)
        return counted_s


async def keep_sweeping(store: Store, records: Records, lease_s: float, waits: Waits) -> None:
    """Take back expired leases and delete the records that no rollout needs any more, until the broker stops."""
    sweeper = Sweeper(store, lease_s, asyncio.get_running_loop().time)
    while not waits.ended:
        await asyncio.sleep(sweeper.period_s)
        try:
            num_lost = await sweeper.sweep()
            await records.delete_garbage()
        except BrokerUnavailable as error:
            log.warning("sweep put off", extra={"reason": str(error)})
            continue
        if num_lost:
            log.info("leases taken back", extra={"leases": num_lost})


METRICS_PERIOD_S = 1.0


async def serve(config: Config) -> None:
    """Run the broker of `config.run` until SIGTERM or SIGINT; of an external plan, that of one stage after the other.

    Without broker.redis_url and redis_url_file it starts a Redis in the run folder, or uses the one that a killed
    broker left running there. Raises ProblemFileError, RedisServerError, Unusable,
    AddressError, and Unusable when Redis holds another run of this name.
    """
    keep_freed_buffers()
    stop = stop_event()
    url = configured_url(config.broker)
    async with AsyncExitStack() as stack:
        if not url:
            server = await asyncio.to_thread(start_redis, config.run.folder / "redis")
            stack.callback(server.close)
            url = server.url
        if not (config.plan.stages and config.asked_run):
            await _serve_run(config, url, stop)
            return
        stages = Stages(config, url)
        stack.push_async_callback(stages.close)
        looked_up = Retry("the stage of the plan", (BrokerUnavailable,), for_s=config.run.peer_patience_s)
        while not stop.is_set():
            await _serve_run(await looked_up.call(stages.current), url, stop, stages)


async def _serve_run(config: Config, url: str, stop: asyncio.Event, stages: Stages | None = None) -> None:
    """Serve one run until `stop` is set, or another stage was chosen."""
    problems = await asyncio.to_thread(open_index, config)
    ended = asyncio.Event()
    async with AsyncExitStack() as stack:
        stack.callback(problems.close)
        broker = Broker(config, url, problems, stages)
        try:
            await broker.check_state()
        except Refused as error:
            raise Unusable(str(error)) from error
        address = await serve_broker(broker, config, ended, stack)
        log.info(
            "broker ready", extra={"address": address, "redis": broker.store.url, "problems": len(problems.problem_ids)}
        )
        reasons = [stop, ended] if stages is None else [stop, ended, stages.another]
        waits = [asyncio.ensure_future(reason.wait()) for reason in reasons]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if ended.is_set():
            stop.set()  # the broker's own work has ended
        for wait in waits:
            wait.cancel()


async def serve_broker(broker: Broker, config: Config, stop: asyncio.Event, stack: AsyncExitStack) -> str:
    """Serve `broker` until `stack` is closed; returns the address in use. Raises AddressError."""
    registry = CollectorRegistry()
    collector = BrokerCollector()
    registry.register(collector)
    served = Served(
        address=config.broker.grpc,
        metrics_address=config.broker.metrics,
        full_names=[FULL_NAME],
        register=lambda server: add_to_server(broker, server),
        registry=registry,
        credentials=server_credentials(config.tls),
        status_codes=STATUS_CODES,
        health=Health(config.broker.grpc_health),
        certificates=(config.tls.certificate,),
        run=config.asked_run,
    )
    stack.push_async_callback(broker.store.close)
    address = await start_grpc(served, stack)
    workers = asyncio.ensure_future(
        run_until_stopped(
            stop,
            keep_sweeping(broker.store, broker.records, config.broker.lease_s, broker.waits),
            broker.memory.keep_watching(broker.waits),
            _refresh_metrics(broker, collector),
        )
    )

    workers.add_done_callback(lambda _: stop.set())

    async def end_waits() -> None:
        # Before the drain: otherwise it would wait for callers that wait for work.
        broker.waits.end()
        stop.set()
        await workers

    stack.push_async_callback(end_waits)
    return address


async def _refresh_metrics(broker: Broker, collector: BrokerCollector) -> None:
    while not broker.waits.ended:
        try:
            collector.redis_memory_ratio = broker.memory.pressure.share
            collector.oldest_s = await read_oldest_s(broker.store)
            collector.latest = await broker.status()
        except BrokerError as error:
            collector.latest = None
            log.warning("no status for the metrics", extra={"reason": str(error)})
        else:
            if not collector.latest.ledger.balanced:
                log.error("the ledger does not balance", extra={"ledger": str(collector.latest.ledger)})
        await asyncio.sleep(METRICS_PERIOD_S)
