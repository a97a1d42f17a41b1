"""The tests that clients store.

Clients store tests for later submissions with PUT /v1/tests, then `"tests": {"digest": ...}`. The store holds each set
of tests once, under its digest, for all clients. For each client it also holds an empty blob
`clients/CLIENT/DIGEST.BYTES` for each set that the client stored; the blob's modification time is the time of the last
use. Replicas of the service that use the same store share both. Storing tests does not list the store. The process
keeps both sums in memory: it reads a client's entries at most once in `_KNOWN_S`, and counts the files of all tests in
each sweep.

INVARIANT: a client can use only tests that it stored itself and has used within `expiry_s`. It cannot distinguish a
digest of another client from an unknown one. The tests of one client never exceed `client_bytes`, the size of their
JSON form. The files of all tests never exceed `store_bytes`. Replicas that share a store may exceed both bounds by what
the others have stored since this process last read the sum.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from nouscoder.config import TestsSection
from nouscoder.domain.submission import Submission, Tests, TestsReference
from nouscoder.domain.verdict import Verdict
from nouscoder.errors import NousCoderError
from nouscoder.store.blobs import Blobs, BlobsUnavailable
from nouscoder.store.case_files import CaseFileBroken
from nouscoder.store.tests import StoredTests, TestStore, UnknownTests, hex_of
from nouscoder.store.tests_cache import TestsCache, TestsTooLarge
from nouscoder.verifier.access.caller import current_caller
from nouscoder.verifier.grading.grader import GraderDecorator, Grading, OnOutcome
from nouscoder.verifier.grading.validation import InvalidSubmission

log = logging.getLogger(__name__)

_RENEW_SHARE = 0.1  # of the expiry: the shortest time between two records of a use
_KNOWN_S = 60.0  # time after which a client's list is read again
_REREAD_S = 1.0  # between two readings of a client's list for digests that are not in it
_SWEEP_S = 600.0  # time between two sweeps
_UNUSED_S = 3600.0  # age from which tests without an entry of any client are deleted


class StorageFull(NousCoderError):
    """The client, or all clients together, have stored as many bytes as they may."""


@dataclass(slots=True)
class _Held:
    """One set of tests of one client."""

    num_bytes: int
    used_s: float


class _ClientList:
    """The sets of one client, by their hex digits, as they were read at `read_s`. `num_bytes` is their sum."""

    def __init__(self, read_s: float) -> None:
        self.read_s = read_s
        self.held: dict[str, _Held] = {}
        self.num_bytes = 0

    def add(self, digits: str, one: _Held) -> None:
        """Add a set, or replace it."""
        self.num_bytes += one.num_bytes - (self.held[digits].num_bytes if digits in self.held else 0)
        self.held[digits] = one


class ClientTests:
    """The tests in `blobs`, read through `cache`. `clock` returns seconds since 1970."""

    def __init__(
        self,
        blobs: Blobs,
        cache: TestsCache,
        section: TestsSection,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._blobs = blobs
        self._store = TestStore(blobs, "stored")
        self._cache = cache
        self._section = section
        self._clock = clock
        self._lists: dict[str, _ClientList] = {}  # by client
        # The bytes of all files in the store: those of the last count, less what was added before it, and those added
        # so far. A file that is added during a count may count twice until the next one: the sum is never too small.
        self._counted: int | None = None
        self._added = 0  # one thread at a time adds
        self._storing = asyncio.Lock()

    async def put(self, client: str, tests: Tests | Path, stored: StoredTests | None = None) -> StoredTests:
        """Store tests for this client, or a file with `stored` in it. Raises StorageFull and BlobsUnavailable."""
        async with self._storing:  # one at a time, because the bounds apply to a sum
            return await asyncio.to_thread(self._put, client, tests, stored)

    def _put(self, client: str, tests: Tests | Path, file_of: StoredTests | None) -> StoredTests:
        known = self._lists.get(client)
        if known is None or self._is_old(known):
            known = self._read_list(client)
        if self._counted is None:
            self._count()
        new_bytes = 0

        def admit(stored: StoredTests) -> None:
            nonlocal new_bytes
            new_bytes = 0 if self._store.has(stored.digest) else stored.file_bytes
            expiry = f"tests that are not used are deleted after {self._section.expiry_s:g} s"
            is_new = hex_of(stored.digest) not in known.held
            if is_new and known.num_bytes + stored.num_bytes > self._section.client_bytes:
                raise StorageFull(
                    f"these tests have {stored.num_bytes} bytes, {known.num_bytes} are stored, and a client may store"
                    f" {self._section.client_bytes}; {expiry}"
                )
            of_all = (self._counted or 0) + self._added
            if new_bytes and of_all + new_bytes > self._section.store_bytes:
                raise StorageFull(
                    f"these tests take {new_bytes} bytes, all clients' tests take {of_all}, and the store may hold"
                    f" {self._section.store_bytes}; {expiry}"
                )

        if isinstance(tests, Path):
            assert file_of is not None
            with tests.open("rb") as file:
                stored = self._store.keep(file_of, file, admit)
        else:
            stored = self._store.put(tests, admit)
        self._added += new_bytes
        digits = hex_of(stored.digest)
        self._blobs.put(_name(client, digits, stored.num_bytes), b"")
        self._lists[client].add(digits, _Held(stored.num_bytes, self._clock()))  # a grading may have read it again
        return stored

    @asynccontextmanager
    async def opened(self, client: str, digest: str) -> AsyncIterator[Tests]:
        """The tests of this digest. Raises UnknownTests, TestsTooLarge and BlobsUnavailable."""
        digits = hex_of(digest)
        asked_s, known = self._clock(), self._lists.get(client)
        if known is None or self._is_old(known):
            known = await asyncio.to_thread(self._read_list, client)
        while digits not in known.held and known.read_s < asked_s:  # another process may have stored it since
            await asyncio.sleep(min(_REREAD_S, max(0.0, known.read_s + _REREAD_S - self._clock())))
            known = self._lists[client]
            if digits not in known.held and known.read_s < asked_s:
                known = await asyncio.to_thread(self._read_list, client)
        one = known.held.get(digits)
        if one is None or self._is_expired(one.used_s):
            raise UnknownTests(f"{digest} names no tests that this client has stored, or they have expired")
        if self._clock() - one.used_s > _RENEW_SHARE * self._section.expiry_s:
            one.used_s = self._clock()
            await asyncio.to_thread(self._blobs.put, _name(client, digits, one.num_bytes), b"")
        async with self._cache.opened(digest, self._store) as tests:
            yield tests

    async def keep_sweeping(self) -> None:
        """Sweep now and every ten minutes."""
        while True:
            try:
                await asyncio.to_thread(self.sweep)
            except BlobsUnavailable as error:
                log.warning("expired tests could not be deleted", extra={"reason": str(error)})
            await asyncio.sleep(_SWEEP_S)

    def sweep(self) -> None:
        """Delete expired entries and tests without an entry of any client; count the rest. Raises BlobsUnavailable."""
        used = set()
        for info in self._blobs.list("clients"):
            if self._is_expired(info.modified_s):
                self._blobs.delete(info.name)
            else:
                used.add(info.name.rpartition("/")[2].partition(".")[0])
        self._count(used)

    def _count(self, used: set[str] | None = None) -> None:
        """Count the bytes of all files. With `used` (hex digits), delete old files that are not in it first."""
        added_before, num_bytes = self._added, 0
        for info in self._blobs.list("stored"):
            is_unused = used is not None and info.name.rpartition("/")[2] not in used
            # Tests that are being stored have no entry yet.
            if is_unused and self._clock() - info.modified_s > _UNUSED_S:
                self._blobs.delete(info.name)
            else:
                num_bytes += info.num_bytes
        self._counted = num_bytes - added_before

    def _read_list(self, client: str) -> _ClientList:
        known = _ClientList(self._clock())
        for info in self._blobs.list(f"clients/{_folder(client)}"):
            digits, _, num_bytes = info.name.rpartition("/")[2].partition(".")
            if not self._is_expired(info.modified_s):
                known.add(digits, _Held(int(num_bytes), info.modified_s))
        self._lists[client] = known
        return known

    def _is_old(self, known: _ClientList) -> bool:
        return self._clock() - known.read_s > _KNOWN_S

    def _is_expired(self, used_s: float) -> bool:
        return self._clock() - used_s > self._section.expiry_s


def _folder(client: str) -> str:
    """The folder of a client: a digest of its name, which may hold any character."""
    return hashlib.sha256(client.encode("utf8", "surrogatepass")).hexdigest()[:32]


def _name(client: str, digits: str, num_bytes: int) -> str:
    return f"clients/{_folder(client)}/{digits}.{num_bytes}"


class StoredTestsGrader(GraderDecorator):
    """Grades with `inner`, with the stored tests for submissions that name them by digest."""

    def __init__(self, inner: Grading, client_tests: ClientTests) -> None:
        super().__init__(inner)
        self._client_tests = client_tests

    async def grade(self, submission: Submission, on_outcome: OnOutcome | None = None) -> Verdict:
        """See `Grader.grade`. Raises InvalidSubmission for a digest unknown to the client, BlobsUnavailable."""
        if not isinstance(submission.tests, TestsReference):
            return await self._inner.grade(submission, on_outcome)
        digest = submission.tests.digest
        try:
            async with self._client_tests.opened(current_caller().client, digest) as tests:
                whole = replace(submission, tests=tests, tests_digest=digest)
                return await self._inner.grade(whole, on_outcome)
        except (UnknownTests, TestsTooLarge, CaseFileBroken) as error:
            raise InvalidSubmission("tests.digest", f"{error}; PUT the tests to /v1/tests") from None
