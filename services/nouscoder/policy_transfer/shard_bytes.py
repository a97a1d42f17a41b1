"""The bytes of a safetensors file in memory: made from tensors without the file, and read as tensors without a copy.

    8 bytes     length of the header, little endian
    header      JSON: for each tensor its type, shape, and the place of its bytes after the header
    tensors     one after the other
Source: https://huggingface.co/docs/safetensors (format).

INVARIANT: the pieces of `ShardImage` together are the bytes of the file whose header it has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from nouscoder.policy_transfer.group import TransferError

_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # the limit of safetensors itself
_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
)


@dataclass(frozen=True, slots=True)
class _Place:
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


def _places(header: bytes) -> list[_Place]:
    """The tensors of a header, in the order of their bytes. Raises TransferError."""
    try:
        named = json.loads(header[_LENGTH_BYTES:])
        named.pop("__metadata__", None)
        places = [
            _Place(name, _DTYPES[about["dtype"]], tuple(about["shape"]), *about["data_offsets"])
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
