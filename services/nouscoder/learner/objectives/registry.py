"""Maps objective settings to objectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nouscoder.config import DapoSettings, ObjectiveSettings
from nouscoder.learner.objectives.base import Objective
from nouscoder.learner.objectives.dapo import Dapo

OBJECTIVES: Mapping[type[ObjectiveSettings], Callable[[ObjectiveSettings], Objective]] = {DapoSettings: Dapo}


def objective_of(settings: ObjectiveSettings) -> Objective:
    """The objective that these settings configure."""
    return OBJECTIVES[type(settings)](settings)
