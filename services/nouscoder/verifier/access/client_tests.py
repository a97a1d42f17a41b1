"""The tests that clients store for later submissions: PUT /v1/tests, then `"tests": {"digest": ...}`.

The store holds each set of tests once, under its digest, for all clients. For each client it also holds an empty blob
`clients/CLIENT/DIGEST.BYTES` for each set that the client stored; the blob's modification time is the time of the last
use. Replicas of the service that use the same store share both.

INVARIANT: a client can use only tests that it stored itself and has used within `expiry_s`. It cannot distinguish a
digest of another client from an unknown one. The tests of one client never exceed `client_bytes`, the size of their
JSON form. The files of all tests never exceed `store_bytes`; replicas that store at the same time may exceed it by one
set each.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from nouscoder.domain.submission import Submission, Tests, TestsReference
from nouscoder.domain.verdict import Verdict
from nouscoder.errors import NousCoderError
from nouscoder.store.blobs import Blobs, BlobsUnavailable
from nouscoder.store.case_files import CaseFileBroken
from nouscoder.store.tests import StoredTests, TestStore, UnknownTests, hex_of
from nouscoder.store.tests_cache import TestsCache, TestsTooLarge
from nouscoder.verifier.access.caller import current_caller
from nouscoder.verifier.grading.grader import OnOutcome
from nouscoder.verifier.grading.grader_decorator import GraderDecorator
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.grading.verdict_cache import Grading

log = logging.getLogger(__name__)

_RENEW_SHARE = 0.1  # of the expiry: the shortest time between two records of a use
_KNOWN_S = 60.0  # time after which a client's list is read again
_SWEEP_S = 3600.0


class StorageFull(NousCoderError):
    """The client, or all clients together, have stored as many bytes as they may."""


@dataclass(slots=True)
class _Held:
    """One set of tests of one client."""

    num_bytes: int
    used_s: float


class ClientTests:
    """The tests in `blobs`, read through `cache`. `clock` returns seconds since 1970."""

    def __init__(
        self,
        blobs: Blobs,
        cache: TestsCache,
        client_bytes: int,
        expiry_s: float,
        store_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._blobs = blobs
        self._store = TestStore(blobs, "stored")
        self._cache = cache
        self._client_bytes = client_bytes
        self._expiry_s = expiry_s
        self._store_bytes = store_bytes
        self._clock = clock
        self._lists: dict[str, tuple[float, dict[str, _Held]]] = {}  # by client: time of reading, and the list
        self._storing = asyncio.Lock()

    async def put(self, client: str, tests: Tests) -> StoredTests:
        """Store tests for this client. Raises StorageFull and BlobsUnavailable."""
        async with self._storing:  # one at a time, because the bounds apply to a sum
            return await asyncio.to_thread(self._put, client, tests)

    def _put(self, client: str, tests: Tests) -> StoredTests:
        held = self._read_list(client)
        stored = self._store.put(tests, lambda stored: self._admit(stored, held))
        digits = hex_of(stored.digest)
        held[digits] = _Held(stored.num_bytes, self._clock())
        self._blobs.put(_name(client, digits, stored.num_bytes), b"")
        return stored

    def _admit(self, stored: StoredTests, held: dict[str, _Held]) -> None:
        """Check both bounds. Raises StorageFull."""
        digits = hex_of(stored.digest)
        expiry = f"tests that are not used are deleted after {self._expiry_s:g} s"
        of_client = sum(one.num_bytes for name, one in held.items() if name != digits)
        if of_client + stored.num_bytes > self._client_bytes:
            raise StorageFull(
                f"these tests have {stored.num_bytes} bytes, {of_client} are stored, and a client may store"
                f" {self._client_bytes}; {expiry}"
            )
        of_all = sum(one.num_bytes for one in self._blobs.list("stored") if not one.name.endswith(digits))
        if of_all + stored.file_bytes > self._store_bytes:
            raise StorageFull(
                f"these tests take {stored.file_bytes} bytes, all clients' tests take {of_all}, and the store may hold"
                f" {self._store_bytes}; {expiry}"
            )

    @asynccontextmanager
    async def opened(self, client: str, digest: str) -> AsyncIterator[Tests]:
        """The tests of this digest. Raises UnknownTests, TestsTooLarge and BlobsUnavailable."""
        digits = hex_of(digest)
        read_s, held = self._lists.get(client, (0.0, {}))
        if (digits not in held and self._clock() - read_s > 1.0) or self._clock() - read_s > _KNOWN_S:
            held = await asyncio.to_thread(self._read_list, client)
        one = held.get(digits)
        if one is None or self._is_expired(one.used_s):
            raise UnknownTests(f"{digest} names no tests that this client has stored, or they have expired")
        if self._clock() - one.used_s > _RENEW_SHARE * self._expiry_s:
            one.used_s = self._clock()
            await asyncio.to_thread(self._blobs.put, _name(client, digits, one.num_bytes), b"")
        async with self._cache.opened(digest, self._store) as tests:
            yield tests

    async def keep_sweeping(self) -> None:
        """Delete expired tests now and every hour."""
        while True:
            try:
                await asyncio.to_thread(self.sweep)
            except BlobsUnavailable as error:
                log.warning("expired tests could not be deleted", extra={"reason": str(error)})
            await asyncio.sleep(_SWEEP_S)

    def sweep(self) -> None:
        """Delete expired entries, then tests without an entry of any client. Raises BlobsUnavailable."""
        used = set()
        for info in self._blobs.list("clients"):
            if self._is_expired(info.modified_s):
                self._blobs.delete(info.name)
            else:
                used.add(info.name.rpartition("/")[2].partition(".")[0])
        for info in self._blobs.list("stored"):
            # Tests that are being stored have no entry yet.
            if info.name.rpartition("/")[2] not in used and self._clock() - info.modified_s > _SWEEP_S:
                self._blobs.delete(info.name)

    def _read_list(self, client: str) -> dict[str, _Held]:
        held = {}
        for info in self._blobs.list(f"clients/{_folder(client)}"):
            digits, _, num_bytes = info.name.rpartition("/")[2].partition(".")
            if not self._is_expired(info.modified_s):
                held[digits] = _Held(int(num_bytes), info.modified_s)
        self._lists[client] = (self._clock(), held)
        return held

    def _is_expired(self, used_s: float) -> bool:
        return self._clock() - used_s > self._expiry_s


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
