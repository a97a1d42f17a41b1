"""The Prometheus page of a process: over HTTP, or as plain text on a unix socket (`nc -U PATH` shows it)."""

from __future__ import annotations

import socket
import socketserver
import threading
import urllib.request
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app

from nouscoder.http_server.bounded_threads import BoundedThreads
from nouscoder.rpc.addresses import AddressError, socket_host, split_address, unix_path

_LIMIT_S = 5.0


class _Page(WSGIRequestHandler):
    server: _Server
    timeout = _LIMIT_S

    def get_environ(self) -> dict[str, Any]:
        """Called once the request has arrived."""
        self.server.heard(self.connection)
        return super().get_environ()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: each page is asked for every few seconds."""


class _Server(BoundedThreads, WSGIServer):
    pass


class _IPv6Server(_Server):
    address_family = socket.AF_INET6


class _UnixServer(BoundedThreads, socketserver.UnixStreamServer):
    pass


def start_metrics(address: str, registry: CollectorRegistry, stack: AsyncExitStack) -> str:
    """Serve a page until `stack` closes. Returns the address in use: port 0 takes a free one. Raises AddressError."""
    path = unix_path(address)
    if path is not None:
        serve_on_socket(registry, path, stack)
        return address
    host, port = split_address(address)
    try:
        page = (_IPv6Server if ":" in host else _Server)((socket_host(host), port), _Page)
    except OSError as error:
        raise AddressError(f"cannot listen on {address} for metrics: {error.strerror}") from error
    page.set_app(make_wsgi_app(registry))
    _serve(page, stack)
    return f"{host}:{page.server_port}"


def serve_on_socket(registry: CollectorRegistry, path: Path, stack: AsyncExitStack) -> None:
    """Serve the metrics of `registry` on a unix socket, in a thread, until `stack` closes. Raises AddressError."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(_LIMIT_S)
            self.request.sendall(generate_latest(registry))

    try:
        path.unlink(missing_ok=True)  # of a process with this name that was killed
        server = _UnixServer(str(path), Handler)
    except OSError as error:
        raise AddressError(f"cannot listen on {path} for metrics: {error.strerror or error}") from error
    _serve(server, stack)


def _serve(server: socketserver.BaseServer, stack: AsyncExitStack) -> None:
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
