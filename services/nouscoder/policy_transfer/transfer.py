"""One transfer: rank 0 sends the bytes of a policy's shards, and the other ranks of its rendezvous receive them.

Both sides cut each shard into pieces of `PIECE_BYTES`, so that nothing but the sizes must be known beforehand. The
bytes are those of a safetensors file, made from tensors in memory and read as tensors without a copy:

    8 bytes     length of the header, little endian
    header      JSON: for each tensor its type, shape, and the place of its bytes after the header
    tensors     one after the other
Source: https://huggingface.co/docs/safetensors (format).

INVARIANT: the pieces of `ShardImage` together are the bytes of the file whose header it has. `receive_shards` and
`changed` return bytes only when all of them are there and have the SHA-256 of the manifest.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from nouscoder.domain.policy import Rendezvous, Shard
from nouscoder.policy_folder.delta import DeltaUnusable, change
from nouscoder.policy_transfer.group import (
    PIECE_BYTES,
    SILENCE_LIMIT_S,
    TransferError,
    join_rendezvous,
    open_group,
)

_CPU = torch.device("cpu")
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # the limit of safetensors itself
_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
)


@dataclass(frozen=True, slots=True)
class _TensorSpan:
    """Where a tensor lies in the bytes after the header: from `start` to `end`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ShardImage:
    """A shard's header, and its tensors in the order of the file, uint8 [bytes of the tensor] each."""

    header: bytes
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, file: Path, weights: Mapping[str, Tensor]) -> ShardImage:
        """The image of a file that was written from contiguous `weights` on the CPU. Reads only its header.

        Raises TransferError when the file cannot be read or holds other tensors.
        """
        try:
            with file.open("rb") as opened:
                length = opened.read(_LENGTH_BYTES)
                header = length + opened.read(_header_length(length))
        except OSError as error:
            raise TransferError(f"{file} cannot be read: {error.strerror}") from error
        places = _places(header)
        for place in places:
            tensor = weights.get(place.name)
            if tensor is None or (tensor.dtype, tuple(tensor.shape)) != (place.dtype, place.shape):
                raise TransferError(f"{file}: {place.name} in the file is not the one in memory")
        return cls(header, tuple(weights[place.name].reshape(-1).view(torch.uint8) for place in places))

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return len(self.header) + sum(len(tensor) for tensor in self.tensors)

    def pieces(self, buffer: Tensor) -> Iterator[Tensor]:
        """The bytes in pieces of the length of `buffer`, the last one shorter. Each lies in it until the next comes."""
        filled = 0
        for part in (torch.frombuffer(bytearray(self.header), dtype=torch.uint8), *self.tensors):
            start = 0
            while start < len(part):
                size = min(len(part) - start, len(buffer) - filled)
                buffer[filled : filled + size] = part[start : start + size]
                start += size
                filled += size
                if filled == len(buffer):
                    yield buffer
                    filled = 0
        if filled:
            yield buffer[:filled]


def tensors_of(data: Tensor) -> dict[str, Tensor]:
    """The tensors of a file by name, as views of its bytes, uint8 [size of the file]. Raises TransferError."""
    length = _header_length(_bytes_of(data[:_LENGTH_BYTES]))
    begin = _LENGTH_BYTES + length
    tensors = {}
    for place in _places(_bytes_of(data[:begin])):
        part = data[begin + place.start : begin + place.end]
        if len(part) != place.end - place.start:
            raise TransferError(f"{place.name} is cut off")
        try:
            tensors[place.name] = part.view(place.dtype).reshape(place.shape)
        except RuntimeError as error:
            raise TransferError(f"{place.name} has a wrong place or shape: {error}") from error
    return tensors


def _header_length(data: bytes) -> int:
    length = int.from_bytes(data, "little")
    if len(data) != _LENGTH_BYTES or length > _MOST_HEADER_BYTES:
        raise TransferError("the bytes are not those of a safetensors file")
    return length


def _places(header: bytes) -> list[_TensorSpan]:
    """The tensors of a header, in the order of their bytes. Raises TransferError."""
    try:
        named = json.loads(header[_LENGTH_BYTES:])
        named.pop("__metadata__", None)
        places = [
            _TensorSpan(name, _DTYPES[about["dtype"]], tuple(about["shape"]), *about["data_offsets"])
            for name, about in named.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TransferError(f"the header is not one of safetensors: {error!r}") from error
    places.sort(key=lambda place: (place.start, place.end))
    end = 0
    for place in places:
        if place.start != end or place.end - place.start != math.prod(place.shape) * place.dtype.itemsize:
            raise TransferError(f"{place.name} has a wrong place or shape")
        end = place.end
    return places


def _bytes_of(data: Tensor) -> bytes:
    return data.numpy().tobytes()


# Sending and receiving.


def send_shards(
    images: Iterable[ShardImage], rendezvous: Rendezvous, store: Store, limit_s: float, device: torch.device = _CPU
) -> None:
    """Send the images as rank 0, and wait until all others have them. Raises TransferError."""
    until = time.monotonic() + limit_s
    buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
    with closing(open_group(rendezvous, store, 0, device)) as group:
        for image in images:
            for piece in image.pieces(buffer):
                _check_time(until, limit_s)
                group.broadcast(piece)
        try:
            store.wait([f"done/{rank}" for rank in range(1, rendezvous.num_ranks)], timedelta(seconds=SILENCE_LIMIT_S))
        except RuntimeError as error:
            raise TransferError("a receiver did not say that it has the policy") from error


def receive_shards(
    shards: Sequence[Shard], rendezvous: Rendezvous, rank: int, limit_s: float, device: torch.device = _CPU
) -> list[Tensor]:
    """The bytes of the shards, uint8 [size of the shard] each, on the CPU. Raises TransferError."""
    until = time.monotonic() + limit_s
    store = join_rendezvous(rendezvous)
    received = []
    with closing(open_group(rendezvous, store, rank, device)) as group:
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
