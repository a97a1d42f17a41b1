"""The two streams of single rollouts, `tasks` and `grading`: leases, submissions, heartbeats, the sweep.

A lease is a pending entry of a consumer group. A heartbeat stores the time of the run's clock (serving.py) for the
entry. An entry without a heartbeat for the length of a lease goes to the consumer `released`, whose entries are leased
before new ones. The script that takes a submission deletes its entry, so a stream holds only unfinished work.

INVARIANT: a rollout is under at most one lease at a time, only the holder of that lease can submit it, and submitting
the same work again changes nothing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeVar

from nouscoder.broker.curriculum import Choice
from nouscoder.broker.errors import BrokerUnavailable, InvalidRequest
from nouscoder.broker.store import Store, Value
from nouscoder.broker.wakeups import AvailableWork
from nouscoder.config import Config
from nouscoder.data.problem_index import NotInIndex, ProblemIndex
from nouscoder.domain.curriculum import task_seed
from nouscoder.domain.lease import Lease, LeasedTask, LeaseLoss, RecordedGrading, worker_name
from nouscoder.domain.rollout import RolloutHeader, Sampling, Task
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.rpc.pairs import VERDICT

log = logging.getLogger(__name__)


class Stream(StrEnum):
    """What a lease can be on."""

    TASKS = "tasks"
    GRADING = "grading"
    BATCHES = "batches"


@dataclass(frozen=True, slots=True)
class LeaseRef:
    """A lease as the scripts know it: entry of a stream (or number of a batch), number of the delivery, and epoch.

    The epoch changes when Redis is restored from the learner's state; leases of former epochs are lost.
    """

    stream: Stream
    entry: str
    delivery: int
    epoch: str

    @classmethod
    def of(cls, stream: Stream, entry: str, ticket: bytes) -> LeaseRef:
        """From an answer of a script, where `ticket` is delivery and epoch."""
        delivery, _, epoch = ticket.decode().partition(":")
        return cls(stream, entry, int(delivery), epoch)

    @property
    def ticket(self) -> str:
        """Delivery and epoch, as scripts compare them."""
        return f"{self.delivery}:{self.epoch}"

    def __str__(self) -> str:
        return f"{self.stream}:{self.entry}:{self.ticket}"


# The most that one script does, because Redis serves nobody else meanwhile.
_MAX_SWEPT = 1000
_MAX_BEATS = 1000
_MAX_REASON_CHARS = 500

_LEASE_ID = re.compile(r"(tasks|grading|batches):(\d+(?:-\d+)?):(\d+):([0-9a-f]{1,32})")


def parse_lease(lease_id: str) -> LeaseRef:
    """The lease behind an opaque id. Raises InvalidRequest."""
    match = _LEASE_ID.fullmatch(lease_id)
    if match is None:
        raise InvalidRequest(f"{lease_id[:100]!r} is not a lease of this broker")
    return LeaseRef(Stream(match[1]), match[2], int(match[3]), match[4])


@dataclass(frozen=True, slots=True)
class LeasedEntry:
    """One leased rollout. `values` are its problem, group, minimum version and number of kept tokens
    (tasks), or its header, record and problem.
    """

    ref: LeaseRef
    rollout_id: str
    values: tuple[Any, ...]

    @property
    def group_id(self) -> str:
        """The rollout's group: its id begins with the group's."""
        return self.rollout_id.partition("-")[0]


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """What a lease call found.

    `cursor` is the curriculum's cursor after the call, `next_group` the number of the next group, and `left` how many
    more could be leased.
    """

    finished: bool
    cursor: int
    next_group: int
    left: int
    entries: tuple[LeasedEntry, ...]


async def lease_entries(
    store: Store, stream: Stream, worker_id: str, wanted: int, cursor: int = 0, offer: Sequence[Choice] = ()
) -> LeaseAnswer:
    """Lease up to `wanted` entries. `offer` are the problems for new groups, from the place `cursor` on."""
    offered = [value for choice in offer for value in (choice.place, choice.problem_id)]
    finished, at, next_group, left, rows = await store.run(
        "lease", stream.value, worker_id, worker_name(worker_id), wanted, cursor, *offered
    )
    return LeaseAnswer(bool(finished), int(at), int(next_group), int(left), tuple(_entry(stream, row) for row in rows))


def _entry(stream: Stream, row: Sequence[Any]) -> LeasedEntry:
    entry, rollout_id, ticket, *values = row
    return LeasedEntry(LeaseRef.of(stream, entry.decode(), ticket), rollout_id.decode(), tuple(values))


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled rollout under its lease: its header, also as bytes to keep, and the name of its record."""

    ref: LeaseRef
    header: RolloutHeader
    header_bytes: bytes
    record: str


