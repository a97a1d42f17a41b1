"""The broker of one run: every call that a worker can make, on domain records.

All state is in Redis (store.py), so the broker may be killed at any time and started again. Each part of the state has
a module: streams.py (single rollouts under lease), batches.py (and policies), records.py, curriculum.py.

INVARIANT: when a call has returned, Redis holds its result; every call may be repeated after its response was lost.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from nouscoder.broker import batches, operations, recovery, streams
from nouscoder.broker.batches import BatchLease
from nouscoder.broker.curriculum import offer, open_curriculum, read_state, restore_state
from nouscoder.broker.errors import BrokerUnavailable, InvalidRequest, RedisFull, Refused, UnknownProblem
from nouscoder.broker.operations import Operations
from nouscoder.broker.records import Partials, Records, new_record_name, open_record_store
from nouscoder.broker.recovery import check_settings, check_state, note_problems
from nouscoder.broker.redis_client import Stages
from nouscoder.broker.rewards import Rewards
from nouscoder.broker.store import MemoryWatch, RunRules, Store, groups_wanted
from nouscoder.broker.streams import Beat, LeasedWork, Sampled, Stream, parse_lease
from nouscoder.broker.wakeups import Found, Waits
from nouscoder.config import Config
from nouscoder.config.generation import AgentSection
from nouscoder.data.problem_index import ProblemIndex
from nouscoder.domain.curriculum import CurriculumState
from nouscoder.domain.learner_state import Restored, TrainedState
from nouscoder.domain.lease import LeasedTasks, LeaseLoss, RecordedGradings
from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.run_status import Ledger, RolloutState, RunStatus
from nouscoder.domain.stall import Blocker, judge
from nouscoder.domain.verdict import Verdict
from nouscoder.rpc.pairs import HEADER
from nouscoder.store.blobs import BlobsUnavailable
from nouscoder.store.tests import UnknownTests

log = logging.getLogger(__name__)

# A script that leases more keeps Redis busy for too long.
MAX_LEASED = 1024
# Calls that ask for the state of the run soon report that Redis is away.
_STATUS_LIMIT_S = 5.0
SubmittedRecord = tuple[str, bytes, bytes]  # lease id, encoded header, record


class Broker:
    """The run `config.run.name` on the Redis at `url`, over the problems of an index.

    Raises Unusable when the configured curriculum or reward cannot be used.
    """

    def __init__(self, config: Config, url: str, problems: ProblemIndex, stages: Stages | None = None) -> None:
        self._config = config
        self._stages = stages
        self.run = config.run.name
        self._problems = problems
        self._curriculum = open_curriculum(config, problems.problem_ids)
        self._cursor = 0  # may be outdated: each lease call returns the true one, which is in Redis
        # The highest cursor and number of groups that this process saw. A Redis that lost writes may have lower ones.
        self._furthest = 0
        self._most_groups = 0
        self.rules = RunRules.of(config.broker)
        self._rewards = Rewards(config)
        self.store = Store(url, config.run.name, self.rules)
        self._work = LeasedWork(self.store, config, problems, run_all_tests=self._rewards.run_all_tests)
        self.records = Records(self.store, open_record_store(config, self.store))
        self.waits = Waits(lambda: streams.read_available(self.store))
        self.operations = Operations(self.store, self.waits)
        self.memory = MemoryWatch(self.store)
        self.partials = Partials(self.store, self.memory, self.waits)

    async def check_state(self) -> None:
        """Raises Refused when Redis holds a run that began with other settings or problems."""
        await check_state(self.store, self._config, self._problems.all_ids)

    async def close(self) -> None:
        """End every wait and close the connections to Redis."""
        self.waits.end()
        await self.store.close()

    async def lease_tasks(self, worker_id: str, max_tasks: int, wait_s: float) -> LeasedTasks:
        """Lease rollouts to sample, admitting new groups where admission has room."""
        wanted = _bounded(max_tasks)

        async def look() -> Found[LeasedTasks]:
            first: int | None = None  # the true cursor, which a broker that was just started learns from an answer
            while True:
                cursor = self._cursor
                num_groups = groups_wanted(self.rules, wanted) if self.memory.pressure.admits else 0
                choices = await offer(self.store, self._curriculum, cursor, num_groups)
                answer = await streams.lease_entries(self.store, Stream.TASKS, worker_id, wanted, cursor, choices)
                self._cursor, self._furthest = answer.cursor, max(self._furthest, answer.cursor)
                self._most_groups = max(self._most_groups, answer.next_group)
                # Groups are admitted only if the offer contains the true cursor: otherwise offer again.
                was_offered = not choices or cursor <= answer.cursor <= choices[-1].place
                # Refused problems are skipped, and all may be refused.
                first = answer.cursor if first is None else first
                all_skipped = answer.cursor - first > 2 * len(self._problems.problem_ids) + len(choices)
                if answer.entries or answer.finished or was_offered or all_skipped:
                    tasks = await self._work.tasks(answer.entries)
                    leased = LeasedTasks(tasks, answer.finished)
                    return Found(leased, bool(tasks) or answer.finished, answer.left)

        return await self.waits.until(self.waits.tasks, worker_id, look, LeasedTasks(), wait_s)

    async def submit_rollouts(self, worker_id: str, rollouts: Sequence[SubmittedRecord]) -> list[str]:
        """Take sampled rollouts; returns the ids whose lease was lost. Raises InvalidRequest, and RedisFull."""
        if not rollouts:
            return []
        if not self.memory.pressure.takes:
            raise RedisFull(self.memory.pressure.reason)
        items = [_sampled(*submitted) for submitted in rollouts]
        await self.records.write({item.record: record for item, (_, _, record) in zip(items, rollouts, strict=True)})
        refused, work = await streams.submit_sampled(self.store, worker_id, items)
        self.waits.wake(work)
        return refused

    async def lease_grading(self, worker_id: str, max_rollouts: int, wait_s: float) -> RecordedGradings:
        """Lease rollouts to grade."""
        wanted = _bounded(max_rollouts)

        async def look() -> Found[RecordedGradings]:
            answer = await streams.lease_entries(self.store, Stream.GRADING, worker_id, wanted)
            gradings = await self._work.gradings(answer.entries)
            leased = RecordedGradings(gradings, answer.finished)
            return Found(leased, bool(gradings) or answer.finished, answer.left)

        return await self.waits.until(self.waits.grading, worker_id, look, RecordedGradings(), wait_s)

    async def read_tests(self, digest: str) -> AsyncIterator[bytes]:
        """A file of tests in pieces, for verifiers without the test store. Raises UnknownProblem, BrokerUnavailable."""
        try:
            async for piece in self._problems.tests.fetch(digest):
                yield piece
        except UnknownTests as error:
            raise UnknownProblem(str(error)) from None
        except BlobsUnavailable as error:
            raise BrokerUnavailable(f"the test store: {error}") from error

    async def submit_verdicts(self, worker_id: str, verdicts: Sequence[tuple[str, str, Verdict]]) -> list[str]:
        """Take verdicts; returns the rollouts refused because their lease was lost. Raises InvalidRequest."""
        if not verdicts:
            return []
        headers = await streams.read_headers(self.store, [rollout_id for _, rollout_id, _ in verdicts])
        rewards = [self._reward(header, verdict) for header, (_, _, verdict) in zip(headers, verdicts, strict=True)]
        refused, work = await streams.submit_graded(self.store, worker_id, verdicts, rewards)
        self.waits.wake(work)
        return refused

    async def lease_batch(self, worker_id: str, wait_s: float, run_id: str = "", num_batches: int = 0) -> BatchLease:
        """Lease the uncommitted batch, or the next one. Raises Behind: see batches.lease_batch."""

        async def look() -> Found[BatchLease]:
            lease_s = self._config.broker.batch_lease_s
            answer = await batches.lease_batch(self.store, worker_id, lease_s, run_id, num_batches)
            return Found(answer, answer.batch is not None or answer.run_finished)

        found = await look()  # in every call: nothing wakes a learner whose run Redis has forgotten
        leased = found.answer
        if not found.is_enough:
            leased = await self.waits.until(self.waits.batches, worker_id, look, BatchLease(), wait_s)
        if leased.batch is not None:
            self.waits.tasks.wake()  # groups that went stale freed slots
        return leased

    async def restore_run(self, trained: TrainedState) -> Restored:
        """Restore from the learner's state what Redis forgot. Raises Refused for another run."""
        check_settings(trained.identity, self._config, "the learner's run")
        restored = await recovery.restore(self.store, trained, self._most_groups, self._furthest)
        await restore_state(self.store, trained.curriculum)
        await note_problems(self.store, self._problems.all_ids, self._config.run.name)
        await self._wake_those_with_work()
        return restored

    async def read_curriculum(self) -> CurriculumState:
        """The cursor and the statistics of each problem, read at one instant."""
        return await read_state(self.store)

    async def commit_batch(self, batch_id: int, step: int, groups: Sequence[int] = ()) -> bool:
        """The batch was trained on, and the learner can repeat it from its disk. True: it was committed before.

        Raises Refused, and Behind: see batches.commit_batch.
        """
        already = await batches.commit_batch(self.store, batch_id, step, groups)
        self.waits.batches.wake()
        return already

    async def publish_policy(self, manifest: PolicyManifest) -> int:
        """Take a policy; returns the newest version. Raises Refused."""
        version = await batches.publish(self.store, manifest)
        await self._wake_those_with_work()
        return version

    async def watch_policy(self) -> AsyncIterator[PolicyManifest]:
        """The newest policy, then each newer one, until the broker stops."""
        known = -1
        while not self.waits.ended:
            seen = self.waits.policy_changes
            manifest = await batches.newest(self.store)
            if manifest is not None and manifest.policy_version > known:
                known = manifest.policy_version
                yield manifest
            await self.waits.next_policy(seen)

    async def heartbeat(
        self,
        worker_id: str,
        lease_ids: Sequence[str],
        progress: Sequence[int] = (),
        *,
        paused: bool = False,
        oldest_versions: Sequence[int | None] = (),
    ) -> dict[str, LeaseLoss]:
        """Extend leases; returns the lost ones, each with the reason.

        `progress` has a number for each lease, which changes when the work on it moves; empty: unknown. A lease whose
        number stays the same for broker.sampling_progress_s or grading_progress_s is lost, unless the worker is
        `paused`. `oldest_versions` has a policy version for each lease as in WorkReport, None for work without a token;
        empty: unknown. A group whose version is too old for every later batch is cancelled. Raises InvalidRequest.
        """
        if not lease_ids:
            return {}
        for numbers in (progress, oldest_versions):
            if numbers and len(numbers) != len(lease_ids):
                raise InvalidRequest(f"{len(numbers)} numbers of progress came with {len(lease_ids)} leases")
        unknown = [None] * len(lease_ids)
        rows = zip(lease_ids, progress or unknown, oldest_versions or unknown, strict=True)
        beats = [Beat(parse_lease(lease_id), number, version) for lease_id, number, version in rows]
        lost = await streams.beat(self.store, worker_id, beats, paused=paused)
        if any(reason is LeaseLoss.STALE for reason in lost.values()):
            self.waits.tasks.wake()  # cancelled groups freed slots
        return {str(ref): reason for ref, reason in lost.items()}

    async def release_leases(
        self, worker_id: str, lease_ids: Sequence[str] = (), refused: str = "", *, abandoned: bool = False
    ) -> int:
        """Take back these leases of a worker, or all of them: it stops. Other workers get the work at once.

        The deliveries do not count. Returns how many leases. With `refused`, the reason why no worker can make a
        rollout of these tasks, their groups are given up instead, and their problems are not asked again. `abandoned`:
        agents have abandoned these rollouts, which are given up. Returns how many rollouts are abandoned then. Raises
        InvalidRequest.
        """
        refs = [parse_lease(lease_id) for lease_id in lease_ids]
        if refused:
            ended, work = await streams.end_leases(self.store, "refuse", worker_id, refs, refused)
            log.warning("problems refused: they are not asked again", extra={"reason": refused, "rollouts": ended})
        elif abandoned:
            ended, work = await streams.end_leases(self.store, "abandon", worker_id, refs)
        else:
            ended, work = await streams.release(self.store, worker_id, refs)
        self.waits.wake(work)
        return ended

    async def finish_run(self, reason: str) -> Ledger:
        """End the run; returns the last ledger."""
        while await self.store.run("finish", reason or "finished"):
            pass
        await self._wake_those_with_work()
        return (await self.status()).ledger

    async def continue_run(self) -> bool:
        """A run that has ended goes on. False: it has not ended."""
        if not (await self.status()).finished:
            return False
        while await self.store.run("finish", "finished"):  # what is left of an end that was interrupted
            pass
        had_ended = bool(await self.store.run("continue"))
        log.info("the run goes on after its end")
        await self._wake_those_with_work()
        return had_ended

    async def serve_stage(self, run: str) -> None:
        """Serve the stage of the plan with this run. Raises Refused when there is none."""
        if run == self.run:
            return
        if self._stages is None:
            raise Refused(f"the broker of the run {self.run} has no plan, so it has no stage {run}")
        await self._stages.choose(run)

    async def status(self) -> RunStatus:
        """The run at one instant."""
        async with self.store.answers_within(_STATUS_LIMIT_S):
            status = await operations.read_status(self.store, self.rules, self._config.run.name)
            all_retired = await self._has_retired_all(status)
        return replace(
            status,
            all_retired=all_retired,
            back_pressure=self.memory.pressure.reason,
            num_problems=len(self._problems.problem_ids),
            left_out_problems=len(self._problems.all_ids) - len(self._problems.problem_ids),
        )

    async def _has_retired_all(self, status: RunStatus) -> bool:
        """As RunStatus.all_retired. Reads the records of all problems, only when nothing else is in flight."""
        in_flight = dict(status.ledger.in_flight)
        ready = in_flight.pop(RolloutState.READY, 0)
        waits = any(in_flight.values()) or ready >= self._config.broker.batch_size
        if waits or not status.admission_slots_free or not self.rules.retires_for_good_after:
            return False
        state = await self.read_curriculum()
        return self._curriculum.is_exhausted(state.cursor, {one.problem_id: one for one in state.problems})

    async def why_stalled(self) -> tuple[Blocker, ...]:
        """What blocks the next step."""
        status, num_problems = await self.status(), len(self._problems.problem_ids)
        made_by = self._config.generation.environment
        agent_session_s = made_by.agent_session_s if isinstance(made_by, AgentSection) else 0.0
        async with self.store.answers_within(_STATUS_LIMIT_S):
            return judge(await operations.read_snapshot(self.store, status, self.rules, num_problems, agent_session_s))

    async def _wake_those_with_work(self) -> None:
        self.waits.wake(await streams.read_available(self.store))

    def _reward(self, header: bytes | None, verdict: Verdict) -> float | None:
        """As `Rewards.of`. None if there is no header: the rollout has ended, so its lease is lost."""
        if header is None:
            return None
        try:
            return self._rewards.of(HEADER.decode(header), verdict)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error


def _sampled(lease_id: str, encoded: bytes, record: bytes) -> Sampled:
    """A submitted rollout. Raises InvalidRequest, and InvalidMessage for a header that cannot be used."""
    ref, header = parse_lease(lease_id), HEADER.decode(encoded)
    if header.record_bytes != len(record) or header.text_offset + header.text_bytes > len(record):
        raise InvalidRequest(f"the header of rollout {header.rollout_id} does not fit its record")
    return Sampled(ref, header, encoded, new_record_name(header.rollout_id))


def _bounded(wanted: int) -> int:
    if wanted < 1:
        raise InvalidRequest(f"ask for at least 1, not {wanted}")
    return min(wanted, MAX_LEASED)
