"""Tests of problems, each set kept once under the digest of its content, on any `Blobs`.

INVARIANT: what is kept under a digest has that digest: it is computed from what is written, before it gets its name.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from nouscoder.domain.submission import Tests
from nouscoder.errors import NousCoderError
from nouscoder.store.blobs import Blobs, NoSuchBlob
from nouscoder.store.case_files import CaseFile, write_tests

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


class UnknownTests(NousCoderError):
    """No tests of this digest are kept here."""


@dataclass(frozen=True, slots=True)
class StoredTests:
    """What was kept: `num_bytes` is the size of the tests' JSON form, `file_bytes` that of their compressed file."""

    digest: str
    num_tests: int
    num_bytes: int
    file_bytes: int


class TestsSource(Protocol):
    """Where a file of tests comes from."""

    def fetch(self, digest: str) -> AsyncIterator[bytes]:
        """The file in pieces. Raises UnknownTests, or another NousCoderError when it cannot be had now."""
        ...


def hex_of(digest: str) -> str:
    """The 64 digits of a digest. Raises UnknownTests for a text that is none."""
    found = _DIGEST.fullmatch(digest)
    if found is None:
        raise UnknownTests(f"{digest[:100]!r} is no digest of tests: sha256: and 64 hex digits")
    return found[1]


class TestStore:
    """The tests in the folder `folder` of `blobs`. All methods but `fetch` block: call them off the event loop."""

    __test__ = False  # not a pytest class

    def __init__(self, blobs: Blobs, folder: str = "tests") -> None:
        self._blobs = blobs
        self._folder = folder

    def name_of(self, digest: str) -> str:
        """The name under which the tests of this digest are kept. Raises UnknownTests for a text that is no digest."""
        digits = hex_of(digest)
        return f"{self._folder}/{digits[:2]}/{digits}"

    def put(self, tests: Tests, admit: Callable[[StoredTests], None] | None = None) -> StoredTests:
        """Keep these tests, unless `admit` raises. Raises BlobsUnavailable, ValueError for text that is not Unicode."""
        with tempfile.NamedTemporaryFile(prefix="nouscoder-tests-") as file:
            digest, num_bytes = write_tests(tests, cast("BinaryIO", file))
            stored = StoredTests(digest, len(tests.cases), num_bytes, file.tell())
            if admit is not None:
                admit(stored)
            file.flush()
            self._blobs.put(self.name_of(digest), Path(file.name))
        return stored

    def copy(self, digest: str, source: TestStore) -> None:
        """Keep tests of another store. Raises UnknownTests and BlobsUnavailable."""
        try:
            self._blobs.copy(self.name_of(digest), source._blobs)
        except NoSuchBlob:
            raise UnknownTests(f"no tests {digest} are kept there") from None

    def sync(self) -> None:
        """After this, all tests that were put survive a power failure."""
        self._blobs.sync()

    def has(self, digest: str) -> bool:
        """Whether they are kept."""
        return self._blobs.exists(self.name_of(digest))

    def read(self, digest: str) -> Iterator[bytes]:
        """Their file in pieces. Raises UnknownTests before the first, and BlobsUnavailable."""
        try:
            yield from self._blobs.read(self.name_of(digest))
        except NoSuchBlob:
            raise UnknownTests(f"no tests {digest} are kept here") from None

    @contextmanager
    def opened(self, digest: str) -> Iterator[Tests]:
        """The tests, whose cases are read from a local copy when they are needed. Raises what `read` raises."""
        with tempfile.TemporaryDirectory(prefix="nouscoder-tests-") as folder:
            path = Path(folder) / "tests"
            with path.open("wb") as copy:
                for piece in self.read(digest):
                    copy.write(piece)
            with CaseFile(path) as file:
                yield file.tests()

    async def fetch(self, digest: str) -> AsyncIterator[bytes]:
        """As `read`, for TestsSource."""
        pieces = self.read(digest)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece

    def delete(self, digest: str) -> None:
        """Forget them."""
        self._blobs.delete(self.name_of(digest))
