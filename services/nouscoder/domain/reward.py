"""The rules of rewards, and the part of a reward that a verdict or a group decides. The broker applies them.

An infrastructure failure has no reward: asking for one raises ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from nouscoder.domain.verdict import Verdict, VerdictKind


def group_length_rewards(num_tokens: Sequence[int], accepted: Sequence[bool]) -> list[float]:
    """Kimi k1.5's length reward (arXiv 2501.12599, section 2.3.3) of the rollouts of one group, in [-0.5, 0.5].

    lambda_i = 0.5 - (len_i - min len) / (max len - min len): lambda_i for an accepted rollout, min(0, lambda_i) for
    another. All are 0 when all lengths are equal.
    """
    shortest, longest = min(num_tokens), max(num_tokens)
    if shortest == longest:
        return [0.0] * len(num_tokens)
    terms = [0.5 - (count - shortest) / (longest - shortest) for count in num_tokens]
    return [term if right else min(0.0, term) for term, right in zip(terms, accepted, strict=True)]


class RewardRule(StrEnum):
    """How a verdict becomes a reward.

    SIGN: +1 when all tests pass, else -1 (NousCoder-14B). BINARY: 1 or 0 (DeepCoder). SOFT: passed / total
    (Klear-Reasoner, code). BINARY_FORMAT: 1 or 0, minus 0.1 without a code block (thinking-machines-lab/
    tinker-cookbook, recipes/code_rl/deepcoder_tool.py). R1_CODE_INTERPRETER: 1 or 0, plus or minus 0.1 for the format
    of the answer, minus 0.1 above 6 turns. CALLABLE: a function of the user, which broker/rewards.py calls.
    """

    SIGN = "sign"
    BINARY = "binary"
    SOFT = "soft"
    BINARY_FORMAT = "binary_format"
    R1_CODE_INTERPRETER = "r1_code_interpreter"
    CALLABLE = "callable"


class OverlongReward(StrEnum):
    """The reward of a rollout that was cut at max_new_tokens, or almost.

    GRADED: as any other. PUNISHED: a fixed reward, whatever the verdict. SOFT: DAPO's soft punishment is added.
    """

    GRADED = "graded"
    PUNISHED = "punished"
    SOFT = "soft"


class NoThinkingReward(StrEnum):
    """The reward of a rollout without a thinking part. GRADED: as any other. PUNISHED: a fixed reward, as Klear's."""

    GRADED = "graded"
    PUNISHED = "punished"


def reward_of_verdict(verdict: Verdict, rule: RewardRule = RewardRule.SIGN) -> float:
    """The part of a reward that the verdict decides. SOFT is passed / total, so every test must have been run.

    Raises ValueError for an internal_error, for SOFT when grading stopped early, and for CALLABLE.
    """
    if verdict.is_ours:
        raise ValueError("an internal_error has no reward")
    accepted = verdict.kind is VerdictKind.ACCEPTED
    if rule is RewardRule.SIGN:
        return 1.0 if accepted else -1.0
    if rule is RewardRule.BINARY:
        return 1.0 if accepted else 0.0
    if rule is RewardRule.BINARY_FORMAT:
        return (1.0 if accepted else 0.0) - (0.1 if verdict.kind is VerdictKind.NO_CODE else 0.0)
    if rule is RewardRule.R1_CODE_INTERPRETER:
        return (1.0 if accepted else 0.0) + (-0.1 if verdict.kind is VerdictKind.NO_CODE else 0.1)
    if rule is RewardRule.CALLABLE:
        raise ValueError("a user's reward is not decided by rule")
    if verdict.kind in (VerdictKind.NO_CODE, VerdictKind.COMPILE_ERROR) or not verdict.total:
        return 0.0
    if verdict.graded < verdict.total:
        raise ValueError("a soft reward needs every test run: turn stop_on_first_failure off")
    return verdict.passed / verdict.total
