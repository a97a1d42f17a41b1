"""Batches: the B / G oldest complete groups, leased to one learner until committed.

A batch holds exactly B / G whole groups. Groups that lost members to dead letters are shorter than G, so a batch may
hold fewer than B rollouts, never more. The batch lives in Redis until its commit. The lease goes over at once to
another incarnation of the same worker name (a restarted learner), and to another name when no heartbeat came for
batch_lease_s. A batch is never dead-lettered: its number is that of the policy version that it makes; the learner's
restarts are bounded by its supervisor, and WhyStalled reports the deliveries.

INVARIANT: at most one batch is uncommitted at a time, its number and rollouts never change, and no rollout is ever in
two committed batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nouscoder.broker.errors import InvariantBroken, Refused
from nouscoder.broker.store import Store
from nouscoder.broker.streams import LeaseRef, Stream
from nouscoder.domain.batch import RecordedBatch, RecordedRollout
from nouscoder.domain.lease import worker_name
from nouscoder.domain.rollout import RolloutHeader
from nouscoder.domain.verdict import Verdict

# Rollouts that one script reads.
_PAGE = 512


@dataclass(frozen=True, slots=True)
class Codec:
    """How kept bytes become domain objects again."""

    header: Callable[[bytes], RolloutHeader]
    verdict: Callable[[bytes], Verdict]


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """What a lease call found: no lease while there is no batch for this worker."""

    finished: bool
    ref: LeaseRef | None = None
    batch: RecordedBatch | None = None


async def lease_batch(store: Store, worker_id: str, codec: Codec) -> BatchAnswer:
    """Lease the uncommitted batch or make the next one. Raises Refused when it ended meanwhile."""
    finished, *rest = await store.run("lease_batch", worker_id, worker_name(worker_id))
    if not rest:
        return BatchAnswer(bool(finished))
    number, version, delivery, num_rollouts = map(int, rest)
    rollouts: list[RecordedRollout] = []
    for first in range(0, num_rollouts, _PAGE):
        rows = await store.run("read_batch", number, first, _PAGE)
        rollouts += [
            RecordedRollout(codec.header(header), codec.verdict(verdict), float(reward), record.decode())
            for header, verdict, reward, record in rows
        ]
    if len(rollouts) != num_rollouts:
        # Only a commit or the end of the run takes them away, and both end this lease.
        raise Refused(f"batch {number} ended while it was read: ask again")
    batch = RecordedBatch(number, tuple(rollouts), version)
    return BatchAnswer(False, LeaseRef(Stream.BATCHES, str(number), delivery), batch)


async def commit_batch(store: Store, batch_id: int, step: int) -> bool:
    """Mark the rollouts of a batch trained. True: it had been committed before. Raises Refused, InvariantBroken."""
    answer = "more"
    while answer == "more":
        answer = (await store.run("commit_batch", batch_id, step)).decode()
    if answer == "unknown":
        raise Refused(f"batch {batch_id} is not leased: it was never made, or the run was finished")
    if answer == "twice":
        raise InvariantBroken(f"batch {batch_id} holds a rollout that was trained on before")
    return bool(answer == "already")
