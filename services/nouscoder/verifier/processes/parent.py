"""The parent of several gateway processes: `nouscoder serve verifier` with `verifier.processes` over 1.

It accepts the connections of the REST API and gives each to a process. The processes listen for gRPC themselves, on one
address (SO_REUSEPORT). The parent serves the metrics of all, and the ports for health checks. It grades nothing.

INVARIANT: after the start, a process that ends is replaced, unless the service stops; the others do not notice. One
that hangs is killed, and so replaced. Every process ends with its parent, however that ends. On SIGTERM all drain, and
the parent ends after them.

INVARIANT: a process hangs when its event loop, which serves the requests, is silent. Only time in which the process
could have answered counts as silence. Time in which it waited for a CPU does not, because on a machine that is busy
with candidates that time has no limit. Nor does time in which the parent itself did not run. So these are silent: a
stopped process, one that waits for a lock or a file, and one that computes without an end, of which only the CPU time
counts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from nouscoder.config import Config
from nouscoder.http_server.listener import start_apart
from nouscoder.rpc.addresses import unix_address, unix_path
from nouscoder.rpc.health import Health
from nouscoder.rpc.metrics_page import serve_on_socket, start_metrics
from nouscoder.rpc.server import stop_event
from nouscoder.verifier.processes.connections import Channel, Distributor, address_of, bound_to
from nouscoder.verifier.processes.merged_metrics import MergedMetrics, SocketMetrics
from nouscoder.verifier.processes.share import Order, ProcessNumber, section_of
from nouscoder.verifier.processes.shared_ledger import SharedLedger
from nouscoder.verifier.processes.shared_runs import SharedRuns
from nouscoder.verifier.sandbox.cgroup import Groups

# Whether a process hangs.

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NS_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class SilenceLimit:
    """How long a process may be silent. The parent asks every `ask_period_s`."""

    ask_period_s: float = 5.0
    silence_limit_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Thread:
    """What the kernel says about a thread: whether it can run now, its CPU time, and how long it waited for a CPU."""

    is_runnable: bool
    cpu_s: float
    queued_s: float  # without a wait that has not ended


async def until_hung(asked: Channel, look: Callable[[], Thread | None], patience: SilenceLimit) -> None:
    """Ask a process until it has been silent for `patience.silence_limit_s`. `look` gives its `main_thread`."""
    silent_s = 0.0
    before = look()
    while silent_s < patience.silence_limit_s:
        num_answers = asked.num_answers
        asked.ask()
        await asyncio.sleep(patience.ask_period_s)
        now = look()
        silent_s += could_answer_s(before, now, patience.ask_period_s)
        if asked.num_answers != num_answers:
            silent_s = 0.0
        before = now


def could_answer_s(before: Thread | None, now: Thread | None, period_s: float) -> float:
    """The part of a period in which a thread could have answered. The whole period when nothing is known of it.

    A thread that can run now may have waited for a CPU since an unknown time, so only its CPU time counts.
    """
    if before is None or now is None:
        return period_s
    able_s = now.cpu_s - before.cpu_s if now.is_runnable else period_s - (now.queued_s - before.queued_s)
    return min(period_s, max(0.0, able_s))


def main_thread(pid: int) -> Thread | None:
    """The thread of a process that runs its event loop. None when the kernel does not tell, or it has ended.

    Without the statistics of the scheduler (`schedstat` has zeros or is absent) the waits for a CPU seem to be 0.
    """
    folder = Path(f"/proc/{pid}/task/{pid}")
    try:
        fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return Thread(fields[0] == "R", (int(fields[11]) + int(fields[12])) / _TICKS_PER_S, _queued_s(folder))


def _queued_s(folder: Path) -> float:
    try:
        return int((folder / "schedstat").read_text().split()[1]) / _NS_PER_S
    except (OSError, IndexError):
        return 0.0


log = logging.getLogger(__name__)

FULL_NAME = "nouscoder.v1.VerifierService"
_START_LIMIT_S = 300.0  # the first start may compile init
_STOP_GRACE_S = 30.0  # beyond drain_s, for sandboxes and sockets to close
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 30.0
_STABLE_S = 60.0  # a process that lived so long is replaced without a pause


class ProcessFailed(Exception):
    """A process ended before it took calls; it has said why. `code` is its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"a gateway process ended with {code} while it started")
        self.code = code


