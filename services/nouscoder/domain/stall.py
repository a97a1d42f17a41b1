"""The causes that stop a run, and how they are found in a snapshot.

`judge` says why the next batch does not come. It first looks for what stops a run at once: an operator, Redis, a batch
that is held back. It looks for other causes only when the next batch is late, because a run that commits batches is not
stalled, whatever single workers do. Then it follows the batch backwards: training here, grading and sampling, and what
became of the rollouts that were finished.

The workers that hold the next batch up are verifiers or generation workers. Either nobody asks for work that waits, or
workers hold leases on rollouts that do not move: because they send no heartbeats, because they hang, or because a
person paused the engine.

INVARIANT: each cause is reported once, however many rollouts it holds up; a run whose work moves and becomes batches
has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from nouscoder.domain.run_status import RunMode, RunStatus


class StallCause(StrEnum):
    """Why the next batch does not come."""

    REDIS_FULL = "redis_full"
    REDIS_CANNOT_SAVE = "redis_cannot_save"
    REDIS_READ_ONLY = "redis_read_only"
    PAUSED = "paused"
    DRAINING = "draining"
    NO_POLICY = "no_policy"
    BATCH_HELD_BACK = "batch_held_back"
    LEARNER_CRASHES = "learner_crashes"
    LEARNER_SILENT = "learner_silent"
    LEARNER_SLOW = "learner_slow"
    LEARNER_ABSENT = "learner_absent"
    VERIFIER_ABSENT = "verifier_absent"
    VERIFIER_SILENT = "verifier_silent"
    VERIFIER_HUNG = "verifier_hung"
    INTERNAL_ERRORS = "internal_errors"
    GENERATION_ABSENT = "generation_absent"
    GENERATION_SILENT = "generation_silent"
    ENGINE_PAUSED = "engine_paused"
    ENGINE_HUNG = "engine_hung"
    AGENTS_SLOW = "agents_slow"
    ALL_FILTERED = "all_filtered"
    ALL_STALE = "all_stale"
    ALL_GIVEN_UP = "all_given_up"
    ADMISSION_CLOSED = "admission_closed"
    EMPTY_CURRICULUM = "empty_curriculum"
    ALL_REFUSED = "all_refused"
    LEASES_FAIL = "leases_fail"


@dataclass(frozen=True, slots=True)
class Blocker:
    """A cause, explained in a few sentences. `item_id` and `worker_id` name what has stood still longest, or are empty.

    `idle_s`: seconds since it last moved. `num_items`: how many rollouts or batches this cause holds up.
    """

    cause: StallCause
    reason: str
    item_id: str = ""
    worker_id: str = ""
    idle_s: float = 0.0
    num_items: int = 0


_EMPTY_CURRICULUM = Blocker(
    StallCause.EMPTY_CURRICULUM,
    "The curriculum has no problem left to sample: give the run more problems, or end it.",
)


@dataclass(frozen=True, slots=True)
class Holder:
    """A lease on a rollout. `silent_s`: seconds since its last heartbeat; `still_s`: since its last progress."""

    item_id: str
    worker_id: str
    held_s: float
    silent_s: float
    still_s: float
    delivery: int = 1
    paused: bool = False


@dataclass(frozen=True, slots=True)
class HeldBatch:
    """The uncommitted batch. `delivery`: how many learners have leased it.

    `failures`: how often a learner reported that it cannot train on it; `failure`: the last report.
    """

    batch_id: int
    worker_id: str
    held_s: float
    silent_s: float
    delivery: int = 1
    failures: int = 0
    failure: str = ""
    held_back: bool = False


@dataclass(frozen=True, slots=True)
class Totals:
    """Rollouts counted since the last committed batch."""

    filtered: int = 0
    stale: int = 0
    abandoned: int = 0
    graded: int = 0
    accepted: int = 0
    internal_errors: int = 0


@dataclass(frozen=True, slots=True)
class StallSnapshot:
    """Everything that `judge` needs. Streams are tasks, grading and batches. Times are in seconds.

    `since_commit_s`: since the last committed batch, or since the first admission. `usual_batch_s`: the median time of
    the last batches, 0 before there are two. `asked_s`: by stream, since a worker last asked for work; absent: never.
    `lease_s` and `batch_lease_s` are the lengths of leases. `agent_session_s`: how long an agent may do nothing; 0
    where no agents make the rollouts. A batch has `batch_groups` groups of `group_size` rollouts.
    """

    status: RunStatus
    since_commit_s: float
    usual_batch_s: float
    since: Totals
    sampling: tuple[Holder, ...]
    grading: tuple[Holder, ...]
    batch: HeldBatch | None
    ready_groups: int
    asked_s: Mapping[str, float]
    num_problems: int
    lease_s: float
    batch_lease_s: float
    batch_groups: int
    group_size: int
    redis_faults: tuple[StallCause, ...] = ()
    agent_session_s: float = 0.0


# A rollout that has not moved for so long stands still: no test and no update of the weights takes longer.
_STILL_S = 120.0
_SILENT = "their workers send no heartbeats: these are dead, stopped or cannot reach the broker. Others get the work."


def is_unasked(snapshot: StallSnapshot, stream: str) -> bool:
    """Nobody has asked for work of this stream for a lease's length."""
    return snapshot.asked_s.get(stream, snapshot.since_commit_s) >= snapshot.lease_s


