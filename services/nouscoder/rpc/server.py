"""How every service is served: gRPC with health and reflection, a Prometheus page, and a drain on SIGTERM.

INVARIANT: from the first SIGTERM on no new call is accepted, health says NOT_SERVING, and calls in progress have
`drain_s` seconds to end before they are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from nouscoder import __version__
from nouscoder.rpc.addresses import AddressError, refuse_taken, split_address, unix_path
from nouscoder.rpc.certificate_expiry import ExpiryCollector
from nouscoder.rpc.health import Health
from nouscoder.rpc.metrics_page import start_metrics
from nouscoder.rpc.status_codes import StatusCodes, StatusTable

log = logging.getLogger(__name__)


_REVISION = "NOUSCODER_REVISION"  # set by the images


class BuildCollector(Collector):
    """`nouscoder_build_info`, always 1; registers itself."""

    def __init__(self, registry: CollectorRegistry) -> None:
        revision = os.environ.get(_REVISION, "unknown")
        self._labels = {"version": __version__, "python": platform.python_version(), "revision": revision}
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The one sample."""
        yield InfoMetricFamily("nouscoder_build", "What this process runs", value=self._labels)


MAX_MESSAGE_BYTES = 64 * 1024**2
_OPTIONS = [
    ("grpc.max_concurrent_streams", 256),  # of a connection; clients let more wait
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Clients send a ping every few seconds (see channel.py). By default a server ends such connections.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    # A connection to a machine that is gone is closed after a minute at most.
    ("grpc.keepalive_time_ms", 30000),
    ("grpc.keepalive_timeout_ms", 20000),
    ("grpc.http2.ping_timeout_ms", 20000),
    ("grpc.http2.max_pings_without_data", 0),
    # Before a client has acknowledged the settings, none of the limits above holds for it.
    ("grpc.http2.settings_timeout", 5000),
    ("grpc.server_handshake_timeout_ms", 20000),  # until the settings of the client have come, with TLS
]
# A set of bits, whose first one is "not compressed".
UNCOMPRESSED_ONLY = ("grpc.compression_enabled_algorithms_bitset", 1)


@dataclass(frozen=True, slots=True)
class Served:
    """What to serve: `register` adds the servicers, `full_names` are their names for health and reflection.

    `status_codes` maps the errors of the service to gRPC status codes. `health` may be started before, so that the
    service is alive before it is ready. `certificates` are the files whose expiry the metrics show.
    """

    address: str
    metrics_address: str
    full_names: Sequence[str]
    register: Callable[[grpc.aio.Server], None]
    registry: CollectorRegistry
    drain_s: float = 10.0
    credentials: grpc.ServerCredentials | None = None
    interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
    status_codes: StatusTable = field(default_factory=dict)
    max_message_bytes: int = MAX_MESSAGE_BYTES  # of an incoming message
    max_calls: int | None = None  # at once; more are RESOURCE_EXHAUSTED
    run: str = ""  # that is served: clients that ask for another one are refused
    takes_compressed: bool = True  # whether compressed messages are read; else they are UNIMPLEMENTED
    health: Health = field(default_factory=Health)
    certificates: Sequence[str] = ()
    shares_address: bool = False  # with other processes; another one serves the metrics and says where all listen


def stop_event() -> asyncio.Event:
    """An event set by SIGTERM or SIGINT. Call inside the running loop."""
    event = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, event.set)
    return event


async def start_grpc(served: Served, stack: AsyncExitStack) -> str:
    """Start listening. Closing `stack` drains the server. Returns the address in use. Raises AddressError."""
    path = unix_path(served.address)
    if path is None:
        split_address(served.address)
    else:
        refuse_taken(path)
    reuse = ("grpc.so_reuseport", int(served.shares_address))
    options = [*_OPTIONS, reuse, ("grpc.max_receive_message_length", served.max_message_bytes)]
    if not served.takes_compressed:
        options.append(UNCOMPRESSED_ONLY)
    # The last interceptor is the innermost, so the others see the status code of an error.
    errors = StatusCodes(served.status_codes, served.full_names, served.run)
    interceptors = [*served.interceptors, errors]
    server = grpc.aio.server(options=options, interceptors=interceptors, maximum_concurrent_rpcs=served.max_calls)
    served.register(server)
    served.health.add_to(server)
    reflection.enable_server_reflection([*served.full_names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    try:
        bound = _bind(server, served)
    except RuntimeError as error:
        raise AddressError(f"cannot listen on {served.address}: the port is in use or not allowed") from error
    ProcessCollector(registry=served.registry)  # CPU, memory and open files of this process
    BuildCollector(served.registry)
    ExpiryCollector(served.registry, served.certificates)
    metrics_address = "" if served.shares_address else start_metrics(served.metrics_address, served.registry, stack)
    await served.health.start(stack)
    await server.start()
    await served.health.ready(served.full_names)

    async def drain() -> None:
        await served.health.drain()
        await server.stop(grace=served.drain_s)

    stack.push_async_callback(drain)
    address = _in_use(served.address, bound)
    if not served.shares_address:
        log.info("listening", extra={"grpc": address, "metrics": metrics_address})
    return address


def _in_use(address: str, bound: int) -> str:
    """The address with the port that was taken, if it has one."""
    if unix_path(address) is not None:
        return address
    host, port = split_address(address)
    return f"{host}:{bound or port}"


def _bind(server: grpc.aio.Server, served: Served) -> int:
    if served.credentials is None:
        return server.add_insecure_port(served.address)
    return server.add_secure_port(served.address, served.credentials)


async def run_until_stopped(stop: asyncio.Event, *workers: Awaitable[object]) -> None:
    """Run worker loops until `stop` is set or one of them ends, then cancel the rest. Raises a worker's exception."""
    tasks = [asyncio.ensure_future(worker) for worker in workers]
    waiter = asyncio.ensure_future(stop.wait())
    try:
        done, _ = await asyncio.wait({waiter, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {waiter}:
            task.result()
    finally:
        for task in (waiter, *tasks):
            task.cancel()
        await asyncio.gather(waiter, *tasks, return_exceptions=True)
