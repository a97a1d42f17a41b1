"""The group of processes of one transfer: rank 0 has the bytes, the others receive them: gloo, NCCL or common memory.

The processes meet at a TCPStore of rank 0 (the rendezvous). A group lives for one transfer, so a process that dies
costs only that one. The transports differ in the group and the device alone.

Common memory is for one machine: all processes map one buffer, and rank 0 writes each piece into it once. The buffer is
in the memory of a GPU (CUDA IPC), or in a file without a name that lives in memory (memfd_create). It has two halves,
so rank 0 writes a piece while the others still read the one before:

    there/N         rank 0 has written piece N into half N mod 2        in the store of the rendezvous
    read/N/RANK     this rank has a copy of it
Instead of "1" a process that leaves writes "left" there.

INVARIANT: rank 0 writes into a half only when every other rank has read what was in it. No process leaves a file
behind, however it ends.

INVARIANT: no call lasts longer than `RENDEZVOUS_LIMIT_S` or `SILENCE_LIMIT_S`, also when another process of the group
is dead or hangs; it then raises TransferError. The exception is the start of NCCL, which has no limit of its own: it
begins when all processes have come.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import BroadcastOptions, ProcessGroupGloo, Store

from nouscoder.domain.policy import Rendezvous, WeightTransfer
from nouscoder.errors import NousCoderError

RENDEZVOUS_LIMIT_S = 60.0
SILENCE_LIMIT_S = 60.0
PIECE_BYTES = 32 * 1024**2  # sent at once
_LOOK_AGAIN_S = 0.0005
_NCCL_WATCH = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")
_environment = threading.Lock()


class TransferError(NousCoderError):
    """A transfer failed. The message says why; the files of the policy are the way out."""


class TransferGroup(Protocol):
    """The processes of a transfer, seen from one of them."""

    def broadcast(self, piece: Tensor) -> None:
        """Send rank 0's `piece`, or receive it; uint8 [at most PIECE_BYTES] on the CPU. Raises TransferError."""

    def close(self) -> None:
        """Close the connections. The others notice it at once if they still wait for a piece."""


def open_rendezvous(host: str, num_ranks: int, transfer: WeightTransfer) -> tuple[Rendezvous, Store]:
    """Open a store at a free port of `host`, for rank 0. Raises TransferError."""
    try:
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            num_ranks,
            is_master=True,
            timeout=timedelta(seconds=RENDEZVOUS_LIMIT_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    except (OSError, RuntimeError) as error:
        raise TransferError(f"no transfer can start at {host}: {error}") from error
    return Rendezvous(host, port, num_ranks, transfer), store


def join_rendezvous(rendezvous: Rendezvous) -> Store:
    """The store of a rendezvous, for the other ranks. Raises TransferError."""
    limit = timedelta(seconds=RENDEZVOUS_LIMIT_S)
    place = (rendezvous.host, rendezvous.port, rendezvous.num_ranks)
    with _failing_as(f"nobody is at {rendezvous.host}:{rendezvous.port}"):
        return TCPStore(*place, is_master=False, timeout=limit, wait_for_workers=False)


def open_group(rendezvous: Rendezvous, store: Store, rank: int, device: torch.device) -> TransferGroup:
    """Wait for all ranks, then connect them. `device` is the GPU for NCCL. Raises TransferError."""
    with _failing_as(f"not all of the {rendezvous.num_ranks} processes came"):
        store.set(f"here/{rank}", "1")
        store.wait([f"here/{each}" for each in range(rendezvous.num_ranks)], timedelta(seconds=RENDEZVOUS_LIMIT_S))
        if rendezvous.transfer is WeightTransfer.NCCL:
            return NcclGroup(store, rank, rendezvous.num_ranks, device)
        if rendezvous.transfer is WeightTransfer.IPC:
            return IpcGroup(store, rank, rendezvous.num_ranks, device)
        return GlooGroup(store, rank, rendezvous.num_ranks)


@contextmanager
def _failing_as(what: str, kinds: tuple[type[Exception], ...] = (RuntimeError,)) -> Iterator[None]:
    """Raise errors of these kinds as TransferError."""
    try:
        yield
    except kinds as error:
        raise TransferError(f"{what}: {_reason(error)}") from error


class GlooGroup:
    """CPU to CPU over TCP."""

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        """Raises RuntimeError."""
        self._group: Any = ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=SILENCE_LIMIT_S))

    def broadcast(self, piece: Tensor) -> None:
        with _failing_as("the connection failed"):
            self._group.broadcast([piece], _from_rank_0()).wait()

    def close(self) -> None:
        """As TransferGroup.close: gloo closes with the last reference."""
        self._group = None


