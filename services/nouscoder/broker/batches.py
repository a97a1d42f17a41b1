"""Batches and policies: what the learner leases and commits, and what it publishes.

A batch holds the B / G oldest complete groups. Groups that lost members to dead letters are shorter than G, so a batch
may hold fewer than B rollouts, never more. The batch is in Redis until its commit. A restarted learner (the same worker
name, another incarnation) gets the lease at once, another worker when no heartbeat came for batch_lease_s. A batch is
never a dead letter, because its number is that of the policy version that it makes. One that nobody can train on is
held back (operations.py).

INVARIANT: at most one batch is uncommitted at a time, its number and rollouts never change, and no rollout is in two
committed batches.

Only the newest published policy is kept. INVARIANT: versions start at 0 and rise by 1, except that restore.lua sets the
version of the learner's state. A version never gets other weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nouscoder.broker.errors import Behind, InvariantBroken, Refused
from nouscoder.broker.store import Store
from nouscoder.broker.streams import LeaseRef, Stream
from nouscoder.domain.batch import CompletedGroups, EncodedBatch, EncodedRollout
from nouscoder.domain.lease import Lease, worker_name
from nouscoder.domain.policy import PolicyManifest
from nouscoder.rpc.pairs import MANIFEST

# Rollouts that one script reads.
_PAGE = 512


@dataclass(frozen=True, slots=True)
class BatchLease:
    """What a lease call found. `batch` and `lease` are None while there is no batch for this worker."""

    batch: EncodedBatch | None = None
    lease: Lease | None = None
    run_finished: bool = False


async def lease_batch(store: Store, worker_id: str, lease_s: float, run_id: str = "", batches: int = 0) -> BatchLease:
    """Lease the uncommitted batch or make the next one.

    Raises Behind when Redis has another run than `run_id` or another number of committed batches than `batches`
    (compared unless `run_id` is empty), and when the batch ended while it was read.
    """
    finished, *rest = await store.run("lease_batch", worker_id, worker_name(worker_id), run_id, batches)
    if finished < 0:
        raise Behind(f"Redis does not hold the {batches} batches of run {run_id}: restore it from the learner's state")
    if not rest:
        return BatchLease(run_finished=bool(finished))
    number, version, num_rollouts = int(rest[0]), int(rest[1]), int(rest[3])
    rollouts: list[EncodedRollout] = []
    for first in range(0, num_rollouts, _PAGE):
        rows = await store.run("read_batch", number, first, _PAGE)
        rollouts += [
            EncodedRollout(header, verdict, float(reward), record.decode()) for header, verdict, reward, record in rows
        ]
    if len(rollouts) != num_rollouts:
        # The batch was committed, the run was finished, or Redis lost writes.
        raise Behind(f"batch {number} ended while it was read: ask again")
    ref = LeaseRef.of(Stream.BATCHES, str(number), rest[2])
    batch = EncodedBatch(number, tuple(rollouts), version, _completed(rest[4].decode()))
    return BatchLease(batch, Lease(str(ref), lease_s, ref.delivery))


def _completed(text: str) -> CompletedGroups | None:
    """None for a batch that a broker of an earlier release made."""
    if not text:
        return None
    groups, solved, rollouts, accepted, reward_sum = text.split()
    return CompletedGroups(int(groups), int(solved), int(rollouts), int(accepted), float(reward_sum))


async def commit_batch(store: Store, batch_id: int, step: int, groups: Sequence[int] = ()) -> bool:
    """Mark the rollouts of a batch as trained. True: it was committed before.

    Raises Behind when the batch in Redis has other groups (not compared if `groups` is empty), Refused when there is no
    such batch, and InvariantBroken when a rollout was trained on before.
    """
    answer = "more"
    while answer == "more":
        answer = (await store.run("commit_batch", batch_id, step, *groups)).decode()
    if answer == "behind":
        raise Behind(f"Redis does not hold batch {batch_id} as it was trained on: restore it from the learner's state")
    if answer == "unknown":
        raise Refused(f"batch {batch_id} is not leased: it was never made, or the run was finished")
    if answer == "twice":
        raise InvariantBroken(f"batch {batch_id} holds a rollout that was trained on before")
    return bool(answer == "already")


async def publish(store: Store, manifest: PolicyManifest) -> int:
    """Take a policy; returns the newest version. The newest one may be published again.

    Raises Refused when it is too old or its weights differ, and Behind when Redis lacks the version before it.
    """
    version = manifest.policy_version
    taken, newest = await store.run("publish_policy", version, manifest.digest, MANIFEST.encode(manifest))
    if taken:
        return int(newest)
    if version == newest:
        raise Refused(f"policy version {version} was published before with other weights")
    if version > newest:
        raise Behind(f"policy version {version} is out of order: {int(newest) + 1} comes next")
    raise Refused(f"policy version {version} is out of order: {int(newest) + 1} comes next")


async def newest(store: Store) -> PolicyManifest | None:
    """The newest policy, None while there is none."""
    (data,) = await store.fields("meta", "policy")
    return None if data is None else MANIFEST.decode(data)
