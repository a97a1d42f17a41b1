"""The group of a transfer on one machine: all its processes map one buffer, and rank 0 writes each piece into it once.

The buffer is in the memory of a GPU (CUDA IPC), or in a file without a name that lives in memory (memfd_create). It has
two halves, so rank 0 writes a piece while the others still read the one before:

    there/N         rank 0 has written piece N into half N mod 2        in the store of the rendezvous
    read/N/RANK     this rank has a copy of it
Instead of "1" a process that leaves writes "left" there.

INVARIANT: rank 0 writes into a half only when every other rank has read what was in it. No process leaves a file
behind, however it ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

_OPENED = "opened"
_HERE, _LEFT = "1", "left"


class SharedBuffer:
    """A buffer that other processes of this machine can map, uint8 [num_bytes]; `handle` says how.

    They must map it before `close`. A process that has mapped it keeps it.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """On a GPU, or for any other device in the CPU's memory. Raises OSError, and RuntimeError of CUDA."""
        self._file: int | None = None
        if device.type == "cuda":
            self.data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            about = self.data.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
            self.handle = json.dumps([each.hex() if isinstance(each, bytes) else each for each in about])
            return
        self._file = os.memfd_create("nouscoder-transfer")
        try:
            os.posix_fallocate(self._file, 0, num_bytes)  # too little memory is an error here, and a signal later
            self.data = _mapped(os.getpid(), self._file, num_bytes)
        except BaseException:
            self.close()
            raise
        self.handle = json.dumps([os.getpid(), self._file, num_bytes])

    def close(self) -> None:
        """Let no further process map the file."""
        if self._file is not None:
            os.close(self._file)


def opened(handle: str, device: torch.device) -> Tensor:
    """The buffer that another process has shared. Raises RuntimeError, ValueError or TypeError."""
    about: list[Any] = json.loads(handle)
    if len(about) == 3:
        return _mapped(*map(int, about))
    if device.type != "cuda":
        raise ValueError(f"the sender shares the memory of a GPU, and this process uses {device}")
    # The other process may number the devices otherwise. Texts are bytes; see rebuild_cuda_tensor of torch.
    parts = [bytes.fromhex(each) if isinstance(each, str) else each for each in about[1:]]
    storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *parts)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _mapped(process: int, file: int, num_bytes: int) -> Tensor:
    return torch.from_file(f"/proc/{process}/fd/{file}", shared=True, size=num_bytes, dtype=torch.uint8)


class SharedMemoryGroup:
    """A TransferGroup (group.py) of processes of one machine. One thread uses it."""

    def __init__(
        self, store: Store, rank: int, num_ranks: int, device: torch.device, piece_bytes: int, limit_s: float
    ) -> None:
        """Wait until all ranks have mapped rank 0's buffer. Raises RuntimeError, OSError, ValueError or TypeError."""
        self._store, self._rank = store, rank
        self._others = range(1, num_ranks)
        self._limit = timedelta(seconds=limit_s)
        self._next = 0
        if rank == 0:
            shared = SharedBuffer(2 * piece_bytes, device)
            try:
                store.set("buffer", shared.handle)
                store.wait([f"{_OPENED}/{other}" for other in self._others], self._limit)
            finally:
                shared.close()
            self._halves: Sequence[Tensor] = shared.data.chunk(2)
        else:
            self._halves = opened(store.get("buffer").decode(), device).chunk(2)
            store.set(f"{_OPENED}/{rank}", _HERE)
        self._stream: Any = torch.cuda.Stream(self._halves[0].device) if self._halves[0].is_cuda else None  # type: ignore[no-untyped-call]

    def broadcast(self, piece: Tensor) -> None:
        """As TransferGroup.broadcast, but raises RuntimeError."""
        half, number = self._halves[self._next % 2][: len(piece)], self._next
        if self._rank == 0:
            if number >= 2:
                self._expect([f"read/{number - 2}/{other}" for other in self._others], "a receiver has left")
            self._copy(piece, half)
            self._store.set(f"there/{number}", _HERE)
        else:
            self._expect([f"there/{number}"], "the sender has left")
            self._copy(half, piece)
            self._store.set(f"read/{number}/{self._rank}", _HERE)
        self._next += 1

    def close(self) -> None:
        """As TransferGroup.close. Raises RuntimeError when the store is gone."""
        key = f"there/{self._next}" if self._rank == 0 else f"read/{self._next}/{self._rank}"
        self._store.set(key, _LEFT)
        self._halves = ()

    def _expect(self, keys: Sequence[str], otherwise: str) -> None:
        self._store.wait(list(keys), self._limit)
        if any(self._store.get(key).decode() != _HERE for key in keys):
            raise RuntimeError(otherwise)

    def _copy(self, source: Tensor, to: Tensor) -> None:
        """Copy, and wait until the bytes are there."""
        if self._stream is None:
            to.copy_(source)
            return
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            to.copy_(source)
        self._stream.synchronize()
