"""Decides rewards by `broker.reward`: a rule, or a function of the user. A rollout of an agent may have its own.

INVARIANT: a reward is a finite number, or there is none. If a user's function fails, there is none: the rollout is
graded again and finally abandoned, as after an internal_error.
"""

from __future__ import annotations

import logging
import math
import pkgutil
from collections.abc import Callable

from nouscoder.config import Config
from nouscoder.config.broker import RewardSection
from nouscoder.domain.reward import NoThinkingReward, OverlongReward, RewardRule, reward_of_verdict
from nouscoder.domain.rollout import RolloutHeader
from nouscoder.domain.tokens import FinishReason
from nouscoder.domain.verdict import Verdict
from nouscoder.errors import Unusable

log = logging.getLogger(__name__)

_FREE_TURNS = 6  # R1-Code-Interpreter: a rollout with more turns than this loses 0.1
UserReward = Callable[[RolloutHeader, Verdict], float]


class Rewards:
    """The rewards of a run. Raises Unusable when the user's function cannot be loaded."""

    def __init__(self, config: Config) -> None:
        section = config.broker.reward
        self.run_all_tests = section.run_all_tests or section.rule is RewardRule.SOFT
        self._section, self._max_new_tokens = section, config.generation.sampling.max_new_tokens
        self._user = load_reward(section.entry_point) if section.rule is RewardRule.CALLABLE else None

    def of(self, rollout: RolloutHeader, verdict: Verdict) -> float | None:
        """The reward of a rollout; None for an internal_error, and when the user's function fails.

        Raises ValueError where `reward_of` does.
        """
        if verdict.is_ours:
            return None
        if (reward := rollout.own_reward) is None and self._user is not None:
            reward = self._of_user(self._user, rollout, verdict)
            if reward is None:
                return None
        if reward is None:
            return reward_of(rollout, verdict, self._section, self._max_new_tokens)
        return _adjusted(reward, rollout, self._section, self._max_new_tokens)

    @staticmethod
    def _of_user(user: UserReward, rollout: RolloutHeader, verdict: Verdict) -> float | None:
        try:
            reward = float(user(rollout, verdict))
        except Exception as error:
            log.warning(
                "the user's reward function failed", extra={"rollout_id": rollout.rollout_id, "fault": repr(error)}
            )
            return None
        if not math.isfinite(reward):
            log.warning(
                "the user's reward is not finite", extra={"rollout_id": rollout.rollout_id, "fault": repr(reward)}
            )
            return None
        return reward


def reward_of(rollout: RolloutHeader, verdict: Verdict, section: RewardSection, max_new_tokens: int = 0) -> float:
    """The reward of one rollout by rule. Raises ValueError, naming the rollout, where `reward_of_verdict` does."""
    try:
        reward = reward_of_verdict(verdict, section.rule)
    except ValueError as error:
        raise ValueError(f"rollout {rollout.rollout_id}: {error}") from error
    if section.rule is RewardRule.R1_CODE_INTERPRETER and rollout.num_turns > _FREE_TURNS:
        reward -= 0.1
    return _adjusted(reward, rollout, section, max_new_tokens)


def _adjusted(reward: float, rollout: RolloutHeader, section: RewardSection, max_new_tokens: int) -> float:
    """`reward`, changed for a rollout without a thinking part and for one that is overlong.

    Klear-Reasoner's script has -0.5 without a thinking part (Kwai-Klear/KlearReasoner,
    verl/utils/reward_score/reward_config.py).
    """
    if section.overlong is OverlongReward.PUNISHED and rollout.finish_reason is FinishReason.LENGTH:
        return section.punished_reward
    if section.no_thinking is NoThinkingReward.PUNISHED and not rollout.has_thinking:
        reward = section.no_thinking_reward
    if section.overlong is OverlongReward.SOFT:
        num_tokens = rollout.num_tokens - rollout.num_prompt_tokens
        return reward + soft_overlong_punishment(num_tokens, max_new_tokens, section.buffer_tokens)
    return reward


def soft_overlong_punishment(num_tokens: int, max_tokens: int, buffer_tokens: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), in [-1, 0], to be added to the reward.

    0 up to max_tokens - buffer_tokens, then falling linearly to -1 at max_tokens.
    """
    begin = max_tokens - buffer_tokens
    if num_tokens <= begin:
        return 0.0
    return max(-1.0, (begin - num_tokens) / buffer_tokens)


def load_reward(entry_point: str) -> UserReward:
    """The function that `package.module:function` names. Raises Unusable when there is none."""
    try:
        function = pkgutil.resolve_name(entry_point)
    except Exception as error:
        raise Unusable(f"broker.reward.entry_point {entry_point!r} cannot be loaded: {error}") from error
    if not callable(function):
        raise Unusable(f"broker.reward.entry_point {entry_point!r} is not a function")
    reward: UserReward = function
    return reward