def _absent(cause: StallCause, snapshot: StallSnapshot, stream: str, number: int, waiting: str, why: str) -> Blocker:
    """So many rollouts or batches are `waiting`, and nobody asks for work of this stream."""
    asked_s = snapshot.asked_s.get(stream)
    when = "nobody has ever asked for them" if asked_s is None else f"nobody has asked for {asked_s:.0f} s"
    idle_s = snapshot.since_commit_s if asked_s is None else asked_s
    return Blocker(cause, f"{number} {waiting} and {when}: {why}", idle_s=idle_s, num_items=number)


def _is_silent(snapshot: StallSnapshot, holder: Holder) -> bool:
    return holder.silent_s >= snapshot.lease_s / 2


def _is_still(snapshot: StallSnapshot, holder: Holder) -> bool:
    return holder.paused or holder.still_s >= _STILL_S or _is_silent(snapshot, holder)


def is_moving(snapshot: StallSnapshot) -> bool:
    """Some rollout under lease moves."""
    return not all(_is_still(snapshot, holder) for holder in (*snapshot.sampling, *snapshot.grading))


def num_waiting(snapshot: StallSnapshot, stream: str) -> int:
    """Rollouts of this stream that nobody holds."""
    return next((s.lag for s in snapshot.status.streams if s.stream == stream), 0)


def grading_blockers(snapshot: StallSnapshot, *, only_if_nothing_moves: bool) -> Iterator[Blocker]:
    """What blocks grading. `only_if_nothing_moves`: workers without progress count only when no rollout moves."""
    lag, alive = num_waiting(snapshot, "grading"), [h for h in snapshot.grading if not _is_silent(snapshot, h)]
    if lag and not alive and is_unasked(snapshot, "grading"):
        why = "no verifier runs with --broker, or none can reach the broker."
        yield _absent(StallCause.VERIFIER_ABSENT, snapshot, "grading", lag, "rollouts wait for grading", why)
        return
    if only_if_nothing_moves and is_moving(snapshot):
        return
    silent = [h for h in snapshot.grading if _is_silent(snapshot, h)]
    still = [h for h in alive if _is_still(snapshot, h)]
    if silent:
        yield _standing(StallCause.VERIFIER_SILENT, silent, "being graded", _SILENT)
    if still:
        yield _standing(
            StallCause.VERIFIER_HUNG, still, "being graded", "no test has ended meanwhile: the verifier hangs."
        )


