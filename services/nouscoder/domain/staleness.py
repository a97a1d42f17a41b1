"""The staleness of a rollout in policy versions, and how a run bounds it.

docs/design/staleness.md has the formulas and their proofs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from nouscoder.domain.rollout import Rollout


class StalePolicy(StrEnum):
    """What a run does about groups that grow old."""

    DROP = "drop"  # admit k batches; drop a group that is older than max_staleness
    KEEP = "keep"  # no batch waits for older groups; what comes late is trained on, up to max_staleness versions old
    FINISH_FIRST = "finish_first"  # admit so few that every group is trained on within max_staleness versions


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """The bound that a policy gives.

    `pipeline_k`: the maximum number of batches of open groups. `max_age`: the maximum age of a token in training, in
    policy versions. `waits_for_older`: a batch is not made if an older group would then miss its last batch.
    """

    pipeline_k: int
    max_age: int
    waits_for_older: bool

    @classmethod
    def of(cls, policy: StalePolicy, pipeline_k: int, max_staleness: int) -> Self:
        """The bound of `policy`, with `broker.pipeline_k` (>= 1) and `broker.max_staleness` (>= 0)."""
        if policy is StalePolicy.KEEP:
            return cls(pipeline_k, max_staleness, waits_for_older=False)
        if policy is StalePolicy.FINISH_FIRST:
            k = min(pipeline_k, max_staleness + 1)
            return cls(k, k - 1, waits_for_older=True)
        return cls(pipeline_k, min(max_staleness, pipeline_k - 1), waits_for_older=True)


def staleness_of(rollout: Rollout, policy_version: int) -> int:
    """Policy version at consumption minus the oldest version among the rollout's tokens.

    Raises ValueError when the rollout is newer than `policy_version`, which means that versions are inconsistent.
    """
    staleness = policy_version - rollout.oldest_version
    if staleness < 0 or rollout.newest_version > policy_version:
        raise ValueError(
            f"rollout {rollout.rollout_id} was sampled under policy version {rollout.newest_version},"
            f" newer than the newest known, {policy_version}"
        )
    return staleness
