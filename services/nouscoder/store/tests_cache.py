"""A cache of tests on disk, in a folder of bounded size.

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
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from nouscoder.domain.submission import Tests
from nouscoder.errors import NousCoderError, Unusable
from nouscoder.private_folder import NotPrivate, private_folder
from nouscoder.store.case_files import CaseFile, CaseFileBroken
from nouscoder.store.tests import TestsSource, hex_of

log = logging.getLogger(__name__)

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
