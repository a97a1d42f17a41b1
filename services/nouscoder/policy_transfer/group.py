"""The group of processes of one transfer: rank 0 has the bytes, the others receive them: gloo, NCCL or common memory.

The processes meet at a TCPStore of rank 0 (the rendezvous). A group lives for one transfer, so a process that dies
costs only that one. The transports differ in the group and the device alone.

INVARIANT: no call lasts longer than `RENDEZVOUS_LIMIT_S` or `SILENCE_LIMIT_S`, also when another process of the group
is dead or hangs; it then raises TransferError. The exception is the start of NCCL, which has no limit of its own: it
begins when all processes have come.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
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
from nouscoder.policy_transfer.shared_memory import SharedMemoryGroup

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
        ...

    def close(self) -> None:
        """Close the connections. The others notice it at once if they still wait for a piece."""
        ...


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
    try:
        return TCPStore(
            rendezvous.host,
            rendezvous.port,
            rendezvous.num_ranks,
            is_master=False,
            timeout=limit,
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise TransferError(f"nobody is at {rendezvous.host}:{rendezvous.port}: {_reason(error)}") from error


def open_group(rendezvous: Rendezvous, store: Store, rank: int, device: torch.device) -> TransferGroup:
    """Wait for all ranks, then connect them. `device` is the GPU for NCCL. Raises TransferError."""
    try:
        store.set(f"here/{rank}", "1")
        store.wait([f"here/{each}" for each in range(rendezvous.num_ranks)], timedelta(seconds=RENDEZVOUS_LIMIT_S))
        if rendezvous.transfer is WeightTransfer.NCCL:
            return NcclGroup(store, rank, rendezvous.num_ranks, device)
        if rendezvous.transfer is WeightTransfer.IPC:
            return IpcGroup(store, rank, rendezvous.num_ranks, device)
        return GlooGroup(store, rank, rendezvous.num_ranks)
    except RuntimeError as error:
        raise TransferError(f"not all of the {rendezvous.num_ranks} processes came: {_reason(error)}") from error


class GlooGroup:
    """CPU to CPU over TCP."""

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        """Raises RuntimeError."""
        self._group: Any = ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=SILENCE_LIMIT_S))

    def broadcast(self, piece: Tensor) -> None:
        """As Group.broadcast."""
        try:
            self._group.broadcast([piece], _from_rank_0()).wait()
        except RuntimeError as error:
            raise TransferError(f"the connection failed: {_reason(error)}") from error

    def close(self) -> None:
        """As Group.close: gloo closes with the last reference."""
        self._group = None


class IpcGroup:
    """From process to process of one machine, through memory that they share (shared_memory.py)."""

    def __init__(self, store: Store, rank: int, num_ranks: int, device: torch.device) -> None:
        """Raises RuntimeError when a process does not come, TransferError when it cannot map the memory."""
        try:
            self._group = SharedMemoryGroup(store, rank, num_ranks, device, PIECE_BYTES, SILENCE_LIMIT_S)
        except (OSError, ValueError, TypeError) as error:
            raise TransferError(f"this machine's memory cannot be shared: {_reason(error)}") from error

    def broadcast(self, piece: Tensor) -> None:
        """As Group.broadcast."""
        try:
            self._group.broadcast(piece)
        except RuntimeError as error:
            raise TransferError(f"the connection failed: {_reason(error)}") from error

    def close(self) -> None:
        """As Group.close."""
        with suppress(RuntimeError):  # the sender has left, and its store with it
            self._group.close()


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
        """As Group.broadcast."""
        part = self._buffer[: len(piece)]
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                if self._rank == 0:
                    part.copy_(piece)
                work = self._group.broadcast([part], _from_rank_0())
                self._wait(work)
                if self._rank != 0:
                    piece.copy_(part)
        except RuntimeError as error:
            raise TransferError(f"NCCL failed: {_reason(error)}") from error

    def close(self) -> None:
        """As Group.close. NCCL's kernels that still wait for another process end too."""
        self._group.abort()

    def _wait(self, work: Any) -> None:
        """Wait with a limit of our own: with NCCL's, its watchdog would end the process."""
        until = time.monotonic() + SILENCE_LIMIT_S
        while not work.is_completed():
            if time.monotonic() > until:
                raise TransferError(f"NCCL was silent for {SILENCE_LIMIT_S:.0f} s")
            time.sleep(_LOOK_AGAIN_S)
        work.wait()  # raises the error, if there is one


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
