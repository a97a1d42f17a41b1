"""A store of tests: each set is kept once, in `Blobs`, under the digest of its content.

INVARIANT: tests kept under a digest have that digest, because it is computed from the bytes that are written.

`TestsCache` is a folder of bounded size on the disk of a service. INVARIANT: the files of the folder, including those
being fetched, never hold more than `max_bytes`; the least recently used are deleted first. A process uses a file only
after it has compared the content with the digest, once; the file's checksums protect each later read. Of equal fetches
only one runs, and the others wait for it. A killed process leaves whole files, and partial ones that the next process
deletes. INVARIANT: only this user may enter the folder of a process, and no link in it is followed.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import secrets
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from nouscoder.domain.submission import Tests
from nouscoder.errors import NousCoderError, Unusable
from nouscoder.private_folder import NotPrivate, private_folder
from nouscoder.store.blobs import CHUNK_BYTES, Blobs, NoSuchBlob
from nouscoder.store.case_files import CaseFile, CaseFileBroken, write_tests

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


# A cache of tests on disk, in a folder of bounded size.


_PART = ".part-"
_MAX_PROCESSES = 64


class TestsTooLarge(NousCoderError):
    """One set of tests is larger than the cache."""

    __test__ = False  # not a pytest class


class TestsCache:
    """Use from one event loop. Each process has a folder of its own in `folder`."""

    __test__ = False  # not a pytest class

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Raises Unusable."""
        self._max_bytes = max_bytes
        self._folder, self._lock = _own_folder(folder)
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by file name, the least recently used first
        self.num_bytes = 0  # of all files
        self._checked: set[str] = set()
        self._fetching: dict[str, asyncio.Task[None]] = {}
        found = []
        for path in self._folder.iterdir():
            if path.name.startswith(_PART):
                path.unlink(missing_ok=True)
            elif len(path.name) == 64:
                stat = path.stat()
                found.append((stat.st_mtime, path.name, stat.st_size))
        for _, name, size in sorted(found):
            self._sizes[name] = size
            self.num_bytes += size
        self._make_room(0)

    def close(self) -> None:
        """Stop fetching, and let another process use the folder."""
        for task in self._fetching.values():
            task.cancel()
        os.close(self._lock)

    @asynccontextmanager
    async def opened(self, digest: str, source: TestsSource) -> AsyncIterator[Tests]:
        """The tests of this digest, fetched from `source` if they are not cached. Their cases are read from the file.

        Raises what `source` raises, TestsTooLarge, CaseFileBroken when `source` sends other bytes, and OSError.
        """
        name = hex_of(digest)
        file = await self._open(name, digest, source)
        try:
            yield file.tests()
        finally:
            file.close()

    async def _open(self, name: str, digest: str, source: TestsSource) -> CaseFile:
        for _ in range(2):
            if name not in self._sizes:
                task = self._fetching.get(name)
                if task is None:
                    task = self._fetching[name] = asyncio.create_task(self._fetch(name, digest, source))
                    task.add_done_callback(lambda done: self._fetched(name, done))
                await asyncio.shield(task)  # a caller that is cancelled does not stop the fetch for the others
            try:
                file = CaseFile(self._folder / name, is_own=True)
            except (OSError, CaseFileBroken) as error:
                self._drop(name, error)
                continue
            if name not in self._checked:
                try:
                    await asyncio.to_thread(file.check, digest)
                except CaseFileBroken as error:
                    file.close()
                    self._drop(name, error)
                    continue
                except BaseException:
                    file.close()
                    raise
                self._checked.add(name)
            if name in self._sizes:
                self._sizes.move_to_end(name)
                with suppress(OSError):
                    os.utime(self._folder / name)
            return file
        raise CaseFileBroken(f"the tests {digest} cannot be fetched undamaged")

    def _fetched(self, name: str, task: asyncio.Task[None]) -> None:
        self._fetching.pop(name, None)
        if not task.cancelled():
            task.exception()  # read it, because there may be no caller left to receive it

    async def _fetch(self, name: str, digest: str, source: TestsSource) -> None:
        part = f"{_PART}{secrets.token_hex(8)}"
        path = self._folder / part
        try:
            with path.open("xb") as file:
                self._sizes[part] = 0
                async for piece in source.fetch(digest):
                    if not self._make_room(len(piece)):
                        raise TestsTooLarge(f"the tests {digest} do not fit in a cache of {self._max_bytes} bytes")
                    self._sizes[part] += len(piece)
                    self.num_bytes += len(piece)
                    await asyncio.to_thread(file.write, piece)
            path.replace(self._folder / name)
        except BaseException:
            self._forget(part)
            raise
        self._sizes[name] = self._sizes.pop(part)
        self._checked.discard(name)

    def _make_room(self, num_bytes: int) -> bool:
        """Delete files until `num_bytes` more fit; False if that is impossible. Open files stay readable."""
        for name in list(self._sizes):
            if self.num_bytes + num_bytes <= self._max_bytes:
                return True
            if not name.startswith(_PART):
                self._forget(name)
        return self.num_bytes + num_bytes <= self._max_bytes

    def _drop(self, name: str, error: Exception) -> None:
        log.warning("a cached file of tests is fetched again", extra={"file": name, "reason": str(error)})
        self._forget(name)

    def _forget(self, name: str) -> None:
        self.num_bytes -= self._sizes.pop(name, 0)
        self._checked.discard(name)
        (self._folder / name).unlink(missing_ok=True)


def _own_folder(folder: Path) -> tuple[Path, int]:
    """A folder that no other process uses, and the lock on it. A folder of another user is passed over."""
    for number in range(_MAX_PROCESSES):
        own = folder / str(number)
        try:
            private_folder(own)
            lock = os.open(own / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except NotPrivate as error:
            log.warning("a folder of the cache of tests is not used", extra={"reason": str(error)})
            continue
        except OSError as error:
            raise Unusable(f"{own} cannot be used as a cache of tests: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return own, lock
        except OSError:
            os.close(lock)
    raise Unusable(f"{folder} is used by {_MAX_PROCESSES} processes or by other users already")
