"""The reward of a rollout: how a verdict becomes a number, and the terms that depend on the length of a completion.

Only `reward_of` applies the rules of rewards; the broker calls it once for each verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from nouscoder.domain.rollout import RolloutHeader
from nouscoder.domain.tokens import FinishReason
from nouscoder.domain.verdict import Verdict, VerdictKind


def soft_overlong_punishment(num_tokens: int, max_tokens: int, buffer_tokens: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), in [-1, 0], to be added to the reward.

    0 up to max_tokens - buffer_tokens, then falling linearly to -1 at max_tokens.
    """
    begin = max_tokens - buffer_tokens
    if num_tokens <= begin:
        return 0.0
    return max(-1.0, (begin - num_tokens) / buffer_tokens)


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


# R1-Code-Interpreter: a rollout with more turns than this loses 0.1.
_FREE_TURNS = 6


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


@dataclass(frozen=True, slots=True)
class RewardTerms:
    """All that a reward depends on besides rollout and verdict.

    punished_reward is that of PUNISHED. buffer_tokens and max_new_tokens are those of SOFT. no_thinking_reward
    is that of a rollout without a thinking part, if no_thinking is PUNISHED: -0.5 in Klear-Reasoner's script
    (Kwai-Klear/KlearReasoner, verl/utils/reward_score/reward_config.py).
    """

    rule: RewardRule = RewardRule.SIGN
    overlong: OverlongReward = OverlongReward.GRADED
    punished_reward: float = -1.0
    buffer_tokens: int = 0
    max_new_tokens: int = 0
    no_thinking: NoThinkingReward = NoThinkingReward.GRADED
    no_thinking_reward: float = -0.5


def reward_of(rollout: RolloutHeader, verdict: Verdict, terms: RewardTerms) -> float:
    """The reward of one rollout by rule. Raises ValueError, naming the rollout, where `reward_of_verdict` does."""
    try:
        reward = reward_of_verdict(verdict, terms.rule)
    except ValueError as error:
        raise ValueError(f"rollout {rollout.rollout_id}: {error}") from error
    if terms.rule is RewardRule.R1_CODE_INTERPRETER and rollout.num_turns > _FREE_TURNS:
        reward -= 0.1
    return adjusted(reward, rollout, terms)


def adjusted(reward: float, rollout: RolloutHeader, terms: RewardTerms) -> float:
    """`reward`, changed for a rollout without a thinking part and for one that is overlong."""
    if terms.overlong is OverlongReward.PUNISHED and rollout.finish_reason is FinishReason.LENGTH:
        return terms.punished_reward
    if terms.no_thinking is NoThinkingReward.PUNISHED and not rollout.has_thinking:
        reward = terms.no_thinking_reward
    if terms.overlong is OverlongReward.SOFT:
        num_tokens = rollout.num_tokens - rollout.num_prompt_tokens
        return reward + soft_overlong_punishment(num_tokens, terms.max_new_tokens, terms.buffer_tokens)
    return reward


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
