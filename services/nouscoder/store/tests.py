"""Tests of problems, each set kept once under the digest of its content, on any `Blobs`.

INVARIANT: what is kept under a digest has that digest: it is computed from what is written, before it gets its name.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nouscoder.domain.submission import Tests
from nouscoder.errors import NousCoderError
from nouscoder.store.blobs import Blobs, NoSuchBlob
from nouscoder.store.case_files import write_tests

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


class UnknownTests(NousCoderError):
    """No tests of this digest are kept here."""


@dataclass(frozen=True, slots=True)
class StoredTests:
    """What was kept: `num_bytes` is the size of the tests' JSON form."""

    digest: str
    num_tests: int
    num_bytes: int


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


def blob_name(digest: str) -> str:
    """The name under which the tests of this digest are kept. Raises UnknownTests for a text that is no digest."""
    digits = hex_of(digest)
    return f"tests/{digits[:2]}/{digits}"


class TestStore:
    """The tests in `blobs`. Methods block: call them off the event loop."""

    __test__ = False  # not a pytest class

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    def put(self, tests: Tests) -> StoredTests:
        """Keep these tests. Raises BlobsUnavailable, ValueError for text that is not Unicode."""
        with tempfile.TemporaryDirectory(prefix="nouscoder-tests-") as folder:
            path = Path(folder) / "tests"
            with path.open("wb") as file:
                digest, num_bytes = write_tests(tests, file)
            self._blobs.put(blob_name(digest), path)
        return StoredTests(digest, len(tests.cases), num_bytes)

    def has(self, digest: str) -> bool:
        """Whether they are kept."""
        return self._blobs.exists(blob_name(digest))

    def read(self, digest: str) -> Iterator[bytes]:
        """Their file in pieces. Raises UnknownTests before the first, and BlobsUnavailable."""
        try:
            yield from self._blobs.read(blob_name(digest))
        except NoSuchBlob:
            raise UnknownTests(f"no tests {digest} are kept here") from None

    def delete(self, digest: str) -> None:
        """Forget them."""
        self._blobs.delete(blob_name(digest))
