"""The pages of a run over HTTP: the live console, and a few files of the run's folder, for a browser.

| path | what |
|---|---|
| / | the console (console/), with its parts under /console/ |
| /events | the events of the run (console/feed.py); with ?run=NAME the curves of another run in the same root |
| /runs | the names of these other runs |
| /tokens/N | the rollouts of batch N whose tokens are recorded |
| /report.html and the other `FILES`, /rollouts.html | files of the folder; rollouts.html is made at each request |

INVARIANT: nothing else is served, each name is looked up unchanged, and nothing is written. No other file of the folder
(checkpoints, logs, problems) can be requested, and of another run only its curves and its evaluations. No password of a
URL is sent. A request that names a foreign site is refused.

INVARIANT: a reader that takes nothing for _SILENCE_LIMIT_S is dropped, and at most MOST_WATCHERS streams are open.

INVARIANT: the console loads nothing but its parts, and its script asks only its own server. The policy that comes with
it allows no inline script and no inline style. Text of a run is only ever set as text.

uPlot.iife.min.js and uPlot.min.css are the published files of uPlot 1.6.32, unchanged (MIT, uPlot.LICENSE).
"""

from __future__ import annotations

import functools
import json
import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import BinaryIO
from urllib.parse import parse_qs

from nouscoder.errors import without_secrets
from nouscoder.http_server.bounded_threads import BoundedThreads
from nouscoder.http_server.foreign_sites import foreign_part
from nouscoder.report.follow import position_of
from nouscoder.report.rollouts_page import batch_json, browser, rollouts_page
from nouscoder.report.untrained import FILE as UNTRAINED
from nouscoder.rpc.addresses import AddressError, socket_host, split_address
from nouscoder.run.console.events import runs_beside, stream
from nouscoder.run.console.feed import MOST_WATCHERS, Feed, TooManyWatch

ROLLOUTS = "rollouts.html"
FILES = {
    "report.html": "text/html; charset=utf-8",
    "summary.json": "application/json",
    UNTRAINED: "application/json",
    "metrics.jsonl": "application/x-ndjson",
    "samples.jsonl": "application/x-ndjson",
    "config.toml": "text/plain; charset=utf-8",
}
_SILENCE_LIMIT_S = 20.0
_RECORD = "config.toml"
_PIECE_BYTES = 1024**2
_UNSENT_BYTES = 256 * 1024
_TOKENS_OF_A_BATCH = 100_000
_HTML, _JSON = "text/html; charset=utf-8", "application/json"


_CONSOLE = "nouscoder.run.console"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
_SCRIPT, _STYLE = "text/javascript; charset=utf-8", "text/css; charset=utf-8"
# The style and the list of rollouts are those of the reports.
_OF_REPORTS = {"page.css": _STYLE, "rollouts.css": _STYLE, "page.js": _SCRIPT, "rollouts.js": _SCRIPT}
_OWN = {
    **{"console.css": _STYLE, "uPlot.min.css": _STYLE, "uPlot.iife.min.js": _SCRIPT},
    **{"console.js": _SCRIPT, "charts.js": _SCRIPT, "tables.js": _SCRIPT},
}
PARTS = {f"console/{name}": kind for name, kind in (_OF_REPORTS | _OWN).items()}


@functools.cache
def part(path: str) -> bytes:
    """One of `PARTS`."""
    name = path.removeprefix("console/")
    return files("nouscoder.report" if name in _OF_REPORTS else _CONSOLE).joinpath(name).read_bytes()


