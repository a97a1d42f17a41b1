"""Identical submissions to identical tests: graded once, remembered, and merged while in flight.

INVARIANT: of equal submissions at most one is being graded at any time; a verdict is remembered only when it says
something lasting of the candidate (never internal_error, which is ours, nor time_limit_exceeded, which a busy machine
can cause); at most `num_entries` are remembered, the least recently used go first.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import OrderedDict
from dataclasses import replace
from typing import Protocol

from nouscoder.domain.submission import Submission, TestsReference
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.formats.tests import canonical_parts
from nouscoder.verifier.grading.grader import OnOutcome, QueueFull
from nouscoder.verifier.observe.metrics import VerifierMetrics

_PASSING = frozenset({VerdictKind.INTERNAL_ERROR, VerdictKind.TIME_LIMIT_EXCEEDED})
_KEYED_CHARS = 2_000_000  # of the program
_BLOCKING_BYTES = 256 * 1024  # of tests that are read on the event loop; the rest in a thread
_KEPT_OUTCOMES = 300  # so that a full cache of 4096 stays under about 200 MB at the very worst


class Grading(Protocol):
    """Whatever grades: Grader itself, or Grader behind the cache."""

    @property
    def backend(self) -> str:
        """Name of the sandbox backend."""
        ...

    @property
    def num_slots(self) -> int:
        """Submissions that can run at once."""
        ...

    @property
    def unfinished(self) -> int:
        """Submissions that wait or run."""
        ...

    async def grade(self, submission: Submission, on_outcome: OnOutcome | None = None) -> Verdict:
        """The verdict of one submission. Raises InvalidSubmission and QueueFull."""
        ...


class CachedGrader:
    """`inner` behind a cache of verdicts."""

    def __init__(self, inner: Grading, metrics: VerifierMetrics, num_entries: int, max_followers: int = 1024) -> None:
        self._inner = inner
        self._metrics = metrics
        self._num_entries = num_entries
        self._max_followers = max_followers
        self._followers = 0
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._running: dict[bytes, asyncio.Future[Verdict | None]] = {}

    @property
    def backend(self) -> str:
        """Name of the sandbox backend."""
        return self._inner.backend

    @property
    def num_slots(self) -> int:
        """Submissions that can run at once."""
        return self._inner.num_slots

    @property
    def unfinished(self) -> int:
        """Submissions that wait or run, also those that wait for an equal one."""
        return self._inner.unfinished + self._followers

    async def grade(self, submission: Submission, on_outcome: OnOutcome | None = None) -> Verdict:
        """As Grader.grade; a verdict that was not graded for this call says `cached`."""
        digest = submission.tests_digest or await _tests_digest(submission)
        key = _key(submission, digest)
        if key is None:
            return await self._inner.grade(submission, on_outcome)
        submission = replace(submission, tests_digest=digest)
        begun = time.monotonic()
        while True:
            verdict = self._recall(key) or await self._follow(key)
            if verdict is not None:
                return self._again(verdict, begun, on_outcome)
            if key not in self._running:
                return await self._lead(key, submission, on_outcome)

    def _recall(self, key: bytes) -> Verdict | None:
        verdict = self._known.get(key)
        if verdict is not None:
            self._known.move_to_end(key)
        return verdict

    async def _follow(self, key: bytes) -> Verdict | None:
        """The verdict of the equal submission in flight; None when there is none, or it ended without one of use."""
        running = self._running.get(key)
        if running is None:
            return None
        if self._followers >= self._max_followers:
            raise QueueFull(1)
        self._followers += 1
        try:
            return await asyncio.shield(running)
        finally:
            self._followers -= 1

    async def _lead(self, key: bytes, submission: Submission, on_outcome: OnOutcome | None) -> Verdict:
        running: asyncio.Future[Verdict | None] = asyncio.get_running_loop().create_future()
        self._running[key] = running
        verdict: Verdict | None = None
        try:
            verdict = await self._inner.grade(submission, on_outcome)
            if verdict.kind not in _PASSING and len(verdict.tests) <= _KEPT_OUTCOMES:
                self._known[key] = verdict
                if len(self._known) > self._num_entries:
                    self._known.popitem(last=False)
            return verdict
        finally:
            del self._running[key]
            running.set_result(None if verdict is None or verdict.is_ours else verdict)

    def _again(self, verdict: Verdict, begun: float, on_outcome: OnOutcome | None) -> Verdict:
        verdict = replace(verdict, cached=True, duration_s=time.monotonic() - begun)
        self._metrics.graded(verdict)
        if on_outcome is not None:
            for outcome in verdict.tests:
                on_outcome(outcome)
        return verdict


async def _tests_digest(submission: Submission) -> str:
    """The digest of the tests, without holding up the event loop; empty where they have none."""
    if isinstance(submission.tests, TestsReference):
        return submission.tests.digest
    digest = hashlib.sha256()
    parts = canonical_parts(submission.tests)

    def read(most_bytes: float) -> bool:
        """Whether all is read, after about so many bytes."""
        num_bytes = 0
        for part in parts:
            digest.update(part)
            num_bytes += len(part)
            if num_bytes > most_bytes:
                return False
        return True

    try:
        if not read(_BLOCKING_BYTES):
            await asyncio.to_thread(read, math.inf)
    except (RecursionError, ValueError):
        return ""
    return f"sha256:{digest.hexdigest()}"


def _key(submission: Submission, tests_digest: str) -> bytes | None:
    """A digest of all that the verdict depends on; None for programs too large, and tests that have no digest.

    The problem id decides in which order tests run, and so which failure is met first. A submission without one never
    gets a verdict that came from a learned order. Where every test is run, the order changes nothing.
    """
    source = submission.code if submission.code is not None else submission.completion or ""
    if not tests_digest or len(source) > _KEYED_CHARS:
        return None
    problem_id = submission.problem_id if submission.stop_on_first_failure else ""
    keyed = replace(submission, tests=TestsReference(tests_digest), tests_digest="", problem_id=problem_id)
    return hashlib.blake2b(repr(keyed).encode("utf8", "surrogatepass"), digest_size=32).digest()
