"""Which objective a configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nouscoder.config import LearnerSection
from nouscoder.learner.objectives.base import Objective
from nouscoder.learner.objectives.dapo import Dapo


def _dapo(config: LearnerSection) -> Objective:
    return Dapo(config.clip_low, config.clip_high, config.tis_cap)


OBJECTIVES: Mapping[str, Callable[[LearnerSection], Objective]] = {"dapo": _dapo}


def objective_of(config: LearnerSection) -> Objective:
    """The objective `config.objective` names, with its settings."""
    return OBJECTIVES[config.objective](config)