@functools.cache
def console_page() -> bytes:
    """The console, which is the same for every run."""
    frame = files(_CONSOLE).joinpath("console.html").read_text(encoding="utf8")
    return Template(frame).substitute(rollouts=browser()).encode("utf8")


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD, one request per connection."""

    folder: Path
    hosts: Collection[str]
    feed: Feed
    server: _Server
    timeout = _SILENCE_LIMIT_S
    server_version = "nouscoder"
    sys_version = ""

    def do_GET(self) -> None:
        """Send a page, a file or events."""
        self.server.heard(self.connection)
        path, _, query = self.path.partition("?")
        name = path.removeprefix("/")
        if (foreign := foreign_part(self.headers["Host"], self.headers["Origin"], self.hosts)) is not None:
            text = f"{foreign} names a foreign site: add its name to run.pages_hosts if it may show these pages\n"
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", text.encode())
        elif name == "events":
            self._send_events(parse_qs(query))
        elif name in FILES and name != _RECORD:
            try:
                with (self.folder / name).open("rb") as file:
                    self._send_file(FILES[name], file)
            except FileNotFoundError:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"this file comes later in the run\n")
        elif (made := self._made(name)) is not None:
            self._answer(HTTPStatus.OK, *made)
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is no such page\n")

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Log no requests."""

    def _made(self, name: str) -> tuple[str, bytes] | None:
        """The media type and the contents of what is made for the request, None for an unknown name."""
        kind, _, number = name.partition("/")
        if not name:
            return _HTML, console_page()
        if name in PARTS:
            return PARTS[name], part(name)
        if name == "runs":
            return _JSON, json.dumps([*runs_beside(self.folder)]).encode()
        if kind == "tokens" and number.isascii() and number.isdigit() and len(number) < 10:
            return _JSON, batch_json(self.folder, int(number), _TOKENS_OF_A_BATCH).encode()
        if name == ROLLOUTS:
            return _HTML, rollouts_page(self.folder).encode()
        record = self.folder / _RECORD
        if name == _RECORD and record.exists():
            return FILES[name], without_secrets(record.read_text(encoding="utf8")).encode()
        return None

    def _send_events(self, query: dict[str, list[str]]) -> None:
        """Server-sent events until the reader goes or takes nothing."""
        asked = query.get("run", [""])[0]
        folder = runs_beside(self.folder).get(asked) if asked else self.folder
        if folder is None:
            return self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is no such run beside this one\n")
        position = position_of(self.headers["Last-Event-ID"] or query.get("after", [""])[0])
        try:
            with self.feed.watched():
                self._head(HTTPStatus.OK, "text/event-stream", None)
                if self.command == "HEAD":
                    return None
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNSENT_BYTES)
                self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * _SILENCE_LIMIT_S))
                for event in stream(folder, position, self.feed, is_own=not asked):
                    self.wfile.write(event)
        except TooManyWatch:
            text = f"{MOST_WATCHERS} pages watch this run already: close one\n"
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", text.encode())
        return None

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

    def _head(self, status: HTTPStatus, kind: str, num_bytes: int | None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if num_bytes is not None:
            self.send_header("Content-Length", str(num_bytes))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        if self.path.partition("?")[0] == "/":
            self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Accel-Buffering", "no")  # a proxy passes events on at once
        self.send_header("Connection", "close")
        self.end_headers()


class _Server(BoundedThreads, HTTPServer):
    pass


class _IPv6Server(_Server):
    address_family = socket.AF_INET6


@contextmanager
def open_pages(folder: Path, address: str, hosts: Collection[str] = (), feed: Feed | None = None) -> Iterator[str]:
    """Serve the pages inside the context. Yields the actual address, "" when `address` is "". Raises AddressError.

    `hosts` are public host names of the pages. The console shows what `feed` is told.
    """
    if not address:
        yield ""
        return
    host, port = split_address(address)
    feed = feed or Feed()
    handler = type("Handler", (_Handler,), {"folder": folder, "hosts": hosts, "feed": feed})
    try:
        server = (_IPv6Server if ":" in host else _Server)((socket_host(host), port), handler)
    except OSError as error:
        raise AddressError(f"cannot listen on {address} for the run's pages: {error.strerror}") from error
    thread = threading.Thread(target=server.serve_forever, name="pages", daemon=True)
    thread.start()
    try:
        yield f"{host}:{server.server_address[1]}"
    finally:
        feed.closed.set()
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
