"""The pages of a run over HTTP: a few files of its folder, for a browser.

INVARIANT: only the names in `FILES` and ROLLOUTS are served, each looked up unchanged. Nothing is written, and no other
file of the folder (checkpoints, logs, problems) can be requested. ROLLOUTS is made from tokens/ at each request. No
password of a URL in config.toml is sent. A request that names a foreign site is refused.
"""

from __future__ import annotations

import html
import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import BinaryIO

from nouscoder.errors import without_secrets
from nouscoder.http_server.api_keys import foreign_part
from nouscoder.http_server.bounded_threads import BoundedThreads
from nouscoder.report.samples import rollouts_page
from nouscoder.rpc.server import AddressError, socket_host, split_address

ROLLOUTS = "rollouts.html"
FILES = {
    "report.html": "text/html; charset=utf-8",
    "summary.json": "application/json",
    "metrics.jsonl": "application/x-ndjson",
    "samples.jsonl": "application/x-ndjson",
    "config.toml": "text/plain; charset=utf-8",
}
_SILENCE_LIMIT_S = 20.0
_RECORD = "config.toml"
_PIECE_BYTES = 1024**2


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD, one request per connection."""

    folder: Path
    hosts: Collection[str]
    server: _Server
    timeout = _SILENCE_LIMIT_S
    server_version = "nouscoder"
    sys_version = ""

    def do_GET(self) -> None:
        """Send a file, or the page that lists the files."""
        self.server.heard(self.connection)
        name = self.path.partition("?")[0].removeprefix("/")
        if (foreign := foreign_part(self.headers["Host"], self.headers["Origin"], self.hosts)) is not None:
            text = f"{foreign} names a foreign site: add its name to run.pages_hosts if it may show these pages\n"
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", text.encode())
        elif not name:
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", _index(self.folder).encode())
        elif name == ROLLOUTS:
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", rollouts_page(self.folder).encode())
        elif name not in FILES:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is no such page\n")
        elif name == _RECORD and (self.folder / name).exists():
            record = (self.folder / name).read_text(encoding="utf8")
            self._answer(HTTPStatus.OK, FILES[name], without_secrets(record).encode())
        else:
            try:
                with (self.folder / name).open("rb") as file:
                    self._send_file(FILES[name], file)
            except FileNotFoundError:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"this file comes later in the run\n")

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Log no requests."""

    def _send_file(self, kind: str, file: BinaryIO) -> None:
        # The current size: a log that grows during the answer is cut there.
        num_bytes = file.seek(0, 2)
        file.seek(0)
        self._head(HTTPStatus.OK, kind, num_bytes)
        if self.command == "HEAD":
            return
        while num_bytes and (data := file.read(min(num_bytes, _PIECE_BYTES))):
            self.wfile.write(data)
            num_bytes -= len(data)

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self._head(status, kind, len(body))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: HTTPStatus, kind: str, num_bytes: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(num_bytes))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Connection", "close")
        self.end_headers()


def _index(folder: Path) -> str:
    lines = [
        f'<li><a href="{name}">{name}</a></li>' if (folder / name).exists() else f"<li>{name}: not there yet</li>"
        for name in FILES
    ]
    lines.append(f'<li><a href="{ROLLOUTS}">{ROLLOUTS}</a></li>')
    name = html.escape(folder.name)
    return f"<!doctype html><title>NousCoder run {name}</title><h1>Run {name}</h1><ul>{''.join(lines)}</ul>\n"


class _Server(BoundedThreads, HTTPServer):
    pass


class _IPv6Server(_Server):
    address_family = socket.AF_INET6


def _server_of(host: str) -> type[_Server]:
    return _IPv6Server if ":" in host else _Server


@contextmanager
def open_pages(folder: Path, address: str, hosts: Collection[str] = ()) -> Iterator[str]:
    """Serve the pages inside the context. Yields the actual address, "" when `address` is "". Raises AddressError.

    `hosts` are public host names of the pages.
    """
    if not address:
        yield ""
        return
    host, port = split_address(address)
    handler = type("Handler", (_Handler,), {"folder": folder, "hosts": hosts})
    try:
        server = _server_of(host)((socket_host(host), port), handler)
    except OSError as error:
        raise AddressError(f"cannot listen on {address} for the run's pages: {error.strerror}") from error
    thread = threading.Thread(target=server.serve_forever, name="pages", daemon=True)
    thread.start()
    try:
        yield f"{host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
