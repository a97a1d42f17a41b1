"""What a verdict is worth. Infrastructure failures are worth nothing, not even a bad reward: asking raises."""

from __future__ import annotations

from enum import StrEnum

from nouscoder.domain.verdict import Verdict, VerdictKind


class RewardRule(StrEnum):
    """SIGN (+1 when all tests pass, else -1) is NousCoder-14B's, BINARY (1, 0) DeepCoder's, SOFT Klear-Reasoner's."""

    SIGN = "sign"
    BINARY = "binary"
    SOFT = "soft"


def reward_of(verdict: Verdict, rule: RewardRule = RewardRule.SIGN) -> float:
    """The reward of one rollout. SOFT is passed / total, so every test must have been run.

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
