"""The lanes of one submission: sandboxes of its own, each running one of its tests at a time.

A lane more is opened beside the first only while a slot is idle, nobody waits, and the tests left would keep each lane
busy for well longer than it takes to open one; so a loaded service gives every submission one lane.

INVARIANT: all lanes but one have an extra slot, which is given back when a lane closes; a lane closes before its next
test when somebody waits and another lane goes on, and at once when the verdict cannot depend on its test any more. A
lane that breaks costs the test that it had, which is run again in another; a submission of which one has broken gets
no further ones, and only its last lane's failure is its own. When `run` ends, in whatever way, no lane, no task and no
extra slot is left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from nouscoder.domain.verdict import TestOutcome
from nouscoder.verifier.grading.fair_queue import FairSlots
from nouscoder.verifier.grading.progress import Progress
from nouscoder.verifier.grading.runs import Ran, Runs
from nouscoder.verifier.sandbox.base import CompileFailed, SandboxError

# Times the opening of a lane: what each lane must have left to do for another one to be opened. Where one lane has
# three times as much, two end sooner by at least as much as the second one costs. Measured with `local` on two cores:
# opening takes 3.4 ms and a trivial test 2.5 ms (python); compiling C++ takes 0.5 s.
WORTH = 3.0

_CLOSING = -1
_Lane = asyncio.Task[None]


class Work(Protocol):
    """What lanes do, and whom they tell."""

    def open(self) -> AbstractAsyncContextManager[Runs]:
        """A fresh sandbox. Raises CompileFailed, SandboxError and TimeoutError on entry."""
        ...

    async def run(self, runs: Runs, index: int) -> Ran:
        """One test. Raises SandboxError and TimeoutError."""
        ...

    def told(self, outcome: TestOutcome) -> None:
        """An outcome is certain."""
        ...

    def lane_opened(self) -> None:
        """A lane beside others is being opened."""
        ...

    def lane_broke(self, error: Exception) -> None:
        """A lane is closed because of a failure of ours; others go on."""
        ...


class Lanes:
    """The lanes of one attempt at a submission whose own slot is taken."""

    def __init__(
        self,
        progress: Progress,
        slots: FairSlots,
        work: Work,
        most: int,
        least_left_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """At most `most` at once; none is added while those there are have less than `least_left_s` seconds left."""
        self._progress = progress
        self._slots = slots
        self._work = work
        self._most = most
        self._least_left_s = least_left_s
        self._clock = clock
        self._at: dict[_Lane, int | None] = {}  # lanes that go on, and the test of each; None while it opens
        self._num_lanes = 0  # with those that are closing
        self._open_s: float | None = None  # the quickest opening so far
        self._tests_s = 0.0
        self._num_tests = 0
        self._trouble: Exception | None = None

    async def run(self) -> None:
        """Run tests until the verdict is known. Raises what the last lane raised, when that ended it before."""
        if self._progress.is_known:
            return
        async with asyncio.TaskGroup() as group:
            self._begin(group)
        if self._trouble is not None:
            raise self._trouble
        if not self._progress.is_known:
            raise SandboxError("every lane was closed before the verdict was known")

    def _begin(self, group: asyncio.TaskGroup) -> None:
        lane = group.create_task(self._lane(group))
        self._at[lane] = None
        self._num_lanes += 1
        lane.add_done_callback(self._closed)  # and not in the lane, which may be cancelled before its first step

    def _closed(self, lane: _Lane) -> None:
        self._at.pop(lane, None)
        self._num_lanes -= 1
        if self._num_lanes:
            self._slots.give_back_extra()

    async def _lane(self, group: asyncio.TaskGroup) -> None:
        me = asyncio.current_task()
        assert me is not None
        begun_s = self._clock()
        try:
            async with self._work.open() as runs:
                took_s = self._clock() - begun_s
                self._open_s = took_s if self._open_s is None else min(took_s, self._open_s)
                while (index := self._next(me, group)) is not None:
                    await self._test(runs, index)
                    self._abandon(me)
        except Exception as error:
            self._broke(me, error)

    def _next(self, me: _Lane, group: asyncio.TaskGroup) -> int | None:
        """The one place where a lane takes a test; None when it has to close."""
        leaves = self._slots.waiting and self._others_go_on(me)
        index = None if leaves else self._progress.take()
        if index is None:
            del self._at[me]
            return None
        self._at[me] = index
        while self._is_worth_another() and self._slots.take_extra():
            self._work.lane_opened()
            self._begin(group)
        return index

    def _others_go_on(self, me: _Lane) -> bool:
        return any(index is not None for lane, index in self._at.items() if lane is not me)

    def _is_worth_another(self) -> bool:
        if len(self._at) >= self._most or not self._num_tests or self._open_s is None:
            return False
        left_s = self._progress.num_left * self._tests_s / self._num_tests / len(self._at)
        return left_s > max(self._least_left_s, WORTH * self._open_s)

    async def _test(self, runs: Runs, index: int) -> None:
        begun_s = self._clock()
        try:
            result, ruling = await self._work.run(runs, index)
            certain = await self._progress.record(index, result, ruling)
        except BaseException:
            self._progress.give_back(index)
            raise
        self._num_tests += 1
        self._tests_s += self._clock() - begun_s
        for outcome in certain:
            self._work.told(outcome)

    def _abandon(self, me: _Lane) -> None:
        """Close lanes on whose tests nothing depends any more, and those that open while there is nothing to take."""
        for lane, index in list(self._at.items()):
            needed = self._progress.num_left if index is None else self._progress.counts(index)
            if lane is not me and not needed:
                del self._at[lane]
                lane.cancel()

    def _broke(self, me: _Lane, error: Exception) -> None:
        was_needed = self._at.pop(me, _CLOSING) is not _CLOSING
        self._most = 1
        if isinstance(error, CompileFailed) and self._open_s is not None:
            error = SandboxError("a further sandbox did not compile what the first one did")
        if was_needed and not self._at:
            self._trouble = error
        else:
            self._work.lane_broke(error)
