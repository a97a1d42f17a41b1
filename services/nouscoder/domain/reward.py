"""What a rollout is worth. `reward_of` is the only place that decides it; the broker calls it once for each verdict.

An infrastructure failure is worth nothing, not even a bad reward: asking raises.
"""

from __future__ import annotations

from enum import StrEnum

from nouscoder.domain.rollout import RolloutHeader
from nouscoder.domain.verdict import Verdict, VerdictKind


class RewardRule(StrEnum):
    """SIGN (+1 when all tests pass, else -1) is NousCoder-14B's, BINARY (1, 0) DeepCoder's, SOFT Klear-Reasoner's."""

    SIGN = "sign"
    BINARY = "binary"
    SOFT = "soft"


def reward_of(rollout: RolloutHeader, verdict: Verdict, rule: RewardRule) -> float:
    """The reward of one rollout, from what is known of it and its verdict.

    Raises ValueError, naming the rollout, where `reward_of_verdict` does.
    """
    try:
        return reward_of_verdict(verdict, rule)
    except ValueError as error:
        raise ValueError(f"rollout {rollout.rollout_id}: {error}") from error


def reward_of_verdict(verdict: Verdict, rule: RewardRule = RewardRule.SIGN) -> float:
    """The part of a reward that the verdict decides. SOFT is passed / total, so every test must have been run.

    Raises ValueError for an internal_error, and for SOFT when grading stopped early.
    """
    if verdict.is_ours:
        raise ValueError("an internal_error has no reward")
    accepted = verdict.kind is VerdictKind.ACCEPTED
    if rule is RewardRule.SIGN:
        return 1.0 if accepted else -1.0
    if rule is RewardRule.BINARY:
        return 1.0 if accepted else 0.0
    if verdict.kind in (VerdictKind.NO_CODE, VerdictKind.COMPILE_ERROR) or not verdict.total:
        return 0.0
    if verdict.graded < verdict.total:
        raise ValueError("a soft reward needs every test run: turn stop_on_first_failure off")
    return verdict.passed / verdict.total
