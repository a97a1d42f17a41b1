"""The bytes of safetensors files as numpy has them: where each tensor lies, and whether all values are finite.

    8 bytes     length of the header, little endian
    header      JSON: for each tensor its type, shape, and the place of its bytes after the header
    tensors     one after the other
Source: https://huggingface.co/docs/safetensors (format).

A service checks policies in a thread beside its event loop. Each call of numpy or torch there gives Python's lock away
and, while the loop is busy, waits 5 ms to get it back (sys.getswitchinterval). So the values of a file are checked in
large pieces, whatever the number of its tensors.

INVARIANT: the check makes at most three calls for each `PIECE_BYTES` of a run, which is neighbouring tensors of one
type. None of them is for a single tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from nouscoder.policy_folder.weights_files import WeightsUnusable

PIECE_BYTES = 32 * 1024**2
LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # the limit of safetensors itself

Bytes = npt.NDArray[np.uint8]

# The word of a value of each type, and its exponent, whose bits are all set in values that are not finite (IEEE 754).
_EXPONENTS: Mapping[str, tuple[npt.DTypeLike, int]] = MappingProxyType(
    {
        "F64": (np.uint64, 0x7FF0_0000_0000_0000),
        "F32": (np.uint32, 0x7F80_0000),
        "BF16": (np.uint16, 0x7F80),
        "F16": (np.uint16, 0x7C00),
    }
)
# The bytes of a value of the types of masks and positions, which some policies store. All of their values are finite.
_OTHERS: Mapping[str, int] = MappingProxyType(
    {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8}
)


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """Where a tensor lies in the bytes after the header: from `start` to `end`. `dtype` is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def header_length(data: bytes) -> int:
    """The length of the header by the first bytes of a file. Raises WeightsUnusable."""
    length = int.from_bytes(data, "little")
    if len(data) != LENGTH_BYTES or length > _MOST_HEADER_BYTES:
        raise WeightsUnusable("the bytes are not those of a safetensors file")
    return length


def spans_of(header: bytes) -> tuple[TensorSpan, ...]:
    """The tensors of a header, given without its length, in the order of their bytes. Raises WeightsUnusable.

    Numbers of 8 bits with a point are refused.
    """
    try:
        named = json.loads(header)
        named.pop("__metadata__", None)
        spans = [
            TensorSpan(name, str(about["dtype"]), tuple(about["shape"]), *about["data_offsets"])
            for name, about in named.items()
        ]
        spans.sort(key=lambda span: (span.start, span.end))
        end = 0
        for span in spans:
            size = _OTHERS.get(span.dtype) or np.dtype(_EXPONENTS[span.dtype][0]).itemsize
            if span.start != end or span.end - span.start != math.prod(span.shape) * size:
                raise WeightsUnusable(f"{span.name} has a wrong place or shape")
            end = span.end
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsUnusable(f"the header is not one of weights: {error!r}") from error
    return tuple(spans)


def not_finite_in(spans: Sequence[TensorSpan], piece: Callable[[int, int], Bytes]) -> str | None:
    """The name of a tensor that holds a value that is not finite; None when there is none.

    `piece` gives the bytes after the header from one place to another, at most `PIECE_BYTES`.
    """
    scratch = _buffer(spans)
    for dtype, start, end in _runs(spans):
        word, exponent = _EXPONENTS[dtype]
        for at in range(start, end, PIECE_BYTES):
            words = piece(at, min(at + PIECE_BYTES, end)).view(word)
            exponents = np.bitwise_and(words, exponent, out=scratch[: words.nbytes].view(word))
            if exponents.max() == exponent:
                place = at + int(exponents.argmax()) * exponents.itemsize
                return next(span.name for span in spans if span.start <= place < span.end)
    return None


def not_finite_in_file(file: Path) -> str | None:
    """As `not_finite_in`, of a file. Reads all of it once. Raises WeightsUnusable when it cannot be read."""
    try:
        with file.open("rb", buffering=0) as opened:
            begin = LENGTH_BYTES + header_length(opened.read(LENGTH_BYTES))
            spans = spans_of(opened.read(begin - LENGTH_BYTES))
            buffer = _buffer(spans)

            def piece(start: int, end: int) -> Bytes:
                opened.seek(begin + start)
                if opened.readinto(buffer[: end - start].data) != end - start:
                    raise WeightsUnusable("it is cut off")
                return buffer[: end - start]

            return not_finite_in(spans, piece)
    except (OSError, WeightsUnusable) as error:
        raise WeightsUnusable(f"{file} holds no readable weights: {error}") from error


def _buffer(spans: Sequence[TensorSpan]) -> Bytes:
    return np.empty(min(PIECE_BYTES, max((span.end for span in spans), default=0)), np.uint8)


def _runs(spans: Sequence[TensorSpan]) -> Iterator[tuple[str, int, int]]:
    """The type, start and end of neighbouring tensors of one type with a point."""
    for dtype, same in groupby(spans, key=lambda span: span.dtype):
        run = list(same)
        if dtype in _EXPONENTS:
            yield dtype, run[0].start, run[-1].end
