"""The worker loop: leases tasks from the broker, makes rollouts from them, submits them, and follows the policy.

INVARIANT: every leased task is submitted at most once, under a lease that this worker holds. It leaves `_held` exactly
once: submitted, lost with its lease, refused (its lease expires, and another worker leases the task), or given back:
when a tool does not answer, or when the worker stops, other workers get the task at once, with the tokens of a long
rollout; when no rollout can be made of its problem, the broker does not ask it again; when its agent is gone, the
broker gives the rollout up. At most `_max_held` tasks are held at a time, and as many more as wait for a tool or an
agent, at most `_max_held` too. A rollout that the broker refuses costs only itself.

    loop     waits for                         does
    pull     a policy, and room for tasks      lease_tasks -> rollouts.start
    submit   rollouts that ended               submit_rollouts; never waits for grading
    follow   a newer policy                    loads it into the engine (weights/policies.py)
    drop     leases that were lost             cancels their rollouts; the engine stops sampling them
    return   rollouts without tool or agent    release_leases
    report   new tokens of a long rollout      keep_partials (partials.py)
The lease keeper sends heartbeats. While the broker does not answer, the loops wait and rollouts continue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from nouscoder.domain.lease import LeasedTask, LeaseLoss, WorkReport
from nouscoder.domain.rollout import Rollout
from nouscoder.generation.engines.base import EngineError, EngineStopped
from nouscoder.generation.environments.base import ProblemRefused, SessionAbandoned, ToolUnavailable
from nouscoder.generation.rollouts import Rollouts
from nouscoder.generation.weights.policies import Policies, follow_policies
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.channel import PeerError, PeerUnreachable
from nouscoder.rpc.server import run_until_stopped
from nouscoder.rpc.worker import LeaseKeeper

log = logging.getLogger(__name__)

_LEASE_WAIT_S = 20.0
_REFUSED_WAIT_S = 1.0
_FINISHED_WAIT_S = 2.0
_DROP_EVERY_S = 0.25
_SUBMIT_LIMIT_S = 2.0
# An engine that has sampled nothing for so long when a lease is lost for want of progress will sample nothing more.
_HUNG_S = 60.0


@dataclass(slots=True)
class _HeldTask:
    lease_id: str
    future: asyncio.Task[Rollout]


class RolloutWorker:
    """Holds up to `max_running` tasks, and `prefetch` more, so that the engine never waits for the broker."""

    def __init__(
        self,
        broker: BrokerClient,
        rollouts: Rollouts,
        policies: Policies,
        max_running: int,
        prefetch: int,
        partial_every_tokens: int = 0,
    ) -> None:
        self._broker = broker
        self._rollouts = rollouts
        self._policies = policies
        self._max_held = max_running + prefetch
        # Leasing for each free place would take one call per rollout.
        self._ask_for = max(1, prefetch // 2)
        self._partials = rollouts.partial_reports(broker.keep_partials, partial_every_tokens)
        self._held: dict[str, _HeldTask] = {}
        self._ended: list[Rollout] = []
        self._some_ended = asyncio.Event()
        # Lease id, why its problem is refused, if it is, and whether an agent has abandoned it.
        self._returned: list[tuple[str, str, bool]] = []
        self._some_returned = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    async def run(self) -> None:
        """Work until cancelled. Raises PolicyUnusable without a policy, and EngineStopped when the engine hangs.

        Raises PeerError when the broker refuses to lease while nothing is held.
        """
        async with self._broker.keep_leases(self._report) as keeper:
            try:
                loops = (
                    *(self._pull(keeper), self._submit(keeper), self._drop(keeper), self._return_leases()),
                    follow_policies(self._broker.watch_policy(), self._policies),
                    self._partials.run(self._leases),
                )
                await run_until_stopped(asyncio.Event(), *loops)
            finally:
                # Submit what is finished, and save the tokens of long rollouts for other workers.
                pairs = [
                    (held.lease_id, held.future.result()) for held in self._held.values() if _has_rollout(held.future)
                ]
                if pairs:
                    await _at_the_end(self._broker.submit_rollouts(pairs), "rollouts lost", num_rollouts=len(pairs))
                await _at_the_end(self._partials.send_last(self._leases()), "partial rollouts lost")
                for rollout_id in list(self._held):
                    self._leave(rollout_id, keeper).future.cancel()
                await _at_the_end(self._broker.release_leases(), "leases not given back, they run out")

    async def _pull(self, keeper: LeaseKeeper) -> None:
        log.info("waiting for the first policy")
        await self._policies.wait_for(0)
        while True:
            await self._room.wait()
            if self._num_free < 1:  # a tool answered meanwhile
                self._room.clear()
                continue
            try:
                leased = await self._broker.lease_tasks(self._num_free, _LEASE_WAIT_S)
            except PeerUnreachable as error:
                log.warning("waiting for the broker", extra={"reason": str(error)})
                continue
            except PeerError as error:
                if not self._held:
                    raise  # nothing is lost: the service starts afresh
                log.error("the broker leases nothing", extra={"reason": str(error)})
                await asyncio.sleep(_REFUSED_WAIT_S)
                continue
            for task in leased.tasks:
                self._start(task, keeper)
            if leased.run_finished:
                await asyncio.sleep(_FINISHED_WAIT_S)

    def _start(self, leased: LeasedTask, keeper: LeaseKeeper) -> None:
        rollout_id = leased.task.rollout_id
        keeper.add(leased.lease)
        known = self._held.get(rollout_id)
        if known is not None:  # this worker got the task again after its lease was lost: continue under the new one
            keeper.drop(known.lease_id)
            known.lease_id = leased.lease.lease_id
            return
        future = self._rollouts.start(leased.task, leased.kept)
        self._held[rollout_id] = _HeldTask(leased.lease.lease_id, future)
        self._count_room()
        future.add_done_callback(lambda ended: self._take(rollout_id, ended, keeper))

    def _take(self, rollout_id: str, future: asyncio.Task[Rollout], keeper: LeaseKeeper) -> None:
        held = self._held.get(rollout_id)
        if held is None or held.future is not future:
            return
        error = None if future.cancelled() else future.exception()
        if isinstance(error, (ToolUnavailable, ProblemRefused, SessionAbandoned)):
            refused = str(error) if isinstance(error, ProblemRefused) else ""
            log.warning("task given back", extra={"rollout_id": rollout_id, "reason": str(error)})
            lease_id = self._leave(rollout_id, keeper).lease_id
            self._returned.append((lease_id, refused, isinstance(error, SessionAbandoned)))
            self._some_returned.set()
            return
        if future.cancelled() or error is not None:
            # If other workers fail too, the broker counts the deliveries and abandons the task.
            log.error("task abandoned", extra={"rollout_id": rollout_id, "reason": str(error)})
            self._leave(rollout_id, keeper)
            return
        self._ended.append(future.result())
        self._some_ended.set()

    async def _submit(self, keeper: LeaseKeeper) -> None:
        while True:
            await self._some_ended.wait()
            self._some_ended.clear()
            ended, self._ended = self._ended, []
            # A rollout whose lease was lost in the meantime is no longer in `_held`.
            pairs = [(self._held[r.rollout_id].lease_id, r) for r in ended if r.rollout_id in self._held]
            if not pairs:
                continue
            try:
                refused = await self._hand_in(pairs)
            except PeerUnreachable as error:
                # The leases have expired by now. When the broker is back, it leases the same tasks again.
                log.warning("rollouts lost", extra={"num_rollouts": len(pairs), "reason": str(error)})
                refused = frozenset()
            if refused:
                log.warning("rollouts refused, their leases were lost", extra={"num_rollouts": len(refused)})
            for _, rollout in pairs:
                if rollout.rollout_id in self._held:
                    self._leave(rollout.rollout_id, keeper)

    async def _return_leases(self) -> None:
        while True:
            await self._some_returned.wait()
            self._some_returned.clear()
            returned, self._returned = self._returned, []
            for reason, abandoned in dict.fromkeys((reason, abandoned) for _, reason, abandoned in returned):
                leases = [name for name, *why in returned if why == [reason, abandoned]]
                try:
                    await self._broker.release_leases(leases, reason, abandoned=abandoned)
                except PeerError as error:
                    log.warning("leases not given back, they run out", extra={"reason": str(error)})

    async def _hand_in(self, pairs: Sequence[tuple[str, Rollout]]) -> frozenset[str]:
        """Submit together, or one by one when the broker refuses that. Answers those whose lease was lost."""
        try:
            return await self._broker.submit_rollouts(pairs)
        except PeerUnreachable:
            raise
        except PeerError as error:
            if len(pairs) == 1:
                # Its lease expires, and the broker counts the delivery.
                extra = {"rollout_id": pairs[0][1].rollout_id, "reason": str(error)}
                log.error("the broker refuses a rollout", extra=extra)
                return frozenset()
        refused: frozenset[str] = frozenset()
        for pair in pairs:
            refused |= await self._hand_in([pair])
        return refused

    def _leases(self) -> dict[str, str]:
        """The lease id of each rollout in progress."""
        return {name: held.lease_id for name, held in self._held.items() if not held.future.done()}

    def _report(self) -> WorkReport:
        progress = self._rollouts.progress(self._held)
        by_lease = {held.lease_id: progress[rollout_id] for rollout_id, held in self._held.items()}
        versions = self._rollouts.oldest_versions()
        oldest = {held.lease_id: versions[name] for name, held in self._held.items() if name in versions}
        return WorkReport(by_lease, self._rollouts.engine.paused, oldest)

    async def _drop(self, keeper: LeaseKeeper) -> None:
        """Raises EngineStopped when leases are lost and the engine hangs."""
        loop, engine = asyncio.get_running_loop(), self._rollouts.engine
        known_tokens, moved_s = -1, loop.time()
        while True:
            await asyncio.sleep(_DROP_EVERY_S)
            num_tokens = engine.num_tokens
            if num_tokens != known_tokens or engine.paused or not engine.num_running + engine.num_waiting:
                known_tokens, moved_s = num_tokens, loop.time()
            self._count_room()  # a rollout may have begun to wait for a tool
            lost = keeper.take_lost()
            dropped = {name: lost[held.lease_id] for name, held in self._held.items() if held.lease_id in lost}
            for rollout_id, reason in dropped.items():
                log.info("lease lost, rollout cancelled", extra={"rollout_id": rollout_id, "reason": reason.value})
                self._leave(rollout_id, keeper).future.cancel()
            still_s = loop.time() - moved_s
            if LeaseLoss.PROGRESS in dropped.values() and still_s >= _HUNG_S:
                raise EngineStopped(f"the engine has sampled no token for {still_s:.0f} s: it hangs")

    def _leave(self, rollout_id: str, keeper: LeaseKeeper) -> _HeldTask:
        held = self._held.pop(rollout_id)
        keeper.drop(held.lease_id)
        self._count_room()
        return held

    @property
    def _num_free(self) -> int:
        waiting = min(self._rollouts.num_waiting_for_tools, self._max_held)
        return self._max_held + waiting - len(self._held)

    def _count_room(self) -> None:
        if self._num_free >= self._ask_for:
            self._room.set()
        else:
            self._room.clear()


async def _at_the_end(call: Awaitable[object], otherwise: str, **extra: object) -> None:
    """Make a call of a worker that stops, within its limit. The log says what becomes of it `otherwise`."""
    try:
        async with asyncio.timeout(_SUBMIT_LIMIT_S):
            await call
    except (TimeoutError, PeerError, EngineError) as error:
        log.warning(otherwise, extra={**extra, "reason": str(error)})


def _has_rollout(future: asyncio.Task[Rollout]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
