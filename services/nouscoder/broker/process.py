"""The broker's process: its start, its gRPC server, and its background work."""

from __future__ import annotations

import asyncio
import ctypes
import logging
from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry

from nouscoder.broker.core import Broker
from nouscoder.broker.errors import BrokerError, BrokerUnavailable, Refused
from nouscoder.broker.metrics import BrokerCollector
from nouscoder.broker.redis_address import configured_url
from nouscoder.broker.redis_client import Stages
from nouscoder.broker.redis_server import start_redis
from nouscoder.broker.servicer import FULL_NAME, STATUS_CODES, add_to_server
from nouscoder.broker.streams import read_oldest_s
from nouscoder.broker.sweeper import keep_sweeping
from nouscoder.config import Config
from nouscoder.data.problem_index import open_index
from nouscoder.errors import Unusable
from nouscoder.retry import Retry
from nouscoder.rpc.health import Health
from nouscoder.rpc.server import Served, run_until_stopped, start_grpc, stop_event
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
