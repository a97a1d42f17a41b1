"""A store of tests: each set is kept once, in `Blobs`, under the digest of its content.

INVARIANT: tests kept under a digest have that digest, because it is computed from the bytes that are written.
"""

from __future__ import annotations

import asyncio
import logging
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from nouscoder.domain.submission import Tests
from nouscoder.errors import NousCoderError
from nouscoder.store.blobs import CHUNK_BYTES, Blobs, NoSuchBlob
from nouscoder.store.case_files import CaseFile, write_tests

log = logging.getLogger(__name__)


_IN_MEMORY_BYTES = 4 * 1024**2  # of a compressed file before it is in the store; larger ones are on the disk
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


class UnknownTests(NousCoderError):
    """The store has no tests with this digest."""


@dataclass(frozen=True, slots=True)
class StoredTests:
    """Tests in the store: `num_bytes` is the size of their JSON form, `file_bytes` that of their compressed file."""

    digest: str
    num_tests: int
    num_bytes: int
    file_bytes: int


class TestsSource(Protocol):
    """Where a file of tests comes from."""

    def fetch(self, digest: str) -> AsyncIterator[bytes]:
        """The file in pieces. Raises UnknownTests, and another NousCoderError when it cannot be read now."""


def hex_of(digest: str) -> str:
    """The 64 digits of a digest. Raises UnknownTests for a text that is not a digest."""
    found = _DIGEST.fullmatch(digest)
    if found is None:
        raise UnknownTests(f"{digest[:100]!r} is no digest of tests: sha256: and 64 hex digits")
    return found[1]


class TestStore:
    """The tests in `folder` of `blobs`. All methods but `fetch` block: call them outside of the event loop."""

    __test__ = False  # not a pytest class

    def __init__(self, blobs: Blobs, folder: str = "tests") -> None:
        self._blobs = blobs
        self._folder = folder

    def name_of(self, digest: str) -> str:
        """The name of the blob with the tests of this digest. Raises UnknownTests for a text that is not a digest."""
        digits = hex_of(digest)
        return f"{self._folder}/{digits[:2]}/{digits}"

    def put(self, tests: Tests, admit: Callable[[StoredTests], None] | None = None) -> StoredTests:
        """Keep these tests, unless `admit` raises. Raises BlobsUnavailable, ValueError for text that is not Unicode."""
        with tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES, prefix="nouscoder-tests-") as spooled:
            file = cast("BinaryIO", spooled)
            digest, num_bytes = write_tests(tests, file)
            return self.keep(StoredTests(digest, len(tests.cases), num_bytes, file.tell()), file, admit)

    def keep(
        self, stored: StoredTests, file: BinaryIO, admit: Callable[[StoredTests], None] | None = None
    ) -> StoredTests:
        """Keep tests that `write_tests` has written to `file`, unless `admit` raises. Raises BlobsUnavailable."""
        if admit is not None:
            admit(stored)
        file.seek(0)
        self._blobs.put(self.name_of(stored.digest), file)
        return stored

    def copy(self, digest: str, source: TestStore) -> None:
        """Copy tests from another store. Raises UnknownTests and BlobsUnavailable."""
        try:
            self._blobs.copy(self.name_of(digest), source._blobs)
        except NoSuchBlob:
            raise UnknownTests(f"no tests {digest} are kept there") from None

    def sync(self) -> None:
        """After this, all tests that were put survive a power failure."""
        self._blobs.sync()

    def has(self, digest: str) -> bool:
        """Whether the store has these tests."""
        return self._blobs.exists(self.name_of(digest))

    def read(self, digest: str) -> Iterator[bytes]:
        """The file of these tests in pieces. Raises UnknownTests before the first piece, and BlobsUnavailable."""
        try:
            yield from self._blobs.read(self.name_of(digest))
        except NoSuchBlob:
            raise UnknownTests(f"no tests {digest} are kept here") from None

    @contextmanager
    def opened(self, digest: str) -> Iterator[Tests]:
        """The tests; each case is read from a copy in memory, or of a large file on the disk. Raises as `read` does."""
        pieces = self.read(digest)
        begin = next(pieces, b"")
        if len(begin) < CHUNK_BYTES:  # that is all
            with CaseFile(begin) as file:
                yield file.tests()
            return
        with tempfile.TemporaryDirectory(prefix="nouscoder-tests-") as folder:
            path = Path(folder) / "tests"
            with path.open("wb") as copy:
                for piece in chain((begin,), pieces):
                    copy.write(piece)
            with CaseFile(path) as file:
                yield file.tests()

    async def fetch(self, digest: str) -> AsyncIterator[bytes]:
        """The same as `read`, for TestsSource."""
        pieces = self.read(digest)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece

    def delete(self, digest: str) -> None:
        """Delete these tests."""
        self._blobs.delete(self.name_of(digest))
