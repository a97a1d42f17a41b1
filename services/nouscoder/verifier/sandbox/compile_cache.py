"""Compiled programs by content: the same source, files, language and compiler are compiled once.

Only backend `local` uses it. A runner pod or a container could be taken over and send a wrong program for an honest
source; a process of this host that could do that could do anything else too. The key has no client, so clients share a
program only when they have sent the same source.

INVARIANT: the store is one file without a name, of at most `max_bytes` bytes, which no candidate has open. An entry of
the index is the whole program that init read after its compiler had ended, or it is gone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from nouscoder.verifier.harness import frames
from nouscoder.verifier.sandbox.base import Program

log = logging.getLogger(__name__)


class CompileCache:
    """A ring in one unnamed file: the oldest entries are overwritten. Used by one event loop. Empty with 0 bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._file = _unnamed_file() if max_bytes else None
        self.keeps = self._file is not None  # whether it keeps programs at all
        self._places: OrderedDict[str, tuple[int, int]] = OrderedDict()  # key -> offset, length; in order of writing
        self._end = 0  # where the next entry is written
        self.num_hits = 0
        self.num_misses = 0

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_bytes(self) -> int:
        """The bytes on the disk."""
        return os.fstat(self._file.fileno()).st_size if self._file is not None else 0

    def get(self, key: str) -> tuple[bytes, Mapping[str, bytes]] | None:
        """What the compiler said and made, by name, if it is there. Counted as a hit or as a miss."""
        found = self._read(key)
        if found is None:
            self.num_misses += 1
        else:
            self.num_hits += 1
        return found

    def _read(self, key: str) -> tuple[bytes, Mapping[str, bytes]] | None:
        place = self._places.get(key)
        if place is None or self._file is None:
            return None
        offset, length = place
        said, files = frames.unpack_files(os.pread(self._file.fileno(), length, offset))
        return None if files is None else (said, files)

    def put(self, key: str, payload: bytes) -> None:
        """Keep the payload of a COMPILED frame with a whole program. One that is too large is not kept."""
        if self._file is None or len(payload) > self._max_bytes // 4 or key in self._places:
            return
        begin = self._end if self._end + len(payload) <= self._max_bytes else 0
        self._forget(begin, begin + len(payload))
        if begin == 0:
            self._forget(self._end, self._max_bytes)  # what is behind the last entry of this round is the oldest
        try:
            if os.pwrite(self._file.fileno(), payload, begin) != len(payload):
                return
        except OSError:  # the disk is full
            return
        self._places[key] = begin, len(payload)
        self._end = begin + len(payload)

    def _forget(self, begin: int, end: int) -> None:
        gone = [key for key, (at, length) in self._places.items() if at < end and at + length > begin]
        for key in gone:
            del self._places[key]

    def close(self) -> None:
        """Delete the store."""
        self._places.clear()
        if self._file is not None:
            self._file.close()
            self._file = None


def _unnamed_file() -> IO[bytes] | None:
    """In the temporary folder; None where it cannot be written, as without a cache."""
    try:
        return tempfile.TemporaryFile(prefix="nouscoder-compiled-")
    except OSError as error:
        log.warning("compiled programs are not kept", extra={"detail": str(error)})
        return None


def key_of(program: Program) -> str | None:
    """The digest of everything that a compiler sees, and of the compiler. None for a program that needs none."""
    language = program.language
    if language.compile is None or language.run is None:
        return None
    made = hashlib.sha256()
    tools = [_identity(tool) for tool in language.detect]
    parts = [language.name, language.source_name, *language.compile, *tools, str(language.cache or "")]
    made.update(json.dumps(parts).encode())
    for name, content in sorted(
        {language.source_name: program.code.encode("utf8", "surrogatepass"), **program.files}.items()
    ):
        made.update(f"{len(name)} {len(content)} {name}".encode("utf8", "surrogatepass") + content)
    return made.hexdigest()


def _identity(tool: str) -> str:
    """Path, size and time of change of a compiler; its name where it is not a path."""
    path = Path(tool)
    try:
        stat = path.stat()
    except OSError:
        return tool
    return f"{os.path.realpath(path)} {stat.st_size} {stat.st_mtime_ns}"
