"""Maps objective settings to objectives, and names the published configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nouscoder.config import (
    Aggregation,
    CispoSettings,
    DapoSettings,
    DistillationSettings,
    GppoSettings,
    GrpoSettings,
    GspoSettings,
    LearnerSection,
    ObjectiveSettings,
    PpoSettings,
    ReinforcePlusPlusSettings,
)
from nouscoder.learner.objectives.base import Objective
from nouscoder.learner.objectives.cispo import Cispo
from nouscoder.learner.objectives.composition import SharedTerms
from nouscoder.learner.objectives.dapo import Dapo
from nouscoder.learner.objectives.gppo import Gppo
from nouscoder.learner.objectives.grpo import Grpo
from nouscoder.learner.objectives.gspo import Gspo
from nouscoder.learner.objectives.on_policy_distillation import OnPolicyDistillation
from nouscoder.learner.objectives.ppo import Ppo
from nouscoder.learner.objectives.reinforce_plus_plus import ReinforcePlusPlus

OBJECTIVES: Mapping[type[ObjectiveSettings], Callable[[Any, SharedTerms], Objective]] = {
    DapoSettings: Dapo,
    GrpoSettings: Grpo,
    GspoSettings: Gspo,
    GppoSettings: Gppo,
    CispoSettings: Cispo,
    ReinforcePlusPlusSettings: ReinforcePlusPlus,
    PpoSettings: Ppo,
    DistillationSettings: OnPolicyDistillation,
}

PUBLISHED: Mapping[str, ObjectiveSettings] = {
    "dapo": DapoSettings(),
    "grpo": GrpoSettings(),
    "grpo+": GrpoSettings(clip_high=0.28, aggregation=Aggregation.TOKEN_MEAN),
    "gspo": GspoSettings(),
    "gspo+": GspoSettings(aggregation=Aggregation.TOKEN_MEAN),
    "gppo": GppoSettings(),
    "cispo": CispoSettings(),
    "reinforce++": ReinforcePlusPlusSettings(),
    "ppo": PpoSettings(),
}


def objective_of(section: LearnerSection) -> Objective:
    """The objective that the learner's section configures."""
    return OBJECTIVES[type(section.objective)](section.objective, SharedTerms.of(section))
