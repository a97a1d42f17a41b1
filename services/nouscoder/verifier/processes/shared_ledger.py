"""The accounts of clients' quotas that all gateway processes of a machine share: a file in memory that each maps.

INVARIANT: an account is read and changed by one process at a time. What a client has in flight is the sum over all
living processes: each process writes only its own number, and its parent clears that of a process that has ended. A
process that holds the lock and is killed blocks nobody: the kernel frees the lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nouscoder.verifier.access.quotas import Account, QuotaExceeded

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
