"""Batches: B / G ready groups in completion order, leased to one learner until committed.

A batch holds exactly B / G whole groups. Groups that lost members to dead letters are shorter than G, so a batch may
hold fewer than B rollouts, never more; counting groups and not rollouts is what keeps admission free of deadlock.
The record lives in Redis until its commit. The lease goes over at once to another incarnation of the same worker
name (a restarted learner), and to another name when no heartbeat came for batch_lease_s. A batch is never
dead-lettered: giving up its number could make a resumed learner take a fresh batch for one its checkpoint holds; the
learner's restarts are bounded by its supervisor, and WhyStalled tells the deliveries.

INVARIANT: at most one batch is uncommitted at a time, its number and rollouts never change, and no rollout is ever in
two committed batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nouscoder.broker.errors import InvariantBroken, Refused
from nouscoder.broker.store import Store
from nouscoder.broker.streams import LeaseRef, Stream
from nouscoder.domain.batch import Batch, GradedRollout
from nouscoder.domain.lease import worker_name
from nouscoder.domain.rollout import Rollout
from nouscoder.domain.verdict import Verdict


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """What a lease call found: None while there is no batch for this worker."""

    finished: bool
    ref: LeaseRef | None = None
    batch: Batch | None = None


@dataclass(frozen=True, slots=True)
class Codec:
    """How kept bytes become records again."""

    rollout: Callable[[bytes], Rollout]
    verdict: Callable[[bytes], Verdict]


async def lease_batch(store: Store, worker_id: str, codec: Codec) -> BatchAnswer:
    """Lease the uncommitted batch or make the next one."""
    finished, *rest = await store.run("lease_batch", worker_id, worker_name(worker_id))
    if not rest:
        return BatchAnswer(bool(finished))
    number, version, delivery, rollout_ids = rest
    keys = [f"rollout:{rollout_id}" for rollout_id in rollout_ids.decode().split(",")]
    graded = []
    for key, (rollout, verdict) in zip(keys, await store.fields(keys, "payload", "verdict"), strict=True):
        if rollout is None or verdict is None:
            # Only a commit or the end of the run takes them away, and both end this lease.
            raise Refused(f"batch {number} ended while it was read ({key} is gone): ask again")
        graded.append(GradedRollout(codec.rollout(rollout), codec.verdict(verdict)))
    ref = LeaseRef(Stream.BATCHES, str(number), int(delivery))
    return BatchAnswer(False, ref, Batch(int(number), tuple(graded), int(version)))


async def commit_batch(store: Store, batch_id: int, step: int) -> bool:
    """Mark the rollouts of a batch trained. True: it had been committed before. Raises Refused, InvariantBroken."""
    answer = (await store.run("commit_batch", batch_id, step)).decode()
    if answer == "unknown":
        raise Refused(f"batch {batch_id} is not leased: it was never made, or the run was finished")
    if answer == "twice":
        raise InvariantBroken(f"batch {batch_id} holds a rollout that was trained on before")
    return bool(answer == "already")