class Gateway:
    """One process and those that replace it."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.num_replaced = 0
        self.num_hung = 0
        self.channel: Channel | None = None
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process and wait until it takes calls. Raises ProcessFailed and TimeoutError."""
        self.channel = channel = Channel()
        self.process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "nouscoder.verifier.processes.share", str(channel.theirs.fileno())),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=(channel.theirs.fileno(),),
            start_new_session=True,  # Ctrl-C reaches only the parent, which then drains all
        )
        channel.theirs.close()
        assert process.stdin is not None
        with suppress(OSError):  # it has ended, which is seen below
            process.stdin.write(pickle.dumps(self.order))
            await process.stdin.drain()
            process.stdin.close()
        ended, ready = asyncio.ensure_future(process.wait()), asyncio.ensure_future(channel.ready.wait())
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                await asyncio.wait({ended, ready}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            ready.cancel()
        if not channel.is_ready:
            raise ProcessFailed(await process.wait())

    async def kill_when_hung(self, patience: SilenceLimit) -> None:
        """Kill the process if it hangs."""
        assert self.channel is not None
        assert self.process is not None
        pid = self.process.pid
        await until_hung(self.channel, lambda: main_thread(pid), patience)
        log.error("a gateway process hangs", extra={"pid": pid, "silent_s": patience.silence_limit_s})
        self.num_hung += 1
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if there is one."""
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def stop(self, limit_s: float) -> None:
        """End the process: SIGTERM, and SIGKILL after `limit_s`."""
        if self.process is not None:
            self.signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(limit_s):
                    await self.process.wait()
            except TimeoutError:
                log.error("a gateway process did not end in time", extra={"pid": self.process.pid})
                self.signal(signal.SIGKILL)
                await self.process.wait()
        if self.channel is not None:
            self.channel.close()


class Gateways:
    """All gateway processes of the service."""

    def __init__(self, gateways: list[Gateway], folder: Path, patience: SilenceLimit | None = None) -> None:
        """`patience` is with processes that hang."""
        number = len(gateways)
        self.all = gateways
        self._patience = patience or SilenceLimit()
        self._ledger = SharedLedger(folder / "quotas", 0, number)
        self._runs = SharedRuns(folder / "runs", 0, number)
        sources = {one.order.place.index: SocketMetrics(one.order.place.metrics) for one in gateways}
        self.metrics = MergedMetrics(sources, self._own_metrics)

    def _own_metrics(self) -> Iterator[Metric]:
        num_up, num_replaced = len(self.ready()), sum(one.num_replaced for one in self.all)
        num_hung = sum(one.num_hung for one in self.all)
        yield GaugeMetricFamily("nouscoder_verifier_processes", "Gateway processes that take calls", num_up)
        yield CounterMetricFamily(
            "nouscoder_verifier_processes_replaced", "Gateway processes that ended and were replaced", num_replaced
        )
        yield CounterMetricFamily("nouscoder_verifier_processes_hung", "Gateway processes killed as hung", num_hung)

    def ready(self) -> list[Channel]:
        """The channels of the processes that take calls."""
        return [one.channel for one in self.all if one.channel is not None and one.channel.is_ready]

    async def start(self) -> None:
        """Start the first process, then the others: what the first one compiles is there for them."""
        await self.all[0].start()
        async with asyncio.TaskGroup() as group:
            for one in self.all[1:]:
                group.create_task(one.start())

    async def keep(self, gateway: Gateway) -> None:
        """Replace the process each time it ends, until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            begun_s = time.monotonic()
            assert gateway.process is not None
            watch = asyncio.ensure_future(gateway.kill_when_hung(self._patience))
            try:
                code = await gateway.process.wait()
            finally:
                watch.cancel()
            log.error("a gateway process ended", extra={"pid": gateway.process.pid, "code": code})
            # Forget what the ended process had in progress.
            index = gateway.order.place.index
            if gateway.channel is not None:
                gateway.channel.close()
                gateway.channel = None
            self._ledger.clear(index)
            self._runs.clear(index)
            self.metrics.ended(index)
            pause_s = _FIRST_PAUSE_S if time.monotonic() - begun_s > _STABLE_S else min(2 * pause_s, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)
            gateway.num_replaced += 1
            try:
                await gateway.start()
            except (ProcessFailed, TimeoutError, OSError) as error:
                log.error("a gateway process did not start", extra={"detail": str(error)})
                gateway.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every process."""
        for one in self.all:
            one.signal(number)

    async def stop(self, limit_s: float) -> None:
        """End all processes."""
        await asyncio.gather(*(one.stop(limit_s) for one in self.all))


async def serve_many(config: Config, with_broker: bool = False) -> int:
    """Serve until SIGTERM. Returns the exit code: not 0 when a process could not start. Raises Unusable."""
    stop, section = stop_event(), config.verifier
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nouscoder-gateways-")))
        Groups()  # in version 2 all processes must be in a group below the one that the slots' groups are in
        http = bound_to(section.http) if section.http else None
        grpc = _grpc_address(section.grpc, stack)
        gateways = Gateways(_gateways(config, with_broker, folder, grpc), folder)
        limit_s = section.leave_s + section.drain_s + _STOP_GRACE_S
        stack.push_async_callback(gateways.stop, limit_s)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, gateways.signal, signal.SIGHUP)
        registry = CollectorRegistry()
        registry.register(gateways.metrics)
        serve_on_socket(registry, folder / "metrics", stack)
        code = await _start_all(gateways, stop)
        if code is not None:
            return code
        keepers = [asyncio.ensure_future(gateways.keep(one)) for one in gateways.all]
        for keeper in keepers:
            stack.callback(keeper.cancel)
        metrics = start_metrics(section.metrics, registry, stack)
        if http is not None:
            distributor = Distributor(http, gateways.ready)
            distributor.start()
            stack.callback(distributor.close)
        health = Health(section.grpc_health)
        say_draining = await _start_health(section.health, health, stack)
        said = {"grpc": grpc, "metrics": metrics, "processes": section.processes}
        log.info("listening", extra=said | ({} if http is None else {"http": address_of(section.http, http)}))
        log.info("serving", extra={"not_served": section.not_served(with_broker)})
        await stop.wait()
        for keeper in keepers:
            keeper.cancel()
        log.info("draining", extra={"processes": len(gateways.ready())})
        ending = asyncio.ensure_future(gateways.stop(limit_s))  # connections are passed on until all have ended
        await asyncio.sleep(section.leave_s)
        say_draining()
        await health.drain()
        await ending
    return 0


async def _start_all(gateways: Gateways, stop: asyncio.Event) -> int | None:
    """Start all processes. Returns the exit code of the service when it must not go on."""
    starting, waiting = asyncio.ensure_future(gateways.start()), asyncio.ensure_future(stop.wait())
    await asyncio.wait({starting, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if stop.is_set():
        starting.cancel()
        return 0
    error = starting.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is not None and not isinstance(error, ProcessFailed):
        raise error
    return None if error is None else error.code


def _grpc_address(address: str, stack: AsyncExitStack) -> str:
    """The address of all processes. A port is held, so that no other user's process can share it."""
    if unix_path(address) is not None:
        return address
    bound = bound_to(address, shared=True)
    stack.callback(bound.close)
    return address_of(address, bound)


def _gateways(config: Config, with_broker: bool, folder: Path, grpc: str) -> list[Gateway]:
    """Raises ConfigError when there are too few slots."""
    section = config.verifier
    num_slots = section.sandbox.slots or len(os.sched_getaffinity(0))
    gateways = []
    for index in range(section.processes):
        place = ProcessNumber(index, section.processes, folder)
        # Processes cannot share a unix socket: the first one takes the calls, and all of them grade the broker's work.
        is_taken = index > 0 and unix_path(grpc) is not None
        address = unix_address(folder / f"grpc-{index}") if is_taken else grpc
        own = config.model_copy(update={"verifier": section_of(section, place, num_slots, address)})
        gateways.append(Gateway(Order(own, with_broker, place)))
    return gateways


async def _start_health(address: str, health: Health, stack: AsyncExitStack) -> Callable[[], None]:
    """Serve the ports for health checks, which the parent answers for all. Returns what to call when it drains."""
    await health.start(stack)
    await health.ready([FULL_NAME])
    if not address:
        return lambda: None
    from nouscoder.verifier.api.rest import DrainState, make_health_app

    drain_state = DrainState()
    bound = await start_apart(make_health_app(drain_state), address, stack)
    log.info("listening", extra={"health": bound})
    return drain_state.start
