"""A batch: the graded rollouts, in whole groups, that the learner trains on at once."""

from __future__ import annotations

from dataclasses import dataclass

from nouscoder.domain.rollout import Rollout
from nouscoder.domain.verdict import Verdict


@dataclass(frozen=True, slots=True)
class GradedRollout:
    """A rollout and what it got."""

    rollout: Rollout
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Batch:
    """B graded rollouts in group order. Staleness counts from `policy_version`, the newest when the batch was made."""

    batch_id: int
    rollouts: tuple[GradedRollout, ...]
    policy_version: int

    def groups(self) -> dict[str, list[GradedRollout]]:
        """The rollouts by group, in order."""
        groups: dict[str, list[GradedRollout]] = {}
        for graded in self.rollouts:
            groups.setdefault(graded.rollout.group_id, []).append(graded)
        return groups
