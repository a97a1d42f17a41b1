"""A batch: graded rollouts in whole groups, which the learner trains on together."""

from __future__ import annotations

from dataclasses import dataclass, field

from nouscoder.domain.learner_state import group_number
from nouscoder.domain.rollout import Rollout, RolloutHeader
from nouscoder.domain.verdict import Verdict


@dataclass(frozen=True, slots=True)
class GradedRollout:
    """A rollout, its verdict, and the reward that the broker has computed."""

    rollout: Rollout
    verdict: Verdict
    reward: float


@dataclass(frozen=True, slots=True)
class CompletedGroups:
    """All groups that became complete while a batch gathered, also those that were filtered.

    `solved` of the `groups` have an accepted rollout. `accepted` of their `rollouts` are accepted; `reward_sum` is the
    sum of their rewards.
    """

    groups: int
    solved: int
    rollouts: int
    accepted: int
    reward_sum: float


@dataclass(frozen=True, slots=True)
class EncodedRollout:
    """A graded rollout as the broker passes it on: header and verdict are the bytes that it got."""

    header: bytes
    verdict: bytes
    reward: float
    record: str


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """A batch as the broker passes it on."""

    batch_id: int
    rollouts: tuple[EncodedRollout, ...]
    policy_version: int
    completed: CompletedGroups | None = None


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """A graded rollout whose record is in the broker's record store, under the name `record`."""

    header: RolloutHeader
    verdict: Verdict
    reward: float
    record: str


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """A batch without its records: B graded rollouts in group order, to train the weights of `policy_version`.

    `index` has the bytes of the batch as they came from the broker; empty for one that was made here.
    """

    batch_id: int
    rollouts: tuple[RecordedRollout, ...]
    policy_version: int
    completed: CompletedGroups | None = None
    index: bytes = field(default=b"", repr=False, compare=False)

    @property
    def num_bytes(self) -> int:
        """The total size of the records."""
        return sum(recorded.header.record_bytes for recorded in self.rollouts)

    @property
    def group_numbers(self) -> frozenset[int]:
        """The numbers of its groups. Raises ValueError when a group's id holds none."""
        return frozenset(group_number(recorded.header.group_id) for recorded in self.rollouts)


@dataclass(frozen=True, slots=True)
class Batch:
    """B graded rollouts in group order, to train the weights of `policy_version`.

    `completed` is None where no broker counted: made batches, and files of an earlier release.
    """

    batch_id: int
    rollouts: tuple[GradedRollout, ...]
    policy_version: int
    completed: CompletedGroups | None = None

    def groups(self) -> dict[str, list[GradedRollout]]:
        """The rollouts by group, in order."""
        groups: dict[str, list[GradedRollout]] = {}
        for graded in self.rollouts:
            groups.setdefault(graded.rollout.group_id, []).append(graded)
        return groups
