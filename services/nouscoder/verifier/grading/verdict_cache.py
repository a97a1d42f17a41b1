"""Caches the verdicts of identical submissions, and merges identical submissions in progress.

INVARIANT: of equal submissions at most one is graded at a time, and one of a job beside it: a request never waits for a
job, which has a lower priority. Only verdicts that will not change are cached: never internal_error, and never
time_limit_exceeded, because a busy machine can cause it. No client gets the verdict of another one, which has the times
of its run, or learns from the time of an answer that it was graded before. At most `num_entries` verdicts and about
`num_entries` * 48 KiB are cached; the least recently used verdict is evicted first.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from dataclasses import replace

from cachetools import LRUCache

from nouscoder.domain.submission import Submission, TestsReference
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.formats.body import canonical_parts
from nouscoder.verifier.access.caller import current_caller
from nouscoder.verifier.grading.grader import GraderDecorator, Grading, OnOutcome, QueueFull
from nouscoder.verifier.observe.metrics import VerifierMetrics

_NOT_CACHED = frozenset({VerdictKind.INTERNAL_ERROR, VerdictKind.TIME_LIMIT_EXCEEDED})
_KEYED_CHARS = 2_000_000  # of the program
_BLOCKING_BYTES = 256 * 1024  # of tests that are digested on the event loop; the rest in a thread
_ENTRY_BYTES = 48 * 1024  # a larger verdict counts as several entries
_OUTCOME_BYTES = 200  # a TestOutcome with its numbers


class CachedGrader(GraderDecorator):
    """Grades with `inner` behind a cache of verdicts."""

    def __init__(self, inner: Grading, metrics: VerifierMetrics, num_entries: int, max_followers: int = 1024) -> None:
        super().__init__(inner)
        self._metrics = metrics
        self._max_followers = max_followers
        self._followers = 0
        self._known: LRUCache[bytes, Verdict] = LRUCache(num_entries, getsizeof=_num_entries)
        self._running: dict[tuple[bytes, bool], asyncio.Future[Verdict | None]] = {}

    @property
    def unfinished(self) -> int:
        """Submissions that wait or run, including those that wait for an equal one."""
        return self._inner.unfinished + self._followers

    async def grade(self, submission: Submission, on_outcome: OnOutcome | None = None) -> Verdict:
        """See `Grader.grade`. A verdict from the cache or from an equal submission has `cached` set."""
        digest = submission.tests_digest or await _tests_digest(submission)
        key = _key(submission, digest)
        if key is None:
            return await self._inner.grade(submission, on_outcome)
        submission = replace(submission, tests_digest=digest)
        begun = time.monotonic()
        in_background = current_caller().in_background
        while True:
            verdict = self._known.get(key) or await self._follow(key, in_background)
            if verdict is not None:
                return self._again(verdict, begun, on_outcome)
            if (key, in_background) not in self._running:
                return await self._lead(key, in_background, submission, on_outcome)

    async def _follow(self, key: bytes, in_background: bool) -> Verdict | None:
        """The verdict of an equal submission in progress; None when there is none or it got no usable verdict."""
        running = self._running.get((key, in_background))
        if running is None:
            return None
        if self._followers >= self._max_followers:
            raise QueueFull(1)
        self._followers += 1
        try:
            return await asyncio.shield(running)
        finally:
            self._followers -= 1

    async def _lead(
        self, key: bytes, in_background: bool, submission: Submission, on_outcome: OnOutcome | None
    ) -> Verdict:
        running: asyncio.Future[Verdict | None] = asyncio.get_running_loop().create_future()
        self._running[key, in_background] = running
        verdict: Verdict | None = None
        try:
            verdict = await self._inner.grade(submission, on_outcome)
            if verdict.kind not in _NOT_CACHED and _num_entries(verdict) <= self._known.maxsize:
                self._known[key] = verdict
            return verdict
        finally:
            del self._running[key, in_background]
            running.set_result(None if verdict is None or verdict.is_ours else verdict)

    def _again(self, verdict: Verdict, begun: float, on_outcome: OnOutcome | None) -> Verdict:
        verdict = replace(verdict, cached=True, duration_s=time.monotonic() - begun)
        self._metrics.graded(verdict, current_caller().client)
        if on_outcome is not None:
            for outcome in verdict.tests:
                on_outcome(outcome)
        return verdict


def _num_entries(verdict: Verdict) -> int:
    """How many entries of the cache a verdict takes, by an estimate of its size."""
    failure = verdict.first_failure
    texts = [] if failure is None else [failure.input, failure.expected, failure.output, failure.stderr]
    texts += [outcome.stderr for outcome in verdict.tests if outcome.stderr]
    num_bytes = _OUTCOME_BYTES * len(verdict.tests) + 4 * sum(map(len, (verdict.detail, *texts)))
    return 1 + num_bytes // _ENTRY_BYTES


async def _tests_digest(submission: Submission) -> str:
    """The digest of the tests, computed without blocking the event loop; "" for tests that have none."""
    if isinstance(submission.tests, TestsReference):
        return submission.tests.digest
    digest = hashlib.sha256()
    parts = canonical_parts(submission.tests)

    def read(most_bytes: float) -> bool:
        """Digest about this many bytes more. Returns whether all tests are digested."""
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
    """A digest of all that the verdict depends on; None for programs that are too large and tests without a digest.

    The problem id is part of it unless every test runs: it decides the order of the tests, and so the first failure. A
    submission without a problem id thus never gets a verdict from a learned order.
    """
    source = submission.code if submission.code is not None else submission.completion or ""
    files = [part for item in sorted(submission.files.items()) for part in item]
    if not tests_digest or sum(map(len, files), len(source)) > _KEYED_CHARS:
        return None
    problem_id = submission.problem_id if submission.stop_on_first_failure else ""
    short = replace(
        submission,
        tests=TestsReference(tests_digest),
        tests_digest="",
        problem_id="",
        language="",
        other_languages=(),
        code="",
        completion=None,
        files={},
    )
    key = hashlib.blake2b(repr(short).encode("utf8", "surrogatepass"), digest_size=32)
    # Encoded, because repr() of some long texts takes a second.
    kind = "code" if submission.code is not None else "completion"
    languages = submission.languages
    for text in (current_caller().client, source, problem_id, str(len(languages)), *languages, kind, *files):
        part = text.encode("utf8", "surrogatepass")
        key.update(len(part).to_bytes(8, "big") + part)
    return key.digest()
