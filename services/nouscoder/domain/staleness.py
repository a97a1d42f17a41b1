"""The staleness of a rollout in policy versions."""

from __future__ import annotations

from nouscoder.domain.rollout import Rollout


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
