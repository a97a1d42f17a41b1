"""The frames that the gateway sends to one submission, some of which come while a run is still under way.

INVARIANT: `next` gives frames in the order in which they came; nothing is read beyond END, so that the stream can be
handed to the process of the next submission.
"""

from __future__ import annotations

from collections import deque

from . import frames
from .frames import Kind


class Inbox:
    """`fd` is for poll. The gateway sends one RUN ahead at most, so little ever waits here."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._early: deque[tuple[Kind, bytes]] = deque()

    def next(self) -> tuple[Kind, bytes]:
        """Block for the next frame. Raises StreamClosed."""
        return self._early.popleft() if self._early else frames.read_frame(self.fd)

    def keep_early(self) -> bool:
        """Keep a frame that is there for later; False when it is END, which is never kept. Raises StreamClosed."""
        frame = frames.read_frame(self.fd)
        if frame[0] is Kind.END:
            return False
        self._early.append(frame)
        return True
