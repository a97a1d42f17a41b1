"""One transfer: rank 0 sends the bytes of a policy's shards, and the other ranks of its rendezvous receive them.

Both sides cut each shard into pieces of `PIECE_BYTES`, so that nothing but the sizes must be known beforehand. The
bytes are those of a safetensors file (policy_folder/weights_files.py), made from tensors in memory and read as tensors
without a copy.

INVARIANT: the pieces of `ShardImage` together are the bytes of the file whose header it has. `receive_shards` and
`changed` return bytes only when all of them are there and have the SHA-256 of the manifest.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from nouscoder.domain.policy import Rendezvous, Shard
from nouscoder.policy_folder.delta import DeltaUnusable, change
from nouscoder.policy_folder.finite_values import not_finite_in
from nouscoder.policy_folder.weights_files import LENGTH_BYTES, WeightsUnusable, header_length, spans_of
from nouscoder.policy_transfer.group import PIECE_BYTES, SILENCE_LIMIT_S, TransferError, join_rendezvous, open_group

_CPU = torch.device("cpu")
_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
)


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
            with _as_transfer_errors(), file.open("rb") as opened:
                length = opened.read(LENGTH_BYTES)
                header = opened.read(header_length(length))
                spans = spans_of(header)
        except OSError as error:
            raise TransferError(f"{file} cannot be read: {error.strerror}") from error
        for span in spans:
            tensor = weights.get(span.name)
            if tensor is None or (tensor.dtype, tuple(tensor.shape)) != (_DTYPES.get(span.dtype), span.shape):
                raise TransferError(f"{file}: {span.name} in the file is not the one in memory")
        return cls(length + header, tuple(weights[span.name].reshape(-1).view(torch.uint8) for span in spans))

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
    """The tensors of a file by name, as views of its bytes. Raises TransferError, also for values not finite."""
    with _as_transfer_errors():
        begin = LENGTH_BYTES + header_length(_bytes_of(data[:LENGTH_BYTES]))
        spans = spans_of(_bytes_of(data[LENGTH_BYTES:begin]))
    tensors = {}
    for span in spans:
        part = data[begin + span.start : begin + span.end]
        if len(part) != span.end - span.start:
            raise TransferError(f"{span.name} is cut off")
        if span.dtype not in _DTYPES:
            raise TransferError(f"{span.name} is {span.dtype}, and the header is not one of weights")
        try:
            tensors[span.name] = part.view(_DTYPES[span.dtype]).reshape(span.shape)
        except RuntimeError as error:
            raise TransferError(f"{span.name} has a wrong place or shape: {error}") from error
    values = data.numpy()[begin:]
    if name := not_finite_in(spans, lambda start, end: values[start:end]):
        raise TransferError(f"{name} holds values that are not finite")
    return tensors


@contextmanager
def _as_transfer_errors() -> Iterator[None]:
    try:
        yield
    except WeightsUnusable as error:
        raise TransferError(str(error)) from error


def _bytes_of(data: Tensor) -> bytes:
    return data.numpy().tobytes()


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
