"""Repeats the grading of a share of the submissions on a second runner, because a runner may have been taken over.

INVARIANT: the answer to a repeated submission is one that two runners gave, or the first one when no two agree. A
runner is accused only if it was the only one used and two others agree against it. No limit may be involved, because
limits depend on the load.

A program may print something else each time, and so make honest runners disagree. So at most one runner is accused in
ACCUSE_EVERY_S seconds: hostile programs cannot empty the pool.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from nouscoder.domain.submission import Submission
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.verifier.grading.grader import GraderDecorator, Grading, OnOutcome, QueueFull
from nouscoder.verifier.sandbox.base import Sandbox
from nouscoder.verifier.sandbox.runners.launch import SecondRun, choosing

log = logging.getLogger(__name__)

ACCUSE_EVERY_S = 60.0
_LIMITS = (VerdictKind.TIME_LIMIT_EXCEEDED, VerdictKind.MEMORY_LIMIT_EXCEEDED)


@runtime_checkable
class Runners(Protocol):
    """The runners of a backend."""

    def has_other(self, avoided: frozenset[str]) -> bool:
        """Whether a runner beside these is ready."""
        ...

    async def accuse(self, name: str) -> None:
        """Quarantine a runner whose answer two others contradict."""
        ...


class SecondRunnerGrader(GraderDecorator):
    """`share` is the share of submissions that are repeated, `count` counts how that ended."""

    def __init__(
        self,
        inner: Grading,
        runners: Runners,
        share: float,
        count: Callable[[SecondRun], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self._runners = runners
        self._share = share
        self._count = count
        self._clock = clock
        self._random = random.SystemRandom()
        self._next_accusation_s = 0.0

    async def grade(self, submission: Submission, on_outcome: OnOutcome | None = None) -> Verdict:
        """See `Grading`. A repeated submission takes twice its time, after a disagreement three times."""
        if self._random.random() >= self._share:
            return await self._inner.grade(submission, on_outcome)
        with choosing() as choice:
            first = await self._inner.grade(submission, on_outcome)
        if not choice.used or first.kind is VerdictKind.INTERNAL_ERROR:
            return first
        verdict, ended = await self._compared(submission, first, frozenset(choice.used))
        self._count(ended)
        return verdict

    async def _compared(
        self, submission: Submission, first: Verdict, of_first: frozenset[str]
    ) -> tuple[Verdict, SecondRun]:
        second, of_second = await self._repeated(submission, of_first)
        if second is None:
            return first, SecondRun.NO_RUNNER
        if _agree(first, second):
            return first, SecondRun.AGREED
        third, _ = await self._repeated(submission, of_first | of_second)
        if third is None:
            return first, SecondRun.NO_RUNNER
        overruled = _agree(second, third)
        if not any(verdict.kind in _LIMITS for verdict in (first, second, third)):
            await self._accuse(of_first if overruled else of_second)
        return (third, SecondRun.OVERRULED) if overruled else (first, SecondRun.CONFIRMED)

    async def _repeated(self, submission: Submission, avoided: frozenset[str]) -> tuple[Verdict | None, frozenset[str]]:
        """The verdict of other runners and their names; None when there are none."""
        if not self._runners.has_other(avoided):
            return None, frozenset()
        try:
            with choosing(avoided) as choice:
                verdict = await self._inner.grade(submission)
        except QueueFull:
            return None, frozenset()
        return (None if verdict.kind is VerdictKind.INTERNAL_ERROR else verdict), frozenset(choice.used)

    async def _accuse(self, names: frozenset[str]) -> None:
        log.error("runners gave different verdicts", extra={"runners": sorted(names)})
        if len(names) == 1 and self._clock() >= self._next_accusation_s:
            self._next_accusation_s = self._clock() + ACCUSE_EVERY_S
            await self._runners.accuse(*names)


def with_second_runner(
    grader: Grading, backends: Sequence[Sandbox], share: float, count: Callable[[SecondRun], None]
) -> Grading:
    """The grader, with a second runner if a backend has runners: pods or containers."""
    pools = [one for one in backends if isinstance(one, Runners)]
    return SecondRunnerGrader(grader, _Pools(pools), share, count) if pools else grader


class _Pools:
    """The runners of all backends that have some. Implements `Runners`; no two have the same name."""

    def __init__(self, pools: Sequence[Runners]) -> None:
        self._pools = pools

    def has_other(self, avoided: frozenset[str]) -> bool:
        """See `Runners`."""
        return any(pool.has_other(avoided) for pool in self._pools)

    async def accuse(self, name: str) -> None:
        """See `Runners`. The pools that do not have it do nothing."""
        for pool in self._pools:
            await pool.accuse(name)


def _agree(one: Verdict, other: Verdict) -> bool:
    """Whether both accept or both refuse. Which test fails first may depend on what was learned meanwhile."""
    return (one.kind is VerdictKind.ACCEPTED) is (other.kind is VerdictKind.ACCEPTED)
