"""Closes gRPC connections that send headers without end.

INVARIANT: while memory grows, a connection that no authenticated call came from keeps at most HEAD_BYTES of what it
sends for two looks.

gRPC obeys its limit of metadata only after the client has acknowledged the server's settings. Before that a block of
headers may have 16 MiB (`max_header_list_size`, which chttp2 reads from the acknowledged settings), so a connection
held 20 to 50 MiB, and every new one as much again. gRPC shows such a connection to nobody: no call begins. The kernel
knows it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

HEAD_BYTES = 128 * 1024  # TLS with the certificates of a client, HTTP/2's preface, and the first headers
_BYTES_RECEIVED_AT = 128  # tcpi_bytes_received of struct tcp_info, <linux/tcp.h>


class Connections:
    """The clients that authenticated calls came from, and the sockets of the others. Used by one event loop."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._known: set[str] = set()
        self.suspects: set[str] = set()  # at the last look

    @contextmanager
    def call(self, peer: str) -> Iterator[None]:
        """Around an authenticated call. `peer` is what gRPC says of the client."""
        self._calls[peer] += 1
        self._known.add(peer)
        try:
            yield
        finally:
            self._calls[peer] -= 1
            if not self._calls[peer]:
                del self._calls[peer]

    def close_unknown(self, port: int, is_full: bool) -> int:
        """Close the connections to `port` that sent more than HEAD_BYTES and no call, at this look and the one before.

        With `is_full` an earlier call does not count. Returns how many were closed.
        """
        spared = set(self._calls) if is_full else self._known
        over: set[str] = set()
        here: set[str] = set()
        closed = 0
        for connection in _connections(port):
            with connection:
                try:
                    peer = _peer(*connection.getpeername()[:2])
                    here.add(peer)
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED_AT + 8)
                    (received,) = struct.unpack_from("<Q", info, _BYTES_RECEIVED_AT)
                    if peer in spared or received <= HEAD_BYTES:
                        continue
                    over.add(peer)
                    if peer in self.suspects:
                        connection.shutdown(socket.SHUT_RDWR)
                        closed += 1
                except (OSError, struct.error):  # it has ended, or an old kernel counts no bytes
                    continue
        self.suspects = over
        self._known &= here | self._calls.keys()
        return closed


def _connections(port: int) -> Iterator[socket.socket]:
    """Copies of this process's TCP sockets with this port of ours. The caller closes them."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed meanwhile
        if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == port:
            yield one
        else:
            one.close()


def _peer(host: str, port: int) -> str:
    """The name that gRPC gives to this address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return f"ipv6:%5B{host}%5D:{port}"
    return f"ipv4:{address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else address}:{port}"
