"""The sockets by which the inits of a pair's two slots exchange the pipes of a conversation (harness/init/converse.c).

INVARIANT: no candidate has a descriptor of a socket, and the gateway reads and writes none. Both ends stay open in the
gateway, so that a slot that starts again gets the same end.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass


class PeerSockets:
    """The socket pair of a slot and its partner slot, made when first needed."""

    def __init__(self) -> None:
        self._ends: tuple[socket.socket, socket.socket] | None = None

    def ends(self) -> tuple[PeerEnd, PeerEnd]:
        """For the slot, and for its partner slot."""
        return PeerEnd(self, 0), PeerEnd(self, 1)

    def descriptor(self, index: int) -> int:
        """The descriptor of one end. Raises OSError."""
        if self._ends is None:
            self._ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return self._ends[index].fileno()

    def close(self) -> None:
        """Close both ends in the gateway."""
        ends, self._ends = self._ends, None
        for end in ends or ():
            end.close()


@dataclass(frozen=True, slots=True)
class PeerEnd:
    """One end."""

    sockets: PeerSockets
    index: int

    def descriptor(self) -> int:
        """The descriptor. Raises OSError."""
        return self.sockets.descriptor(self.index)
