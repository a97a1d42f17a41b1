"""Callers that wait for work: a queue (`Line`) for each kind of work, and as many are woken as there is work for.

A caller waits behind those who came before it. If nobody waits, it looks for work itself first. `wake` serves the line
from its front: it looks for work for the first caller, then for the next, until nothing is left. So a change costs one
look for each caller that gets work, and at most one more. While somebody waits, the broker asks Redis every
LOOK_AGAIN_S how much work there is: this finds work that came through another broker.

INVARIANT: work that `wake` announces while callers wait goes to one of them, unless another broker leases it. Work that
was leased for a caller reaches it, even if its time ends meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from nouscoder.broker.errors import BrokerError

Answer = TypeVar("Answer")

LOOK_AGAIN_S = 0.25
MAX_WAIT_S = 30.0
_MAX_KNOWN = 10_000


@dataclass(frozen=True, slots=True)
class AvailableWork:
    """What could be leased at one instant, in rollouts and batches; `policy` names the newest policy."""

    tasks: int
    gradings: int
    batches: int
    policy: str


@dataclass(frozen=True, slots=True)
class Found(Generic[Answer]):
    """What a look found, whether that ends the wait, and how much work is left for the next caller."""

    answer: Answer
    is_enough: bool
    left: int = 0


Look = Callable[[], Awaitable[Found[Answer]]]


@dataclass(slots=True, eq=False)
class _Waiter(Generic[Answer]):
    look: Look[Answer]
    answer: asyncio.Future[Answer]


class Line:
    """Callers that wait for one kind of work, first come, first served."""

    def __init__(self) -> None:
        self._waiters: OrderedDict[_Waiter[Any], None] = OrderedDict()
        self._changes = 0
        self._server: asyncio.Task[None] | None = None
        self._served: _Waiter[Any] | None = None
        self._is_dismissed = False
        self._is_dry = False  # the last look left no work, and nothing has changed since
        self._known: set[str] = set()

    def __len__(self) -> int:
        return len(self._waiters)

    def wake(self) -> None:
        """There may be work: give it to those who wait."""
        self._changes += 1
        self._is_dry = False
        self._begin_to_serve()

    async def wait(self, caller: str, look: Look[Answer], nothing: Answer, wait_s: float) -> Answer:
        """The answer of `look` as soon as it is enough; `nothing` after `wait_s` seconds, or when dismissed.

        A new caller always looks once itself: there may be work that only this caller can get.
        """
        if not (self._waiters or self._is_dry) or wait_s <= 0 or caller not in self._known:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known.add(caller)
            seen = self._changes
            found = await look()
            self._is_dry = not found.left and seen == self._changes
            if found.is_enough or wait_s <= 0:
                return found.answer
        waiter = _Waiter(look, asyncio.get_running_loop().create_future())
        self._waiters[waiter] = None
        if not self._is_dry:
            self._begin_to_serve()
        try:
            await asyncio.wait({waiter.answer}, timeout=wait_s)
            while self._served is waiter and not waiter.answer.done():
                # Its time ended during a look for it. What that look leases must not be lost.
                await asyncio.wait({waiter.answer}, timeout=LOOK_AGAIN_S)
        finally:
            self._waiters.pop(waiter, None)
        is_answered = waiter.answer.done() and not waiter.answer.cancelled()
        return waiter.answer.result() if is_answered else nothing

    def dismiss(self) -> None:
        """End every wait."""
        self._is_dismissed = True
        for waiter in self._waiters:
            if waiter is not self._served:
                waiter.answer.cancel()

    def _begin_to_serve(self) -> None:
        if self._waiters and (self._server is None or self._server.done()):
            self._server = asyncio.create_task(self._serve(), name="serve a line of callers")

    async def _serve(self) -> None:
        while self._waiters and not self._is_dismissed:
            seen = self._changes
            waiter = next(iter(self._waiters))
            self._served = waiter
            try:
                found = await waiter.look()
            except Exception as error:
                if waiter in self._waiters:
                    waiter.answer.set_exception(error)
                self._waiters.pop(waiter, None)
                return  # the next `wake` serves the others
            finally:
                self._served = None
            if found.is_enough or self._is_dismissed:
                if waiter in self._waiters:  # otherwise its client is gone, and its leases expire
                    waiter.answer.set_result(found.answer)
                self._waiters.pop(waiter, None)
            if seen == self._changes and not (found.is_enough and found.left):
                self._is_dry = not found.left
                return


class Waits:
    """Every wait of the broker. `look` asks Redis how much work there is; `end` ends all waits, for a drain."""

    def __init__(self, look: Callable[[], Awaitable[AvailableWork]]) -> None:
        self.tasks = Line()
        self.grading = Line()
        self.batches = Line()
        self.policy_changes = 0
        self.ended = False
        self._num_callers = 0  # in a line, in their own first look, or waiting for a policy
        self._new_policy = asyncio.Event()
        self._look = look
        self._looking: asyncio.Task[None] | None = None
        self._policy = ""

    def end(self) -> None:
        """End every wait, now and from now on."""
        self.ended = True
        if self._looking is not None:
            self._looking.cancel()
        for line in (self.tasks, self.grading, self.batches):
            line.dismiss()
        self._announce_policy()

    def wake(self, work: AvailableWork) -> None:
        """Wake as many callers as there is work for, and all that wait for a policy if it is new."""
        for line, amount in ((self.tasks, work.tasks), (self.grading, work.gradings), (self.batches, work.batches)):
            if amount > 0:
                line.wake()
        if work.policy != self._policy:
            self._policy = work.policy
            self._announce_policy()

    def _announce_policy(self) -> None:
        self.policy_changes += 1
        self._new_policy.set()
        self._new_policy = asyncio.Event()

    async def until(self, line: Line, caller: str, look: Look[Answer], nothing: Answer, wait_s: float) -> Answer:
        """Wait in `line` for at most `wait_s` seconds, and never longer than MAX_WAIT_S."""
        self._keep_looking()
        self._num_callers += 1
        try:
            return await line.wait(caller, look, nothing, 0.0 if self.ended else min(wait_s, MAX_WAIT_S))
        finally:
            self._num_callers -= 1

    async def next_policy(self, seen: int) -> None:
        """Return once the policy has changed since `policy_changes` was `seen`, or after MAX_WAIT_S."""
        self._keep_looking()
        if self.policy_changes != seen:
            return
        self._num_callers += 1
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await self._new_policy.wait()
        except TimeoutError:
            return
        finally:
            self._num_callers -= 1

    def _keep_looking(self) -> None:
        if not self.ended and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look_again(), name="look for work")

    async def _look_again(self) -> None:
        """Runs while somebody waits. Ignores a Redis that does not answer: the looks of the callers report that."""
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            if not self._num_callers:
                return
            try:
                self.wake(await self._look())
            except BrokerError:
                continue
