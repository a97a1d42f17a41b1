"""Which workers hold the next batch up: the verifiers, and the generation workers.

Nobody asks for work that waits, or workers hold leases on rollouts that do not move: because they send no heartbeats,
because they hang, or because a person paused the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nouscoder.domain.stall import Blocker, Holder, Snapshot, StallCause

# A rollout that has not moved for so long stands still: no test and no update of the weights takes longer.
_STILL_S = 120.0
_SILENT = "their workers send no heartbeats: these are dead, stopped or cannot reach the broker. Others get the work."


def is_unasked(snapshot: Snapshot, stream: str) -> bool:
    """Nobody has asked for work of this stream for a lease's length."""
    return snapshot.asked_s.get(stream, snapshot.since_commit_s) >= snapshot.lease_s


def asking(snapshot: Snapshot, stream: str) -> str:
    """When a worker last asked for work of this stream, in words."""
    asked_s = snapshot.asked_s.get(stream)
    return "nobody has ever asked for them" if asked_s is None else f"nobody has asked for {asked_s:.0f} s"


def _is_silent(snapshot: Snapshot, holder: Holder) -> bool:
    return holder.silent_s >= snapshot.lease_s / 2


def _is_still(snapshot: Snapshot, holder: Holder) -> bool:
    return holder.paused or holder.still_s >= _STILL_S or _is_silent(snapshot, holder)


def is_moving(snapshot: Snapshot) -> bool:
    """Some rollout under lease moves."""
    return not all(_is_still(snapshot, holder) for holder in (*snapshot.sampling, *snapshot.grading))


def num_waiting(snapshot: Snapshot, stream: str) -> int:
    """Rollouts of this stream that nobody holds."""
    return next((s.lag for s in snapshot.status.streams if s.stream == stream), 0)


def grading_blockers(snapshot: Snapshot, *, only_if_nothing_moves: bool) -> Iterator[Blocker]:
    """What blocks grading. `only_if_nothing_moves`: workers without progress count only when no rollout moves."""
    lag, alive = num_waiting(snapshot, "grading"), [h for h in snapshot.grading if not _is_silent(snapshot, h)]
    if lag and not alive and is_unasked(snapshot, "grading"):
        yield Blocker(
            StallCause.VERIFIER_ABSENT,
            f"{lag} rollouts wait for grading and {asking(snapshot, 'grading')}: no verifier runs with --broker, or"
            " none can reach the broker.",
            idle_s=snapshot.asked_s.get("grading", snapshot.since_commit_s),
            num_items=lag,
        )
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


def sampling_blockers(snapshot: Snapshot, *, only_if_nothing_moves: bool) -> Iterator[Blocker]:
    """What blocks sampling. `only_if_nothing_moves` is as in grading_blockers."""
    alive = [h for h in snapshot.sampling if not _is_silent(snapshot, h)]
    slots = num_waiting(snapshot, "tasks") + snapshot.status.admission_slots_free
    if slots and not alive and snapshot.num_problems and is_unasked(snapshot, "tasks"):
        yield Blocker(
            StallCause.GENERATION_ABSENT,
            f"{slots} rollouts could be sampled and {asking(snapshot, 'tasks')}: no generation worker runs, or none"
            " has loaded a policy or can reach the broker.",
            idle_s=snapshot.asked_s.get("tasks", snapshot.since_commit_s),
            num_items=slots,
        )
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
