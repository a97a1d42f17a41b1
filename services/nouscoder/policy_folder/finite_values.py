"""Whether all values of stored tensors are finite.

A service checks policies in a thread beside its event loop. Each call of numpy or torch there gives Python's lock away
and, while the loop is busy, waits 5 ms to get it back (sys.getswitchinterval). So the values of a file are checked in
large pieces, whatever the number of its tensors.

INVARIANT: the check makes at most three calls for each `PIECE_BYTES` of a run, which is neighbouring tensors of one
type. None of them is for a single tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from nouscoder.policy_folder.weights_files import TensorSpan, WeightsUnusable, stored_tensors

PIECE_BYTES = 32 * 1024**2

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


def not_finite_in(spans: Sequence[TensorSpan], piece: Callable[[int, int], Bytes]) -> str | None:
    """The name of a tensor that holds a value that is not finite; None when there is none.

    `piece` gives the bytes between two places, at most `PIECE_BYTES`. Raises WeightsUnusable for a wrong type or shape.
    """
    for span in spans:
        word, _ = _EXPONENTS.get(span.dtype, (None, 0))
        size = _OTHERS.get(span.dtype, 0) if word is None else np.dtype(word).itemsize
        if not size or span.end - span.start != math.prod(span.shape) * size:
            raise WeightsUnusable(f"{span.name} has a wrong shape or a type that weights do not have: {span.dtype}")
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
    spans = tuple(stored_tensors(file).values())
    buffer = _buffer(spans)
    try:
        with file.open("rb", buffering=0) as opened:

            def piece(start: int, end: int) -> Bytes:
                opened.seek(start)
                if opened.readinto(buffer[: end - start].data) != end - start:
                    raise WeightsUnusable("it is cut off")
                return buffer[: end - start]

            return not_finite_in(spans, piece)
    except (OSError, WeightsUnusable) as error:
        raise WeightsUnusable(f"{file} holds no readable weights: {error}") from error


def _buffer(spans: Sequence[TensorSpan]) -> Bytes:
    num_bytes = spans[-1].end - spans[0].start if spans else 0
    return np.empty(min(PIECE_BYTES, num_bytes), np.uint8)


def _runs(spans: Sequence[TensorSpan]) -> Iterator[tuple[str, int, int]]:
    """The type, start and end of neighbouring tensors of one type with a point."""
    first = 0
    for number, (span, following) in enumerate(zip(spans, [*spans[1:], None], strict=True), start=1):
        if following is None or (following.dtype, following.start) != (span.dtype, span.end):
            if span.dtype in _EXPONENTS:
                yield span.dtype, spans[first].start, span.end
            first = number
