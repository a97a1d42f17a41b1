"""Addresses for services that a test starts."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_addresses(count: int) -> list[str]:
    """Addresses on this machine on which no process listened just before."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{free.getsockname()[1]}" for free in sockets]