def sampling_blockers(snapshot: StallSnapshot, *, only_if_nothing_moves: bool) -> Iterator[Blocker]:
    """What blocks sampling. `only_if_nothing_moves` is as in grading_blockers."""
    alive = [h for h in snapshot.sampling if not _is_silent(snapshot, h)]
    slots = num_waiting(snapshot, "tasks") + snapshot.status.admission_slots_free
    if slots and not alive and snapshot.num_problems and is_unasked(snapshot, "tasks"):
        why = "no generation worker runs, or none has loaded a policy or can reach the broker."
        yield _absent(StallCause.GENERATION_ABSENT, snapshot, "tasks", slots, "rollouts could be sampled", why)
        return
    if only_if_nothing_moves and is_moving(snapshot):
        return
    silent = [h for h in snapshot.sampling if _is_silent(snapshot, h)]
    paused = [h for h in alive if h.paused]
    still = [h for h in alive if not h.paused and _is_still(snapshot, h)]
    if silent:
        yield _standing(StallCause.GENERATION_SILENT, silent, "being sampled", _SILENT)
    if paused:
        what = "a person paused the engine: it continues after Resume, or when the pause ends."
        yield _standing(StallCause.ENGINE_PAUSED, paused, "being sampled", what)
    if still:
        what = "no token has been sampled meanwhile: the engine hangs. See the log of generation."
        yield _standing(StallCause.ENGINE_HUNG, still, "being sampled", what)


def _standing(cause: StallCause, holders: Sequence[Holder], doing: str, what: str) -> Blocker:
    longest = max(holders, key=lambda holder: max(holder.still_s, holder.silent_s))
    idle_s = max(longest.still_s, longest.silent_s)
    workers = sorted({holder.worker_id for holder in holders})
    others = f" and {len(workers) - 1} more" if len(workers) > 1 else ""
    return Blocker(
        cause,
        f"{len(holders)} rollouts are {doing} by {longest.worker_id}{others} and have not moved for up to"
        f" {idle_s:.0f} s; {what} The first is {longest.item_id}, delivery {longest.delivery}.",
        longest.item_id,
        longest.worker_id,
        idle_s,
        len(holders),
    )


# A batch is late when it takes this many times as long as usual.
_LATE = 3.0
# A batch in training is slow when it takes this many times as long as usual, but at least _SLOW_S.
_SLOW, _SLOW_S = 10.0, 600.0
# A batch that was leased to this many learner processes makes them crash.
_CRASHES = 3
_WATCH = "`nouscoder status` shows where every rollout is."


def judge(snapshot: StallSnapshot) -> tuple[Blocker, ...]:
    """What delays the next batch, the learner's causes first. Empty when nothing does."""
    if snapshot.status.finished:
        return ()
    blockers = tuple(_at_once(snapshot)) or tuple(_when_late(snapshot))
    if not blockers:
        return ()
    return (replace(blockers[0], reason=f"{_lateness(snapshot)} {blockers[0].reason}"), *blockers[1:])


def _lateness(snapshot: StallSnapshot) -> str:
    usual = f" (one usually takes {snapshot.usual_batch_s:.0f} s)" if snapshot.usual_batch_s else ""
    if snapshot.status.batches_committed:
        return f"No batch has been committed for {snapshot.since_commit_s:.0f} s{usual}."
    return f"No batch has been committed yet, {snapshot.since_commit_s:.0f} s after the first rollout was admitted."


