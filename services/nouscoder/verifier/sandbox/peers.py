"""The sockets by which the inits of two slots exchange the pipes of a dialogue (harness/init/direct_dialogue.c).

INVARIANT: no candidate has a descriptor of a socket, and the gateway reads and writes none. Both ends stay open in the
gateway, so that a slot that starts again gets the same end.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass


class DialogueSockets:
    """The socket pair of a slot and its partner slot, made when first needed."""

    def __init__(self) -> None:
        self._ends: tuple[socket.socket, socket.socket] | None = None

    def ends(self) -> tuple[DialogueEnd, DialogueEnd]:
        """For the slot, and for its partner slot."""
        return DialogueEnd(self, 0), DialogueEnd(self, 1)

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
class DialogueEnd:
    """One end."""

    sockets: DialogueSockets
    index: int

    def descriptor(self) -> int:
        """The descriptor. Raises OSError."""
        return self.sockets.descriptor(self.index)
