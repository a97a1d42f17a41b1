"""What an exclusive run must know of the runs of other processes on its machine."""

from __future__ import annotations

from typing import Protocol


class Neighbours(Protocol):
    """The runs of other processes on this machine."""

    rest_until_s: float  # shared runs have the machine until then, by the clock of the lock

    @property
    def num_running(self) -> int:
        """Shared runs of other processes in progress."""
        ...

    @property
    def is_closed(self) -> bool:
        """Whether another process waits for its exclusive run, or begins it, so that no shared run may begin."""
        ...

    def entered(self) -> object:
        """Tell the others that a shared run of this process begins. Returns what `left` needs."""
        ...

    def left(self, mark: object) -> bool:
        """Tell the others that the run has ended. Returns whether another process had a run meanwhile."""
        ...

    def close(self, seconds: float) -> None:
        """Let no other process begin a shared run for so long, or until `open`."""
        ...

    def open(self) -> None:
        """Let others begin shared runs."""
        ...

    def try_turn(self) -> bool:
        """Take the right to an exclusive run, if no other process has it."""
        ...

    def give_turn(self) -> None:
        """Give that right back."""
        ...


class NoNeighbours:
    """See `Neighbours`: a process that has the machine for itself."""

    num_running = 0
    is_closed = False

    def __init__(self) -> None:
        self.rest_until_s = 0.0

    def entered(self) -> object:
        """See `Neighbours`."""
        return None

    def left(self, mark: object) -> bool:
        """See `Neighbours`."""
        return False

    def close(self, seconds: float) -> None:
        """See `Neighbours`."""

    def open(self) -> None:
        """See `Neighbours`."""

    def try_turn(self) -> bool:
        """See `Neighbours`."""
        return True

    def give_turn(self) -> None:
        """See `Neighbours`."""