def _at_once(snapshot: StallSnapshot) -> Iterator[Blocker]:
    """Causes that stop a run immediately, so they are reported even when the next batch is not late."""
    for fault in snapshot.redis_faults:
        yield Blocker(fault, _REDIS[fault])
    if snapshot.status.back_pressure and StallCause.REDIS_FULL not in snapshot.redis_faults:
        yield Blocker(StallCause.REDIS_FULL, f"{snapshot.status.back_pressure}.")
    if snapshot.status.mode is not RunMode.RUNNING:
        yield _stopped_by_operator(snapshot.status.mode)
        return
    if snapshot.status.policy_version is None:
        yield Blocker(
            StallCause.NO_POLICY,
            "No policy has been published yet: the learner publishes version 0 when it has loaded the model. If it"
            " runs, see its log.",
        )
        return
    if snapshot.status.all_retired:
        yield _EMPTY_CURRICULUM
        return
    if snapshot.status.all_refused:
        yield Blocker(
            StallCause.ALL_REFUSED,
            f"Generation can make no rollout of any of the {snapshot.status.num_problems} problems, such as:"
            f" {snapshot.status.refused_reason}.",
        )
        return
    batch = snapshot.batch
    if batch is None:
        return
    if batch.held_back:
        why = f": {batch.failure}" if batch.failure else ""
        tries = f"{batch.failures} failures" if batch.failures else f"{batch.delivery} learners that died with it"
        yield Blocker(
            StallCause.BATCH_HELD_BACK,
            f"Batch {batch.batch_id} cannot be trained on and is held back after {tries}{why}."
            f" `nouscoder batch drop {batch.batch_id}` abandons its rollouts, and the run goes on.",
            *_of_batch(batch),
        )


_REDIS = {
    StallCause.REDIS_FULL: "Redis holds as much as maxmemory allows and refuses to write: raise maxmemory, or free"
    " memory. Nothing is lost meanwhile.",
    StallCause.REDIS_CANNOT_SAVE: "Redis cannot write its file and refuses to change anything: see its log and its"
    " disk.",
    StallCause.REDIS_READ_ONLY: "Redis refuses to change anything: it is a replica, or it lacks the replicas that its"
    " setting min-replicas-to-write asks for. See its log, and INFO replication.",
}


def _stopped_by_operator(mode: RunMode) -> Blocker:
    if mode is RunMode.PAUSED:
        return Blocker(StallCause.PAUSED, "The run was paused by `nouscoder pause`: `nouscoder resume` goes on.")
    return Blocker(
        StallCause.DRAINING,
        "The run is being drained by `nouscoder drain` and admits nothing: `nouscoder resume` goes on.",
    )


def _of_batch(batch: HeldBatch) -> tuple[str, str, float, int]:
    return str(batch.batch_id), batch.worker_id, batch.held_s, 1


def _when_late(snapshot: StallSnapshot) -> Iterator[Blocker]:
    """Causes that count only when the next batch is late, the learner's first."""
    if snapshot.since_commit_s < max(snapshot.lease_s, _LATE * snapshot.usual_batch_s):
        return
    if snapshot.batch is not None:
        yield from _training(snapshot, snapshot.batch)
        return
    num_batches = snapshot.ready_groups // snapshot.batch_groups
    if num_batches and is_unasked(snapshot, "batches"):
        why = "no learner runs, or it is paused or starting. See its log."
        yield _absent(StallCause.LEARNER_ABSENT, snapshot, "batches", num_batches, "batches wait for training", why)
        return
    blockers = [
        *grading_blockers(snapshot, only_if_nothing_moves=not num_batches),
        *sampling_blockers(snapshot, only_if_nothing_moves=not num_batches),
    ]
    if snapshot.agent_session_s and snapshot.sampling and not blockers:
        blockers.append(_with_agents(snapshot))
    blockers += _outcomes(snapshot)
    if not blockers and not is_moving(snapshot):
        blockers += _nothing_moves(snapshot)
    yield from blockers


def _with_agents(snapshot: StallSnapshot) -> Blocker:
    """Nothing tells whether an agent thinks or has gone, so its rollouts count as moving until their session ends."""
    return Blocker(
        StallCause.AGENTS_SLOW,
        f"{len(snapshot.sampling)} rollouts wait for an agent, or for the next request of theirs: start agents, or see"
        f" why they are slow. A rollout whose agent has gone is given up {snapshot.agent_session_s:g} s after its last"
        " request (generation.environment.agent_session_s).",
        num_items=len(snapshot.sampling),
    )


