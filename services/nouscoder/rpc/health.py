"""The health of a service, as grpc.health.v1: on the port of the API, and for probes on a port that is never encrypted.

INVARIANT: "liveness" is SERVING from `start` to the drain; "readiness" and "" are SERVING while the API takes calls.
From the drain on all are NOT_SERVING, and the health port still answers until the service has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AsyncExitStack

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from nouscoder.rpc.addresses import AddressError, split_address

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_STOP_GRACE_S = 0.2


class Health:
    """The health of a service. Without an `address` it has no port of its own."""

    def __init__(self, address: str = "") -> None:
        self.bound = ""
        self._address = address
        self._checks = health.aio.HealthServicer()
        self._is_started = False

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve health checks on this server too."""
        health_pb2_grpc.add_HealthServicer_to_server(self._checks, server)

    async def start(self, stack: AsyncExitStack) -> None:
        """Report alive and not ready. Listen on its own port until `stack` is closed. A second call does nothing.

        Raises AddressError.
        """
        if self._is_started:
            return
        self._is_started = True
        await self._checks.set("liveness", _SERVING)
        for name in ("", "readiness"):
            await self._checks.set(name, _NOT_SERVING)
        if self._address:
            host, port = split_address(self._address)
            server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
            self.add_to(server)
            try:
                bound = server.add_insecure_port(self._address)
            except RuntimeError as error:
                raise AddressError(
                    f"cannot listen on {self._address} for health checks: the port is in use or not allowed"
                ) from error
            await server.start()
            stack.push_async_callback(server.stop, _STOP_GRACE_S)
            self.bound = f"{host}:{bound or port}"

    async def ready(self, full_names: Iterable[str]) -> None:
        """Report that the API takes calls."""
        for name in ("", "readiness", *full_names):
            await self._checks.set(name, _SERVING)

    async def drain(self) -> None:
        """Report that nothing is served any more."""
        await self._checks.enter_graceful_shutdown()
