"""One gateway process of several: its share of slots and bounds, its connections, quotas and view of other runs.

The parent starts `python -m nouscoder.verifier.processes.share DESCRIPTOR`, with a pickled Order as stdin.

INVARIANT: the shares of a bound never add up to more than the bound, and the shares of the slots add up to all of them.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import socket
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from nouscoder.config import Config, ConfigError, VerifierSection
from nouscoder.errors import Unusable, for_terminal
from nouscoder.http_server.listener import WebSockets, http_context, start_taking
from nouscoder.logs import configure_logs
from nouscoder.rpc.metrics_page import serve_on_socket
from nouscoder.verifier.access.quotas import Quotas
from nouscoder.verifier.grading.time_limits import ExclusiveRunLock
from nouscoder.verifier.processes.connections import Arrivals
from nouscoder.verifier.processes.merged_metrics import SocketMetrics
from nouscoder.verifier.processes.shared_ledger import SharedLedger
from nouscoder.verifier.processes.shared_runs import SharedRuns

# The shares of slots and bounds. Pure.

_LEAST_CACHE_BYTES = 1024**2


@dataclass(frozen=True, slots=True)
class ProcessNumber:
    """Process `index` of `number`. `folder` holds what the processes of a service share."""

    index: int
    number: int
    folder: Path

    @property
    def metrics(self) -> Path:
        """The socket of this process's own metrics."""
        return self.folder / f"metrics-{self.index}"

    @property
    def merged_metrics(self) -> Path:
        """The socket of the metrics of all processes together."""
        return self.folder / "metrics"


def slots_of(index: int, number: int, num_slots: int) -> int:
    """The slots of process `index`. Raises ConfigError when there are fewer slots than processes."""
    if num_slots < number:
        raise ConfigError(
            f"verifier.processes: {number} processes need as many slots, and verifier.sandbox.slots gives {num_slots}"
        )
    return num_slots // number + (index < num_slots % number)


def section_of(section: VerifierSection, place: ProcessNumber, num_slots: int, grpc: str) -> VerifierSection:
    """The configuration of one process. It listens on the service's address `grpc` and on no other."""
    number = place.number
    sandbox = {
        "slots": slots_of(place.index, number, num_slots),
        "compile_cache_bytes": section.sandbox.compile_cache_bytes // number,
    }
    tests = {"cache_bytes": max(_LEAST_CACHE_BYTES, section.tests.cache_bytes // number)}
    of_process = {
        "processes": 1,
        "grpc": grpc,
        "http": "",
        "metrics": "",
        "health": "",
        "grpc_health": "",
        "max_queue": section.max_queue // number,
        "max_bodies_bytes": section.max_bodies_bytes // number,
        "cache_entries": section.cache_entries // number,
        "sandbox": section.sandbox.model_copy(update=sandbox),
        "tests": section.tests.model_copy(update=tests),
    }
    return section.model_copy(update=of_process)


class Share:
    """One process's part. Use inside the running loop."""

    def __init__(self, place: ProcessNumber, channel: socket.socket, stop: asyncio.Event) -> None:
        """`channel` is the socket to the parent; its end sets `stop`, as SIGTERM does."""
        self.num_processes = place.number
        self._place = place
        self._arrivals = Arrivals(channel, stop.set)
        ledger = SharedLedger(place.folder / "quotas", place.index, place.number)
        runs = SharedRuns(place.folder / "runs", place.index, place.number)
        self.quotas = Quotas(ledger=ledger)
        self.run_lock = ExclusiveRunLock(others=runs)
        self.page = CollectorRegistry()  # the metrics of all processes
        self.page.register(SocketMetrics(place.merged_metrics))

    def serve_metrics(self, registry: CollectorRegistry, stack: AsyncExitStack) -> None:
        """Let the parent read the metrics of this process."""
        serve_on_socket(registry, self._place.metrics, stack)

    async def start(
        self, app: FastAPI, section: VerifierSection, stack: AsyncExitStack, websocket: WebSockets | None
    ) -> None:
        """Serve the connections that the parent gives to this process."""
        self._arrivals.take = await start_taking(app, stack, http_context(section.tls), websocket)

    def ready(self) -> None:
        """Tell the parent that this process takes calls."""
        self._arrivals.say_ready()


# The process.


@dataclass(frozen=True, slots=True)
class Order:
    """What a process does. `config` has its share of slots and bounds."""

    config: Config
    with_broker: bool
    place: ProcessNumber


def main() -> int:
    """Serve until SIGTERM or the end of the parent. Returns the exit code."""
    order: Order = pickle.load(sys.stdin.buffer)
    channel = socket.socket(fileno=int(sys.argv[1]))
    configure_logs("verifier")
    import uvloop

    from nouscoder.verifier.process import serve

    parent = os.getppid()
    try:
        uvloop.run(serve(order.config, order.with_broker, order.place, channel))
    except Unusable as error:
        sys.stderr.write(for_terminal(f"nouscoder: {error}\n"))
        return error.exit_code
    finally:
        if os.getppid() != parent:  # it was killed, and could not remove what all have shared
            shutil.rmtree(order.place.folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
