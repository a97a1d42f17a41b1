"""Copies the bytes between an encrypted connection and a harness, both ways, in one thread.

INVARIANT: never blocks on one direction while the other could move, and holds at most `_CHUNK_BYTES` of each. One
thread does both, because OpenSSL allows no two in one connection.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from collections.abc import Callable

_CHUNK_BYTES = 1 << 16
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR
_NOT_NOW = (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError)


class Relay:
    """Between a gateway and the socket that is stdin and stdout of a harness."""

    def __init__(self, gateway: ssl.SSLSocket, harness: socket.socket) -> None:
        self._gateway, self._harness = gateway, harness
        self._inward = self._outward = memoryview(b"")
        self._harness_open = True
        for end in (gateway, harness):
            end.setblocking(False)
        self._poll = select.poll()

    def run(self, is_closed: Callable[[], bool], has_ended: Callable[[], bool], interval_ms: int) -> None:
        """Copy until the gateway's end `is_closed`, or the harness `has_ended` and all that it wrote has been sent.

        Both are asked every `interval_ms` milliseconds while nothing moves. Raises OSError.
        """
        while True:
            events = self._wait(interval_ms)
            at_gateway, at_harness = events.get(self._gateway.fileno(), 0), events.get(self._harness.fileno(), 0)
            if at_gateway & _GONE:
                return
            moved = (at_gateway & select.POLLIN or self._gateway.pending()) and not self._inward and self._receive()
            if self._harness_open and at_harness and not self._outward:
                moved = self._read() or moved
            moved = self._push() or moved
            if not moved and (is_closed() or self._is_finished(has_ended)):
                return

    def _is_finished(self, has_ended: Callable[[], bool]) -> bool:
        return has_ended() and not self._outward and not (self._harness_open and self._read())

    def _wait(self, interval_ms: int) -> dict[int, int]:
        more = select.POLLIN if not self._inward else 0
        self._poll.register(self._gateway, _GONE | more | (select.POLLOUT if self._outward else 0))
        self._watch_harness((0 if self._outward else select.POLLIN) | (select.POLLOUT if self._inward else 0))
        is_pending = not self._inward and self._gateway.pending()
        return dict(self._poll.poll(0 if is_pending else interval_ms))

    def _watch_harness(self, events: int) -> None:
        """Without events it is not watched, because poll would report its end again and again."""
        if self._harness_open and events:
            self._poll.register(self._harness, events)
        else:
            with contextlib.suppress(KeyError):
                self._poll.unregister(self._harness)

    def _receive(self) -> bool:
        """Raises ConnectionResetError at the end of the stream."""
        try:
            data = self._gateway.recv(_CHUNK_BYTES)
        except _NOT_NOW:
            return False
        if not data:
            raise ConnectionResetError("the gateway has closed the stream")
        self._inward = memoryview(data)
        return True

    def _read(self) -> bool:
        try:
            data = self._harness.recv(_CHUNK_BYTES)
        except _NOT_NOW:
            return False
        except OSError:
            data = b""
        if not data:
            self._end_of_harness()
            return False
        self._outward = memoryview(data)
        return True

    def _push(self) -> bool:
        """Write what is held. Returns whether anything moved."""
        before = len(self._inward) + len(self._outward)
        try:
            while self._inward:
                self._inward = self._inward[self._harness.send(self._inward) :]
        except _NOT_NOW:
            pass
        except OSError:
            self._end_of_harness()
        try:
            while self._outward:
                self._outward = self._outward[self._gateway.send(self._outward) :]
        except _NOT_NOW:
            pass
        return len(self._inward) + len(self._outward) < before

    def _end_of_harness(self) -> None:
        """Nobody reads or writes the harness's stream any more. What it wrote may still have to be sent."""
        self._harness_open, self._inward = False, memoryview(b"")