async def read_oldest_s(store: Store) -> Mapping[str, float]:
    """The age of the oldest unfinished entry of each stream of single rollouts, in seconds; 0 without one."""
    ages = await store.run("oldest")
    return {stream.value: int(age) / 1000 for stream, age in zip((Stream.TASKS, Stream.GRADING), ages, strict=True)}


async def read_available(store: Store) -> AvailableWork:
    """What could be leased now."""
    return work_of(await store.run("available"))


def work_of(row: Sequence[Any]) -> AvailableWork:
    """The work in the answer of a script."""
    tasks, gradings, batches, policy = row
    return AvailableWork(int(tasks), int(gradings), int(batches), policy.decode())


async def submit_sampled(store: Store, worker_id: str, items: Sequence[Sampled]) -> tuple[list[str], AvailableWork]:
    """Take sampled rollouts; returns the ids of those whose lease was lost, and what can be leased now.

    Raises InvalidRequest, and BrokerUnavailable while Redis does not know the policy of a rollout.
    """
    values: list[Value] = []
    for item in items:
        _expect(item.ref, Stream.TASKS)
        header = item.header
        values += [item.ref.entry, item.ref.ticket, header.rollout_id, header.problem_id]
        values += [item.header_bytes, header.oldest_version, header.newest_version, item.record]
    answers, work = await store.run("submit_rollouts", worker_id, *values)
    return _refused([item.header.rollout_id for item in items], answers), work_of(work)


async def read_headers(store: Store, rollout_ids: Sequence[str]) -> list[bytes | None]:
    """The kept header of each rollout; None when it is not in flight."""
    headers: list[bytes | None] = await store.run("read_headers", *rollout_ids)
    return headers


async def submit_graded(
    store: Store, worker_id: str, verdicts: Sequence[tuple[str, str, Verdict]], rewards: Sequence[float | None]
) -> tuple[list[str], AvailableWork]:
    """Take verdicts, of (lease id, rollout, verdict), and the reward of each, None when there is none.

    Returns the ids of the rollouts whose lease was lost, and what can be leased now. Raises InvalidRequest.
    """
    values: list[Value] = []
    for (lease_id, rollout_id, verdict), reward in zip(verdicts, rewards, strict=True):
        ref = parse_lease(lease_id)
        _expect(ref, Stream.GRADING)
        # Training does not need the outcomes of single tests, and there may be hundreds.
        payload = VERDICT.encode(replace(verdict, tests=(), first_failure=None))
        # repr of a float is exact: float() of the text is the same reward.
        of_verdict = (
            "" if reward is None else repr(reward),
            int(verdict.kind is VerdictKind.ACCEPTED),
            int(verdict.kind is VerdictKind.NO_CODE),
        )
        values += [ref.entry, ref.ticket, rollout_id, payload, *of_verdict]
    answers, work = await store.run("submit_verdicts", worker_id, *values)
    return _refused([rollout_id for _, rollout_id, _ in verdicts], answers), work_of(work)


def _expect(ref: LeaseRef, stream: Stream) -> None:
    if ref.stream is not stream:
        raise InvalidRequest(f"lease {ref} is on {ref.stream}, not on {stream}")


