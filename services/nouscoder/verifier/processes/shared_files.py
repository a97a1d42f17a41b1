"""What all gateway processes of a machine share: the accounts of clients' quotas, and the runs in progress.

Both are files in memory that each process maps.

INVARIANT: an account is read and changed by one process at a time. What a client has in flight is the sum over all
living processes: each process writes only its own number and its own counts of runs, and its parent clears those of a
process that has ended. A process that holds the lock or closes the machine for others and is killed blocks nobody: the
kernel frees the lock, and a closing ends by itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nouscoder.verifier.access.quotas import Account, QuotaExceeded
from nouscoder.verifier.grading.time_limits import OtherProcesses

_DIGEST_BYTES = 16
_BUCKET = struct.Struct("=dd")  # what is left of the minute, and when it was refilled (NaN: never)
_COUNT = struct.Struct("=I")
MAX_CLIENTS = 16384


class SharedLedger:
    """Implements `QuotaLedger` for process `index` of `number`."""

    def __init__(self, file: Path, index: int, number: int) -> None:
        """Every process gives the same `file`, which is made if it is absent."""
        self._lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._counts = _DIGEST_BYTES + _BUCKET.size
        self._row_bytes = self._counts + _COUNT.size * number
        os.ftruncate(self._lock, MAX_CLIENTS * self._row_bytes)
        self._memory = mmap.mmap(self._lock, MAX_CLIENTS * self._row_bytes)
        self._index, self._number = index, number
        self._rows: dict[str, int] = {}  # where the row of a client begins

    @contextmanager
    def account(self, client: str) -> Iterator[Account]:
        """See `QuotaLedger`. Raises QuotaExceeded when more clients than MAX_CLIENTS have come."""
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # held for microseconds; the kernel frees that of a killed process
        try:
            row = self._row(client)
            counts = [_COUNT.unpack_from(self._memory, self._at(row, one))[0] for one in range(self._number)]
            left, refilled_s = _BUCKET.unpack_from(self._memory, row + _DIGEST_BYTES)
            account = Account(sum(counts), left, None if math.isnan(refilled_s) else refilled_s)
            yield account
            refilled_s = math.nan if account.refilled_s is None else account.refilled_s
            _BUCKET.pack_into(self._memory, row + _DIGEST_BYTES, account.left, refilled_s)
            own = max(0, counts[self._index] + account.in_flight - sum(counts))
            _COUNT.pack_into(self._memory, self._at(row, self._index), own)
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _at(self, row: int, index: int) -> int:
        return row + self._counts + _COUNT.size * index

    def _row(self, client: str) -> int:
        """Where the client's row begins; a new row if it has none."""
        if client not in self._rows:
            digest = hashlib.blake2b(client.encode("utf8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()
            for row in range(0, MAX_CLIENTS * self._row_bytes, self._row_bytes):
                found = self._memory[row : row + _DIGEST_BYTES]
                if found == bytes(_DIGEST_BYTES):
                    self._memory[row : row + _DIGEST_BYTES] = digest
                    _BUCKET.pack_into(self._memory, row + _DIGEST_BYTES, 0.0, math.nan)
                if found in (digest, bytes(_DIGEST_BYTES)):
                    self._rows[client] = row
                    break
            else:
                raise QuotaExceeded(60, f"this service has counted {MAX_CLIENTS} clients, and can count no more")
        return self._rows[client]

    def clear(self, index: int) -> None:
        """Forget what a process that has ended had in flight. Called by the parent."""
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            for row in range(0, MAX_CLIENTS * self._row_bytes, self._row_bytes):
                if self._memory[row : row + _DIGEST_BYTES] == bytes(_DIGEST_BYTES):
                    return
                _COUNT.pack_into(self._memory, self._at(row, index), 0)
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)


# The runs in progress.

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
