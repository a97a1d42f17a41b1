"""DAPO: PPO's clip with a higher upper side, and the mean over tokens. NousCoder-14B was trained with it.

Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", arXiv 2503.14476: the objective is
equation 8, its ratio and advantage equation 9, the decoupled clip equation 10 and the token-level mean equation 12.
Group advantages (equation 9) and dynamic sampling (equation 11) are computed before: see advantage.py and the broker.
To be maximised, with r = pi_theta / pi_old, A the token's advantage and N loss tokens in the minibatch:

    1/N * sum over tokens of  w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

NousCoder-14B: w = min(2, pi_old / pi_sampler), which is the default of learner.correction. The tokens of overlong
rollouts have advantage 0: they add nothing to the sum, but they count in N.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nouscoder.objectives.clip import ClippedObjective, clip_high_key
from nouscoder.objectives.loss import NAME


class Dapo(ClippedObjective):
    """DAPO (NousCoder-14B): PPO's clip with a higher upper side, mean over tokens."""

    name: Literal["dapo"] = Field("dapo", description=NAME)
    clip_high: float = clip_high_key(0.28)
