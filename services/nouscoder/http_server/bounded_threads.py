"""HTTP servers of the standard library with a thread a connection: the pages of a run, and pages of metrics.

INVARIANT: at most MOST_OPEN connections are open. One more ends the oldest that has asked for nothing yet, or else the
oldest, so clients that say nothing keep nobody out.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
from collections import OrderedDict
from contextlib import suppress
from typing import Any

log = logging.getLogger(__name__)

MOST_OPEN = 128


class BoundedThreads(socketserver.ThreadingMixIn):
    """For a server whose handlers call `heard` when a request has arrived. Stands before the server's class."""

    daemon_threads = True
    request_queue_size = MOST_OPEN

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._open: OrderedDict[socket.socket, bool] = OrderedDict()  # whether it has asked; the oldest is first
        self._lock = threading.Lock()
        super().__init__(*arguments, **options)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection, and end another one when there are too many."""
        connection, address = super().get_request()  # type: ignore[misc]
        with self._lock:
            self._open[connection] = False
            if len(self._open) > MOST_OPEN:
                oldest = next((one for one, has_asked in self._open.items() if not has_asked), next(iter(self._open)))
                del self._open[oldest]
                with suppress(OSError):  # it has ended already
                    oldest.shutdown(socket.SHUT_RDWR)
        return connection, address

    def heard(self, connection: socket.socket) -> None:
        """The connection has asked for a page."""
        with self._lock:
            if connection in self._open:
                self._open[connection] = True

    def shutdown_request(self, request: Any) -> None:
        """A connection has ended."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)  # type: ignore[misc]

    def handle_error(self, request: object, client_address: object) -> None:
        """Log a closed connection without a traceback."""
        log.info("a page was not sent to its end", exc_info=True)
