"""Identical submissions to identical tests: graded once, remembered, and merged while in flight.

INVARIANT: of equal submissions at most one is being graded at any time; a verdict is remembered only when it says
something lasting of the candidate (never internal_error, which is ours, nor time_limit_exceeded, which a busy machine
can cause); at most `num_entries` are remembered, the least recently used go first.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from dataclasses import replace
from typing import Protocol

from nouscoder.domain.submission import Submission
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.verifier.grading.grader import OnOutcome, QueueFull
from nouscoder.verifier.observe.metrics import VerifierMetrics

_PASSING = frozenset({VerdictKind.INTERNAL_ERROR, VerdictKind.TIME_LIMIT_EXCEEDED})
_KEYED_CHARS = 2_000_000
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
        key = _key(submission)
        if key is None:
            return await self._inner.grade(submission, on_outcome)
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


def _key(submission: Submission) -> bytes | None:
    """A digest of all that bears on the verdict; None for submissions too large or too deep to be worth one.

    A problem id bears on which failure is met first, in an order that was learned; who gives none is never answered by
    such a verdict. Where every test is run, the order bears on nothing.
    """
    if not submission.stop_on_first_failure:
        submission = replace(submission, problem_id="")
    try:
        text = repr(submission)
    except (RecursionError, ValueError):
        return None
    if len(text) > _KEYED_CHARS:
        return None
    return hashlib.blake2b(text.encode("utf8", "surrogatepass"), digest_size=32).digest()