class NcclGroup:
    """GPU to GPU over NCCL, through one buffer of `PIECE_BYTES` on each GPU. One thread uses it."""

    def __init__(self, store: Store, rank: int, num_ranks: int, device: torch.device) -> None:
        """Raises RuntimeError."""
        self._rank = rank
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device)
        with _errors_are_raised():
            self._group: Any = dist.ProcessGroupNCCL(store, rank, num_ranks, dist.ProcessGroupNCCL.Options())

    def broadcast(self, piece: Tensor) -> None:
        part = self._buffer[: len(piece)]
        with _failing_as("NCCL failed"), torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if self._rank == 0:
                part.copy_(piece)
            # A limit of our own: with NCCL's, its watchdog would end the process.
            work = self._group.broadcast([part], _from_rank_0())
            until = time.monotonic() + SILENCE_LIMIT_S
            while not work.is_completed():
                if time.monotonic() > until:
                    raise TransferError(f"NCCL was silent for {SILENCE_LIMIT_S:.0f} s")
                time.sleep(_LOOK_AGAIN_S)
            work.wait()  # raises the error, if there is one
            if self._rank != 0:
                piece.copy_(part)

    def close(self) -> None:
        """As TransferGroup.close. NCCL's kernels that still wait for another process end too."""
        self._group.abort()


def missing_for(transfer: WeightTransfer) -> str:
    """What this process lacks to send or receive in this way, as a sentence; empty when it lacks nothing."""
    if transfer is WeightTransfer.NCCL:
        if not torch.cuda.is_available():
            return "nccl needs CUDA, and torch finds no GPU here"
        if not dist.is_nccl_available():
            return "nccl needs a torch that was built with NCCL"
    return ""


@contextmanager
def _errors_are_raised() -> Iterator[None]:
    """A group made in this context raises NCCL's errors. By default its watchdog ends the process instead."""
    with _environment:
        before = {name: os.environ.get(name) for name in _NCCL_WATCH}
        os.environ.update(dict.fromkeys(_NCCL_WATCH, "0"))
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _from_rank_0() -> Any:
    options = BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = timedelta(seconds=SILENCE_LIMIT_S)
    return options


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0]


class SharedBuffer:
    """A buffer, uint8 [num_bytes], that other processes of this machine map by its `handle` before `close`."""

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


_HERE, _LEFT = "1", "left"


class IpcGroup:
    """From process to process of one machine, through memory that they share, see the module. One thread uses it."""

    def __init__(self, store: Store, rank: int, num_ranks: int, device: torch.device) -> None:
        """Wait until all ranks have mapped rank 0's buffer.

        Raises RuntimeError when a process does not come, TransferError when it cannot map the memory.
        """
        self._store, self._rank = store, rank
        self._others = range(1, num_ranks)
        self._limit = timedelta(seconds=SILENCE_LIMIT_S)
        self._next = 0
        with _failing_as("this machine's memory cannot be shared", (OSError, ValueError, TypeError)):
            self._halves: Sequence[Tensor] = self._buffer(device).chunk(2)
        self._stream: Any = torch.cuda.Stream(self._halves[0].device) if self._halves[0].is_cuda else None  # type: ignore[no-untyped-call]

    def _buffer(self, device: torch.device) -> Tensor:
        if self._rank:
            data = opened(self._store.get("buffer").decode(), device)
            self._store.set(f"opened/{self._rank}", _HERE)
            return data
        shared = SharedBuffer(2 * PIECE_BYTES, device)
        try:
            self._store.set("buffer", shared.handle)
            self._store.wait([f"opened/{other}" for other in self._others], self._limit)
        finally:
            shared.close()
        return shared.data

    def broadcast(self, piece: Tensor) -> None:
        half, number = self._halves[self._next % 2][: len(piece)], self._next
        with _failing_as("the connection failed"):
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
        key = f"there/{self._next}" if self._rank == 0 else f"read/{self._next}/{self._rank}"
        with suppress(RuntimeError):  # the sender has left, and its store with it
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
