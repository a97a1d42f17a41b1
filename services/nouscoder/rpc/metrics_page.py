"""The Prometheus page of a process: over HTTP, or as plain text on a unix socket (`nc -U PATH` shows it)."""

from __future__ import annotations

import socket
import socketserver
import threading
import urllib.request
from contextlib import AsyncExitStack
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest, start_http_server

from nouscoder.rpc.addresses import AddressError, socket_host, split_address, unix_path

_LIMIT_S = 5.0


def start_metrics(address: str, registry: CollectorRegistry, stack: AsyncExitStack) -> str:
    """Serve a page until `stack` closes. Returns the address in use: port 0 takes a free one. Raises AddressError."""
    path = unix_path(address)
    if path is not None:
        serve_on_socket(registry, path, stack)
        return address
    host, port = split_address(address)
    try:
        page, thread = start_http_server(port, addr=socket_host(host), registry=registry)
    except OSError as error:
        raise AddressError(f"cannot listen on {address} for metrics: {error.strerror}") from error

    def close() -> None:
        page.shutdown()
        page.server_close()
        thread.join(timeout=_LIMIT_S)

    stack.callback(close)
    return f"{host}:{page.server_port}"


def serve_on_socket(registry: CollectorRegistry, path: Path, stack: AsyncExitStack) -> None:
    """Serve the metrics of `registry` on a unix socket, in a thread, until `stack` closes. Raises AddressError."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(_LIMIT_S)
            self.request.sendall(generate_latest(registry))

    try:
        path.unlink(missing_ok=True)  # of a process with this name that was killed
        server = socketserver.ThreadingUnixStreamServer(str(path), Handler)
    except OSError as error:
        raise AddressError(f"cannot listen on {path} for metrics: {error.strerror or error}") from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(timeout=_LIMIT_S)

    stack.callback(close)


def read_metrics(address: str, limit_s: float = _LIMIT_S) -> str:
    """The text of the page at this address. Raises OSError and ValueError."""
    path = unix_path(address)
    if path is None:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=limit_s) as page:
            return str(page.read().decode("utf8"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(limit_s)
        connection.connect(str(path))
        return b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()
