"""The plan's section: the stages of a training, each an ordinary run with some keys changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from nouscoder.config.base import Section
from nouscoder.domain.plan import StartFrom

# Keys that belong to the plan as a whole.
NOT_IN_A_STAGE = ("plan", "run.name", "run.root", "run.services", "policy.path", "tls")


class YarnSection(Section):
    """YaRN rope scaling, written to config.json of the policy that the stage begins with."""

    factor: float = Field(0.0, ge=0, description="the context is factor * original_tokens; 0: as the policy has it")
    original_tokens: int = Field(0, ge=0, description="positions that the model was trained for before YaRN")

    @model_validator(mode="after")
    def _whole(self) -> YarnSection:
        if bool(self.factor) != bool(self.original_tokens) or 0 < self.factor <= 1:
            raise ValueError("yarn needs a factor above 1 and original_tokens")
        return self

    @property
    def positions(self) -> int:
        """The number of positions with YaRN."""
        return round(self.factor * self.original_tokens)


class StageSection(Section):
    """One stage: a run in the folder NN-NAME of the plan's folder."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,49}$", description="name of the stage: letters, digits, dots, _ and -"
    )
    start: StartFrom = Field(
        StartFrom.LAST,
        alias="from",
        description="policy of the stage before that this one begins with; best: by pass@1 on its held-out problems",
    )
    changes: dict[str, Any] = Field(
        {}, alias="set", description="keys of this configuration that the stage changes, as set.run.total_batches = 10"
    )
    yarn: YarnSection = YarnSection()

    @model_validator(mode="after")
    def _changes_a_run(self) -> StageSection:
        for name in NOT_IN_A_STAGE:
            node: Any = self.changes
            for part in name.split("."):
                node = node.get(part) if isinstance(node, dict) else None
            if node is not None:
                raise ValueError(f"a stage cannot set {name}: it is the same in all stages")
        return self


class PlanSection(Section):
    """Stages that `nouscoder train` runs one after the other; without any it makes one run."""

    stages: tuple[StageSection, ...] = Field((), description="the stages, in order")

    @model_validator(mode="after")
    def _names(self) -> PlanSection:
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            raise ValueError(f"two stages have one name: {', '.join(names)}")
        return self

    @model_validator(mode="after")
    def _nothing_before_the_first(self) -> PlanSection:
        if self.stages and self.stages[0].start is StartFrom.BEST:
            raise ValueError('the first stage begins with policy.path: it has no from = "best"')
        return self


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with the values of `changes`, section by section.

    A section with another `name` or `kind`, such as another objective, replaces the one of `tree`, whose keys it does
    not have.
    """
    whole = dict(tree)
    for key, value in changes.items():
        before = whole.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping) and not _renamed(before, value):
            whole[key] = merged(before, value)
        else:
            whole[key] = value
    return whole


def _renamed(before: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    return any(key in before and value.get(key, before[key]) != before[key] for key in ("name", "kind"))
