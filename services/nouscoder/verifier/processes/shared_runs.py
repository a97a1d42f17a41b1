"""The runs in progress on a machine, which all its gateway processes count: a file in memory that each maps.

INVARIANT: each process writes only its own counts, and its parent clears those of a process that has ended. A process
that closes the machine for others and is killed blocks nobody: the kernel frees the lock, and a closing ends by itself.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from pathlib import Path

from nouscoder.verifier.grading.time_limits import OtherProcesses

_OWNER, _UNTIL, _REST, _HEAD = 0, 1, 2, 8  # words of 8 bytes
_RUNNING, _BEGUN, _WORDS = 0, 1, 8  # of each process; a cache line, so that processes do not slow each other


class SharedRuns(OtherProcesses):
    """The other processes as process `index` of `number`. Times are those of time.monotonic, one for all."""

    def __init__(self, file: Path, index: int, number: int) -> None:
        """Every process gives the same `file`, which is made if it is absent."""
        self._turn = os.open(f"{file}.turn", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = 8 * (_HEAD + _WORDS * number)
        os.ftruncate(descriptor, size)
        memory = memoryview(mmap.mmap(descriptor, size))
        os.close(descriptor)
        self._words, self._times = memory.cast("Q"), memory.cast("d")
        self._index = index
        self._own = _HEAD + _WORDS * index
        self._others = [_HEAD + _WORDS * other for other in range(number) if other != index]

    @property
    def rest_until_s(self) -> float:
        return self._times[_REST]

    @rest_until_s.setter
    def rest_until_s(self, until_s: float) -> None:
        self._times[_REST] = until_s

    @property
    def num_running(self) -> int:
        return sum(self._words[at + _RUNNING] for at in self._others)

    @property
    def is_closed(self) -> bool:
        by_other = self._words[_OWNER] not in (0, 1 + self._index)
        return by_other and time.monotonic() < self._times[_UNTIL]

    def entered(self) -> object:
        self._words[self._own + _RUNNING] += 1
        self._words[self._own + _BEGUN] += 1
        return self._num_begun() if not self.num_running else -1

    def left(self, mark: object) -> bool:
        self._words[self._own + _RUNNING] -= 1
        return mark != self._num_begun()

    def _num_begun(self) -> int:
        return sum(self._words[at + _BEGUN] for at in self._others)

    def close(self, seconds: float) -> None:
        self._times[_UNTIL] = time.monotonic() + seconds
        self._words[_OWNER] = 1 + self._index

    def open(self) -> None:
        if self._words[_OWNER] == 1 + self._index:
            self._words[_OWNER] = 0

    def try_turn(self) -> bool:
        try:
            fcntl.flock(self._turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def give_turn(self) -> None:
        fcntl.flock(self._turn, fcntl.LOCK_UN)

    def clear(self, index: int) -> None:
        """Forget the runs of a process that has ended. Called by the parent."""
        self._words[_HEAD + _WORDS * index + _RUNNING] = 0
        if self._words[_OWNER] == 1 + index:
            self._words[_OWNER] = 0
