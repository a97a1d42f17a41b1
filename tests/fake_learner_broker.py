"""A broker in memory for one learner, with the rules of the real one, so that the learner can be tested alone.

INVARIANT: batches are numbered from 0 and committed in order. The batch in training is leased again until it is
committed. A policy is accepted only as the newest version + 1, or again with the same checksum.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from nouscoder.domain.batch import Batch, RecordedBatch, RecordedRollout
from nouscoder.domain.curriculum import CurriculumState
from nouscoder.domain.learner_state import Restored, TrainedState
from nouscoder.domain.lease import Lease, LeasedBatch, LeaseLoss, WorkReport
from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.run_status import Ledger, RunStatus
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.channel import PeerError, PeerRefused
from nouscoder.rpc.worker import LeaseKeeper
from nouscoder.store.record_store import ByteRange
from nouscoder.store.rollout_record import encode_rollout

_LEASE_S = 60.0


def recorded(batch: Batch) -> tuple[RecordedBatch, dict[str, bytes]]:
    """A batch in the form that the broker leases, and its records by name."""
    rollouts: list[RecordedRollout] = []
    records: dict[str, bytes] = {}
    for graded in batch.rollouts:
        header, record = encode_rollout(graded.rollout)
        rollouts.append(RecordedRollout(header, graded.verdict, graded.reward, header.rollout_id))
        records[header.rollout_id] = record
    return RecordedBatch(batch.batch_id, tuple(rollouts), batch.policy_version), records


async def _nothing_is_lost(lease_ids: Sequence[str], report: WorkReport | None = None) -> dict[str, LeaseLoss]:
    return {}


class FakeBroker(BrokerClient):
    """A broker and its client.

    `make_batch(batch_id, policy_version)` makes a batch sampled with the weights of that version.
    """

    def __init__(self, make_batch: Callable[[int, int], Batch]) -> None:
        self._make_batch = make_batch
        self._in_training: RecordedBatch | None = None
        self._records: dict[str, bytes] = {}
        self._deliveries = 0
        self.commits: list[tuple[int, int]] = []
        self.policies: list[PolicyManifest] = []
        self.finished = False
        self.run_id = ""
        self.failures: list[tuple[int, str]] = []

    async def status(self) -> RunStatus:
        """The current state of the run."""
        return RunStatus(
            run="fake",
            ledger=self._ledger(),
            streams=(),
            policy_version=self.policies[-1].policy_version if self.policies else None,
            step=self.commits[-1][1] if self.commits else 0,
            batches_committed=len(self.commits),
            admission_slots_free=0,
            finished=self.finished,
            rollouts_accepted=0,
            rollouts_graded=0,
            run_id=self.run_id,
        )

    async def restore_run(self, trained: TrainedState) -> Restored:
        """Take over the progress of the learner."""
        if self.run_id not in ("", trained.identity.run_id):
            raise PeerRefused(f"broker: this is run {self.run_id}")
        if len(self.commits) > trained.batches or len(self.policies) > trained.batches + 2:
            raise PeerRefused("broker: checkpoints of this run are missing")
        self.run_id = trained.identity.run_id
        if len(self.commits) == trained.batches - 1:
            self.commits.append((trained.batches - 1, trained.step))
            self._in_training = None
        if len(self.commits) != trained.batches:
            raise PeerError("broker: this fake forgets nothing")
        return Restored(was_behind=False)

    async def read_curriculum(self) -> tuple[str, CurriculumState]:
        """A curriculum without problems, whose cursor is the number of commits."""
        return "fake", CurriculumState(len(self.commits))

    async def lease_batch(self, wait_s: float = 10.0, run_id: str = "", batches: int = 0) -> LeasedBatch:
        """Lease the batch in training again, or a new one."""
        if self.finished:
            return LeasedBatch(run_finished=True)
        if self._in_training is None:
            self._in_training, self._records = recorded(self._make_batch(len(self.commits), len(self.commits)))
            self._deliveries = 0
        self._deliveries += 1
        lease = Lease(f"batch-{len(self.commits)}-{self._deliveries}", _LEASE_S, self._deliveries)
        return LeasedBatch(self._in_training, lease)

    async def stream_records(self, ranges: Sequence[ByteRange]) -> AsyncIterator[tuple[int, bytes]]:
        """The bytes of each record in one piece."""
        for place, part in enumerate(ranges):
            yield place, self._records[part.name][part.offset :][: part.num_bytes]

    async def publish_policy(self, manifest: PolicyManifest) -> int:
        """Accept the newest version + 1, or the newest version again."""
        newest = self.policies[-1] if self.policies else None
        if newest is not None and (newest.policy_version, newest.digest) == (manifest.policy_version, manifest.digest):
            return newest.policy_version
        if manifest.policy_version != len(self.policies):
            raise PeerError(f"broker: policy version {manifest.policy_version} is not {len(self.policies)}")
        self.policies.append(manifest)
        return manifest.policy_version

    async def commit_batch(self, batch_id: int, step: int, groups: Iterable[int] = ()) -> bool:
        """Commit the batch in training. Idempotent."""
        if (batch_id, step) in self.commits:
            return True
        if self._in_training is None or batch_id != self._in_training.batch_id:
            raise PeerError(f"broker: batch {batch_id} is not in training")
        self.commits.append((batch_id, step))
        self._in_training = None
        return False

    async def report_batch_failure(self, batch_id: int, reason: str) -> bool:
        """Record the failure. This broker holds no batch back."""
        self.failures.append((batch_id, reason))
        return False

    async def finish_run(self, reason: str) -> Ledger:
        """End the run; no further batch is leased."""
        self.finished = True
        return self._ledger()

    def keep_leases(self, report: Callable[[], WorkReport] | None = None) -> LeaseKeeper:
        """A keeper whose leases are never lost."""
        return LeaseKeeper(_nothing_is_lost)

    def _ledger(self) -> Ledger:
        return Ledger(len(self.commits), len(self.commits), 0, 0, 0, {})
