"""One transfer: rank 0 sends the bytes of a policy's shards, and the other ranks of its meeting receive them.

Both sides cut each shard into pieces of `PIECE_BYTES`, so that nothing but the sizes must be known beforehand.

INVARIANT: `receive_shards` and `changed` return bytes only when all of them are there and have the SHA-256 of the
manifest.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from nouscoder.domain.policy import Meeting, Shard
from nouscoder.policy_folder.delta import DeltaUnusable, change
from nouscoder.policy_transfer.group import (
    PIECE_BYTES,
    SILENCE_LIMIT_S,
    TransferError,
    join_meeting,
    open_group,
)
from nouscoder.policy_transfer.shard_bytes import ShardImage

_CPU = torch.device("cpu")


def send_shards(
    images: Iterable[ShardImage], meeting: Meeting, store: Store, limit_s: float, device: torch.device = _CPU
) -> None:
    """Send the images as rank 0, and wait until all others have them. Raises TransferError."""
    until = time.monotonic() + limit_s
    buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
    with closing(open_group(meeting, store, 0, device)) as group:
        for image in images:
            for piece in image.pieces(buffer):
                _check_time(until, limit_s)
                group.broadcast(piece)
        try:
            store.wait([f"done/{rank}" for rank in range(1, meeting.num_ranks)], timedelta(seconds=SILENCE_LIMIT_S))
        except RuntimeError as error:
            raise TransferError("a receiver did not say that it has the policy") from error


def receive_shards(
    shards: Sequence[Shard], meeting: Meeting, rank: int, limit_s: float, device: torch.device = _CPU
) -> list[Tensor]:
    """The bytes of the shards, uint8 [size of the shard] each, on the CPU. Raises TransferError."""
    until = time.monotonic() + limit_s
    store = join_meeting(meeting)
    received = []
    with closing(open_group(meeting, store, rank, device)) as group:
        for shard in shards:
            # Pinned memory goes to a GPU faster. torch keeps it for the next policy.
            data = torch.empty(shard.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
            for start in range(0, shard.num_bytes, PIECE_BYTES):
                _check_time(until, limit_s)
                group.broadcast(data[start : start + PIECE_BYTES])
            received.append(data)
        try:
            store.set(f"done/{rank}", "1")
        except RuntimeError as error:
            raise TransferError("the sender has left") from error
    for shard, data in zip(shards, received, strict=True):
        _check_digest(shard, data)
    return received


def changed(base: Tensor, delta: Tensor, shard: Shard) -> Tensor:
    """The bytes of a shard, uint8 [size of the shard], made from those of the shard before. Raises TransferError."""
    data = torch.empty(len(base), dtype=torch.uint8, pin_memory=base.is_pinned())
    data.copy_(base)
    try:
        change(data.numpy(), delta.numpy().tobytes(), shard.name)
    except DeltaUnusable as error:
        raise TransferError(str(error)) from error
    _check_digest(shard, data)
    return data


def _check_digest(shard: Shard, data: Tensor) -> None:
    sha256 = hashlib.sha256(data.numpy().data).hexdigest()
    if sha256 != shard.sha256:
        raise TransferError(f"{shard.name} arrived with the SHA-256 {sha256}, its manifest says {shard.sha256}")


def _check_time(until: float, limit_s: float) -> None:
    if time.monotonic() > until:
        raise TransferError(f"the transfer took longer than {limit_s:g} s")
