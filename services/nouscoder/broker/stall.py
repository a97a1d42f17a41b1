"""What blocks the next step: a pure judgement on a snapshot of who holds what and who asks for work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nouscoder.broker.rules import Rules
from nouscoder.broker.store import Store
from nouscoder.broker.streams import Stream
from nouscoder.domain.run_status import Blocker, RunStatus

MAX_BLOCKERS = 20
_ENTRIES_LOOKED_AT = 1000
_WAITING_FOR = {Stream.TASKS: "sampling", Stream.GRADING: "grading", Stream.BATCHES: "training"}


@dataclass(frozen=True, slots=True)
class Holder:
    """A lease: on what, whose, seconds since its heartbeat and since it was taken."""

    stream: Stream
    item_id: str
    worker_id: str
    silent_s: float
    held_s: float
    delivery: int = 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything the judgement needs. `asked_s`: seconds since a worker last asked for work; absent: never."""

    status: RunStatus
    holders: tuple[Holder, ...]
    ready_groups: int
    asked_s: Mapping[Stream, float]


async def read_snapshot(store: Store, status: RunStatus) -> Snapshot:
    """Who holds what, now."""
    now_ms, rows, batch_fields, ready = await store.run("holders", _ENTRIES_LOOKED_AT)
    holders = [
        Holder(Stream(stream.decode()), rollout.decode(), worker.decode(), silent_ms / 1000, (now_ms - since) / 1000)
        for stream, rollout, worker, silent_ms, since in rows
    ]
    batch = {key.decode(): value.decode() for key, value in zip(batch_fields[::2], batch_fields[1::2], strict=True)}
    if batch:
        silent_s, held_s = ((now_ms - int(batch[field])) / 1000 for field in ("beat", "since"))
        holder = Holder(Stream.BATCHES, batch["id"], batch["worker"], silent_s, held_s, int(batch["delivery"]))
        holders.append(holder)
    (asked,) = await store.fields(["meta"], *(f"asked:{stream}" for stream in Stream))
    asked_s = {
        stream: max(0.0, (now_ms - int(at)) / 1000) for stream, at in zip(Stream, asked, strict=True) if at is not None
    }
    return Snapshot(status, tuple(holders), int(ready), asked_s)


def judge(snapshot: Snapshot, rules: Rules) -> tuple[Blocker, ...]:
    """What blocks the next step, worst (longest) first; empty when nothing has stood still for a lease's length."""
    if snapshot.status.finished:
        return ()
    patience_s = rules.lease_ms / 1000
    blockers = [
        *_back_pressure(snapshot),
        *_missing_policy(snapshot),
        *_unasked(snapshot, patience_s),
        *_slow_holders(snapshot, patience_s),
    ]
    blockers.sort(key=lambda blocker: -blocker.idle_s)
    return tuple(blockers[:MAX_BLOCKERS])


def _back_pressure(snapshot: Snapshot) -> list[Blocker]:
    reason = snapshot.status.back_pressure
    return [Blocker(reason, "", "", 0.0)] if reason else []


def _missing_policy(snapshot: Snapshot) -> list[Blocker]:
    if snapshot.status.policy_version is not None:
        return []
    idle_s = max(snapshot.asked_s.values(), default=0.0)
    return [Blocker("no policy has been published yet: the learner publishes version 0", "", "", idle_s)]


def _unasked(snapshot: Snapshot, patience_s: float) -> list[Blocker]:
    """Work lies there and nobody comes for it."""
    blockers = []
    for stream in snapshot.status.streams:
        kind = Stream(stream.stream)
        can_admit = kind is Stream.TASKS and snapshot.status.admission_slots_free > 0
        if not stream.lag and not can_admit:
            continue
        idle_s = snapshot.asked_s.get(kind)
        if idle_s is not None and idle_s < patience_s:
            continue
        if kind is Stream.BATCHES and stream.pending:
            continue  # the learner is at work on another batch
        what = f"{stream.lag} {'batches wait' if kind is Stream.BATCHES else 'rollouts wait'} for {_WAITING_FOR[kind]}"
        since = "no worker has ever asked" if idle_s is None else f"no worker has asked for {idle_s:.0f} s"
        blockers.append(Blocker(f"{what} and {since}", "", "", idle_s or 0.0))
    return blockers


def _slow_holders(snapshot: Snapshot, patience_s: float) -> list[Blocker]:
    blockers = []
    for holder in snapshot.holders:
        if holder.silent_s < patience_s / 2 and holder.held_s < patience_s:
            continue
        what = "batch" if holder.stream is Stream.BATCHES else "rollout"
        reason = (
            f"{what} {holder.item_id} has been with {holder.worker_id} for {_WAITING_FOR[holder.stream]}"
            f" for {holder.held_s:.0f} s, last heartbeat {holder.silent_s:.0f} s ago"
        )
        if holder.delivery > 1:
            reason += f", delivery {holder.delivery}"
        blockers.append(Blocker(reason, holder.item_id, holder.worker_id, holder.held_s))
    return blockers
