"""Files that strangers made, plain or compressed: read by their first bytes, and written by their name.

INVARIANT: what a file says of itself is not believed. In memory are at most MAX_LINE_BYTES of a line.
"""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TypeVar, cast

from nouscoder.formats.body import Body
from nouscoder.input_file import regular

AnyBody = TypeVar("AnyBody", bound=Body)

MAX_LINE_BYTES = 512 * 1024**2  # the largest rows of public data sets have about 150 MB

STDIN = Path("-")
_BUFFER_BYTES = 1024**2


class FileRefused(ValueError):
    """A file is damaged or goes beyond a limit. The message says what is wrong, and names a file inside a package."""


class FileTooLarge(FileRefused):
    """A file goes beyond a limit."""


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """The bytes of a file (`-`: stdin), decompressed, without UTF-8's mark. Raises OSError, also for a broken one."""
    import zstandard

    try:
        with ExitStack() as stack:
            file = sys.stdin.buffer if path == STDIN else stack.enter_context(regular(path).open("rb", _BUFFER_BYTES))
            head = cast("io.BufferedReader", file).peek(4)[:4]
            if head[:2] == b"\x1f\x8b":
                file = cast("IO[bytes]", stack.enter_context(gzip.open(file)))
            elif head == b"\x28\xb5\x2f\xfd":
                file = stack.enter_context(zstandard.open(file, "rb"))
            else:
                yield _without_mark(cast("io.BufferedReader", file))
                return
            yield _without_mark(io.BufferedReader(cast("io.RawIOBase", file), _BUFFER_BYTES))
    except (EOFError, zlib.error, zstandard.ZstdError) as error:
        raise OSError(f"it is not a complete compressed file: {error}") from error


def _without_mark(file: io.BufferedReader) -> io.BufferedReader:
    """The file after the mark of UTF-8 that some programs write first. Raises OSError for that of UTF-16 or UTF-32."""
    head = file.peek(len(BOM_UTF8))
    if head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise OSError("it is UTF-16 or UTF-32: save it as UTF-8")
    if head.startswith(BOM_UTF8):
        file.read(len(BOM_UTF8))
    return file


@contextmanager
def created(path: Path, name: str) -> Iterator[IO[bytes]]:
    """A new file, compressed as the ending of `name` says. Raises OSError."""
    if name.endswith(".gz"):
        with gzip.open(path, "wb") as packed:
            yield cast("IO[bytes]", packed)
    elif name.endswith(".zst"):
        import zstandard

        with zstandard.open(path, "wb") as packed_frames:
            yield packed_frames
    else:
        with path.open("wb") as plain:
            yield plain


def bounded_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file. Raises FileRefused for one that is too long."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise FileRefused(f"line {number} is longer than {MAX_LINE_BYTES // 1024**2} MiB")
        yield line


def unpacked(data: bytes, most: int) -> bytes:
    """What zlib packed, at most `most` bytes. Raises FileRefused."""
    unpacker = zlib.decompressobj()
    try:
        found = unpacker.decompress(data, most)
    except zlib.error as error:
        raise FileRefused(f"it is not packed by zlib: {error}") from None
    if unpacker.unconsumed_tail:
        raise FileTooLarge(f"it is larger than {most} bytes")
    if not unpacker.eof:
        raise FileRefused("it is cut off")
    return found