def _training(snapshot: StallSnapshot, batch: HeldBatch) -> Iterator[Blocker]:
    name = f"Batch {batch.batch_id} has been with {batch.worker_id} for {batch.held_s:.0f} s"
    if batch.delivery >= _CRASHES:
        why = f", last with: {batch.failure}" if batch.failure else ""
        yield Blocker(
            StallCause.LEARNER_CRASHES,
            f"Batch {batch.batch_id} has been leased to {batch.delivery} learner processes, and none has committed"
            f" it{why}. See the learner's log. After more failures the batch is held back.",
            *_of_batch(batch),
        )
    elif batch.silent_s >= snapshot.batch_lease_s / 2:
        yield Blocker(
            StallCause.LEARNER_SILENT,
            f"{name}, and that learner has sent no heartbeat for {batch.silent_s:.0f} s: it is dead, stopped or"
            " cannot reach the broker. Start it again: it continues with this batch.",
            *_of_batch(batch),
        )
    elif batch.held_s >= max(_SLOW_S, _SLOW * snapshot.usual_batch_s):
        yield Blocker(
            StallCause.LEARNER_SLOW,
            f"{name}, and that learner is alive: training takes much longer than usual, or hangs. See its log.",
            *_of_batch(batch),
        )


def _outcomes(snapshot: StallSnapshot) -> Iterator[Blocker]:
    """Causes that the counts since the last batch show: work was done, but its rollouts reach no batch."""
    since, batch_size = snapshot.since, snapshot.batch_groups * snapshot.group_size
    if since.internal_errors > max(snapshot.group_size - 1, since.graded):
        yield Blocker(
            StallCause.INTERNAL_ERRORS,
            f"Grading failed {since.internal_errors} times since then because of the infrastructure and gave"
            f" {since.graded} verdicts: the sandboxes are broken. `nouscoder dead-letters list` shows the errors.",
            num_items=since.internal_errors,
        )
    ended = since.filtered + since.stale + since.abandoned
    if since.filtered >= max(batch_size, ended / 2):
        share = since.accepted / since.graded if since.graded else 0.0
        yield Blocker(
            StallCause.ALL_FILTERED,
            f"{since.filtered} rollouts were filtered since then, because all of their group got the same reward;"
            f" {share:.0%} of the graded ones were accepted. The problems are too {'easy' if share > 0.5 else 'hard'}"
            " for this policy, or grading treats all answers alike: choose other problems, or set"
            " broker.drop_zero_variance=false.",
            num_items=since.filtered,
        )
    if since.stale >= max(batch_size, ended / 2):
        yield Blocker(
            StallCause.ALL_STALE,
            f"{since.stale} rollouts were dropped as stale since then: sampling and grading take longer than the"
            " versions that broker.max_staleness and broker.pipeline_k allow. Raise them, set"
            " broker.stale_policy=finish_first, or add workers.",
            num_items=since.stale,
        )
    if since.abandoned >= max(batch_size, ended / 2) and not since.internal_errors > since.graded:
        yield Blocker(
            StallCause.ALL_GIVEN_UP,
            f"{since.abandoned} rollouts were given up since then: their leases were lost too often, or their batch was"
            " dropped. `nouscoder dead-letters list` shows why.",
            num_items=since.abandoned,
        )


def _nothing_moves(snapshot: StallSnapshot) -> Iterator[Blocker]:
    """Causes when nothing makes progress and none of the causes above applies."""
    status = snapshot.status
    waiting = num_waiting(snapshot, "tasks") + num_waiting(snapshot, "grading")
    if not waiting and status.admission_slots_free and not snapshot.num_problems:
        yield _EMPTY_CURRICULUM
    elif not waiting and not status.admission_slots_free:
        unpublished = max(0, status.batches_committed - (status.policy_version or 0))
        yield Blocker(
            StallCause.ADMISSION_CLOSED,
            f"Nothing may be admitted, and nothing in flight waits for a worker; {unpublished} trained batches have no"
            f" published policy. See the learner's log; {_WATCH}",
            num_items=unpublished,
        )
    elif waiting or status.admission_slots_free:
        yield Blocker(
            StallCause.LEASES_FAIL,
            f"{waiting} rollouts wait, and workers that ask for work get none: see the broker's log for calls that"
            " fail.",
            num_items=waiting,
        )
