"""Files that may be compressed: read by their first bytes, written by their name (.gz, .zst)."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, cast

STDIN = Path("-")
_BUFFER_BYTES = 1024**2


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """The bytes of a file, or of standard input for `-`, decompressed. Raises OSError, also for a broken file."""
    import zstandard

    try:
        with ExitStack() as stack:
            file = sys.stdin.buffer if path == STDIN else stack.enter_context(path.open("rb", _BUFFER_BYTES))
            head = cast("io.BufferedReader", file).peek(4)[:4]
            if head[:2] == b"\x1f\x8b":
                file = cast("IO[bytes]", stack.enter_context(gzip.open(file)))
            elif head == b"\x28\xb5\x2f\xfd":
                file = stack.enter_context(zstandard.open(file, "rb"))
            else:
                yield cast("io.BufferedReader", file)
                return
            yield io.BufferedReader(cast("io.RawIOBase", file), _BUFFER_BYTES)
    except (EOFError, zlib.error, zstandard.ZstdError) as error:
        raise OSError(f"it is not a complete compressed file: {error}") from error


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
