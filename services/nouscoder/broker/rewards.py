"""Decides rewards by `broker.reward`: a rule, or a function of the user. A rollout of an agent may have its own.

INVARIANT: a reward is a finite number, or there is none. If a user's function fails, there is none: the rollout is
graded again and finally abandoned, as after an internal_error.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from nouscoder.config import Config
from nouscoder.domain.reward import RewardRule, RewardTerms, adjusted, reward_of
from nouscoder.domain.rollout import RolloutHeader
from nouscoder.domain.verdict import Verdict
from nouscoder.entry_points import load_entry_point
from nouscoder.errors import Unusable

log = logging.getLogger(__name__)

UserReward = Callable[[RolloutHeader, Verdict], float]


class Rewards:
    """The rewards of a run. Raises Unusable when the user's function cannot be loaded."""

    def __init__(self, config: Config) -> None:
        section = config.broker.reward
        self.run_all_tests = section.run_all_tests or section.rule is RewardRule.SOFT
        self._terms = section.record(RewardTerms, max_new_tokens=config.generation.sampling.max_new_tokens)
        self._user = load_reward(section.entry_point) if section.rule is RewardRule.CALLABLE else None

    def of(self, rollout: RolloutHeader, verdict: Verdict) -> float | None:
        """The reward of a rollout; None for an internal_error, and when the user's function fails.

        Raises ValueError where `reward_of` does.
        """
        if verdict.is_ours:
            return None
        if rollout.own_reward is not None:
            return adjusted(rollout.own_reward, rollout, self._terms)
        if self._user is None:
            return reward_of(rollout, verdict, self._terms)
        try:
            reward = float(self._user(rollout, verdict))
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
        return adjusted(reward, rollout, self._terms)


def load_reward(entry_point: str) -> UserReward:
    """The function that `package.module:function` names. Raises Unusable when there is none."""
    function = load_entry_point("broker.reward.entry_point", entry_point)
    if not callable(function):
        raise Unusable(f"broker.reward.entry_point {entry_point!r} is not a function")
    reward: UserReward = function
    return reward