def _refused(rollout_ids: Sequence[str], answers: Sequence[bytes]) -> list[str]:
    for rollout_id, answer in zip(rollout_ids, answers, strict=True):
        if answer == b"mismatch":
            raise InvalidRequest(f"the lease sent with rollout {rollout_id} is on another rollout or problem")
        if answer == b"unpublished":
            # Workers get policies only from the broker, so Redis has lost this one.
            raise BrokerUnavailable(f"rollout {rollout_id} was sampled under a policy that Redis has forgotten")
    return [rollout_id for rollout_id, answer in zip(rollout_ids, answers, strict=True) if answer == b"lost"]


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat for one lease: how far its work is (see WorkReport); None: unknown."""

    ref: LeaseRef
    progress: int | None = None
    oldest_version: int | None = None


async def beat(
    store: Store, worker_id: str, beats: Sequence[Beat], *, paused: bool = False
) -> dict[LeaseRef, LeaseLoss]:
    """Extend leases; returns the lost ones, each with the reason."""
    lost: dict[LeaseRef, LeaseLoss] = {}
    for start in range(0, len(beats), _MAX_BEATS):
        part = beats[start : start + _MAX_BEATS]
        values: list[Value] = []
        for item in part:
            values += [item.ref.stream.value, item.ref.entry, item.ref.ticket]
            values += ["" if number is None else number for number in (item.progress, item.oldest_version)]
        answer = await store.run("heartbeat", worker_id, int(paused), *values)
        for place, reason in zip(answer[::2], answer[1::2], strict=True):
            lost[part[int(place)].ref] = LeaseLoss(reason.decode())
    return lost


async def release(store: Store, worker_id: str, refs: Sequence[LeaseRef] = ()) -> tuple[int, AvailableWork]:
    """Give back these leases of a worker, or all; returns how many, and what can be leased now."""
    values = [value for ref in refs for value in (ref.stream.value, ref.entry, ref.ticket)]
    released, work = await store.run("release", worker_id, worker_name(worker_id), *values)
    return int(released), work_of(work)


async def end_leases(
    store: Store, script: str, worker_id: str, refs: Sequence[LeaseRef], reason: str = ""
) -> tuple[int, AvailableWork]:
    """No rollout can be made of the problems of these tasks (`refuse`), or agents have abandoned these (`abandon`).

    Returns how many rollouts are given up, and what can be leased now.
    """
    values: list[Value] = [reason[:_MAX_REASON_CHARS]] if reason else []
    for ref in refs:
        _expect(ref, Stream.TASKS)
        values += [ref.entry, ref.ticket]
    ended, work = await store.run(script, worker_id, *values)
    return int(ended), work_of(work)


async def drop_groups(store: Store, problems: Mapping[str, str]) -> int:
    """Give up groups (group -> its problem, which is gone); returns how many rollouts are abandoned."""
    return int(await store.run("drop_groups", *(name for pair in problems.items() for name in pair)))


async def sweep(store: Store) -> int:
    """Take back the leases without a heartbeat; returns how many."""
    total = 0
    while True:
        num_lost = int(await store.run("sweep", _MAX_SWEPT))
        total += num_lost
        if num_lost < _MAX_SWEPT:
            return total


Leased = TypeVar("Leased")


class LeasedWork:
    """Builds leased work from entries and problems. It gives up groups whose problem is not in the index any more.

    `run_all_tests`: graders run all tests of a rollout, also after one failed.
    """

    def __init__(self, store: Store, config: Config, problems: ProblemIndex, *, run_all_tests: bool) -> None:
        self._store = store
        self._config = config
        self._problems = problems
        self._run_all_tests = run_all_tests

    async def tasks(self, entries: Sequence[LeasedEntry]) -> tuple[LeasedTask, ...]:
        """The rollouts to sample."""
        return await self._without_missing(entries, self._task)

    async def gradings(self, entries: Sequence[LeasedEntry]) -> tuple[RecordedGrading, ...]:
        """The rollouts to grade."""
        return await self._without_missing(entries, self._grading)

    async def _without_missing(
        self, entries: Sequence[LeasedEntry], leased: Callable[[LeasedEntry], Leased]
    ) -> tuple[Leased, ...]:
        found, missing = [], {}
        for entry in entries:
            try:
                found.append(leased(entry))
            except NotInIndex as error:
                missing[entry.group_id] = error.problem_id
        if missing:
            dropped = await drop_groups(self._store, missing)
            log.warning("groups given up: their problems are gone", extra={"problems": missing, "rollouts": dropped})
        return tuple(found)

    def _task(self, entry: LeasedEntry) -> LeasedTask:
        problem_id, group_id, min_version = entry.values[0].decode(), entry.values[1].decode(), int(entry.values[2])
        problem = self._problems.problem(problem_id)
        seed, sampling = task_seed(self._config.run.seed, entry.rollout_id), self._config.generation.sampling
        task = Task(
            rollout_id=entry.rollout_id,
            group_id=group_id,
            problem_id=problem_id,
            prompt=problem.prompt,
            sampling=sampling.record(Sampling, seed=seed, temperature=sampling.temperature_at(min_version)),
            min_policy_version=min_version,
            prompt_template=problem.prompt_template,
            public_tests=problem.public_tests,
            starter_code=problem.starter_code,
            languages=problem.languages,
            tests_type=problem.tests_type,
        )
        return LeasedTask(self._lease(entry), task, num_kept_tokens=int(entry.values[3]))

    def _grading(self, entry: LeasedEntry) -> RecordedGrading:
        header, record, problem_id = entry.values
        problem = self._problems.problem(problem_id.decode())
        rules = replace(problem.rules, run_all_tests=self._run_all_tests)
        return RecordedGrading(
            self._lease(entry), header, record.decode(), problem.tests_digest, rules, rollout_id=entry.rollout_id
        )

    def _lease(self, entry: LeasedEntry) -> Lease:
        return Lease(str(entry.ref), self._config.broker.lease_s, entry.ref.delivery)
