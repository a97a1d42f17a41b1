"""What a gateway process of several has in place of a service's own: connections, quotas and the view of other runs."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from nouscoder.config import VerifierSection
from nouscoder.http_server.listener import start_taking
from nouscoder.http_server.tls import http_context
from nouscoder.verifier.access.quotas import Quotas
from nouscoder.verifier.grading.time_limits import ExclusiveRunLock
from nouscoder.verifier.processes.connections import Arrivals
from nouscoder.verifier.processes.merged_metrics import SocketMetrics, serve_on_socket
from nouscoder.verifier.processes.shared_ledger import SharedLedger
from nouscoder.verifier.processes.shared_runs import SharedRuns
from nouscoder.verifier.processes.shares import Place


class Share:
    """One process's part. Use inside the running loop."""

    def __init__(self, place: Place, channel: socket.socket, stop: asyncio.Event) -> None:
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

    async def start(self, app: FastAPI, section: VerifierSection, stack: AsyncExitStack) -> None:
        """Serve the connections that the parent gives to this process."""
        self._arrivals.take = await start_taking(app, stack, http_context(section.tls))

    def ready(self) -> None:
        """Tell the parent that this process takes calls."""
        self._arrivals.say_ready()
