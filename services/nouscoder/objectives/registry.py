"""The objectives: the union of their settings, which `learner.objective.name` chooses from, and the published ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from nouscoder.objectives.base import Objective
from nouscoder.objectives.cispo import Cispo
from nouscoder.objectives.correction import CorrectionKind
from nouscoder.objectives.dapo import Dapo
from nouscoder.objectives.distillation import Distillation
from nouscoder.objectives.entry_point import EntryPointObjective
from nouscoder.objectives.gppo import Gppo
from nouscoder.objectives.grpo import Grpo
from nouscoder.objectives.gspo import Gspo
from nouscoder.objectives.loss import ObjectiveSection, SharedTerms, SurrogateLoss
from nouscoder.objectives.ppo import Ppo
from nouscoder.objectives.reinforce_plus_plus import ReinforcePlusPlus
from nouscoder.sections import OneOf, sections_in

ObjectiveSettings = Annotated[
    Dapo | Grpo | Gspo | Gppo | Cispo | ReinforcePlusPlus | Ppo | Distillation | EntryPointObjective,
    OneOf("name", default="dapo"),
]

OBJECTIVES = tuple(kind for kind in sections_in(ObjectiveSettings) if issubclass(kind, ObjectiveSection))

PUBLISHED: Mapping[str, ObjectiveSection] = {
    name: section for kind in OBJECTIVES for name, section in kind.published().items()
}


def objective_of(chosen: ObjectiveSettings, shared: SharedTerms) -> Objective:
    """The loss of an objective with the shared terms. Raises Unusable for code of the user that cannot be loaded."""
    if shared.correction.kind is CorrectionKind.ENTRY_POINT:
        shared.correction.users_function()
    return SurrogateLoss(chosen.loaded() if isinstance(chosen, EntryPointObjective) else chosen, shared)
