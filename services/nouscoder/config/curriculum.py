"""The curriculum's section: one section for each policy, chosen by `broker.curriculum.name`.

domain/curriculum.py has the policies. data/pass_rates.py has the format of a file of pass rates.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from nouscoder.config.base import InputFile, Section
from nouscoder.config.objective import TAG

_NAMES = "epochs, subset, pass_rates, pools, potential, priorities"


def _name(name: str) -> Any:
    return Field(name, description=f"which problems are sampled, one of {_NAMES}; docs/recipes.md has the keys of each")


def _pass_rates() -> Any:
    return Field(
        "",
        description="file of base pass rates: records with problem_id, passed and sampled; problems that it lacks are"
        " left out",
    )


class PassRateBounds(Section):
    """Which problems are kept by their base pass rate."""

    min_pass_rate: float = Field(0.0, ge=0, le=1, description="problems below this base pass rate are left out")
    max_pass_rate: float = Field(1.0, ge=0, le=1, description="problems above this base pass rate are left out")
    drop_solved: bool = Field(True, description="problems of base pass rate 1 are left out")
    drop_unsolved: bool = Field(False, description="problems of base pass rate 0 are left out")

    def keeps(self, pass_rate: float) -> bool:
        """Whether a problem of this base pass rate is kept."""
        if (self.drop_solved and pass_rate == 1) or (self.drop_unsolved and pass_rate == 0):
            return False
        return self.min_pass_rate <= pass_rate <= self.max_pass_rate


class _CurriculumSection(Section):
    """The online filter, which every curriculum has."""

    retire_after: int = Field(
        0, ge=0, description="online filter: solved groups in a row after which a problem is retired; 0: never"
    )
    retire_pass_rate: float = Field(1.0, gt=0, le=1, description="a group counts as solved from this pass rate on")
    recheck_epochs: int = Field(2, ge=1, description="epochs that leave a retired problem out before it returns")


class EpochsCurriculum(_CurriculumSection):
    """Shuffled epochs over all problems."""

    name: Literal["epochs"] = _name("epochs")


class SubsetCurriculum(_CurriculumSection):
    """Shuffled epochs over a fixed subset, such as the 64 problems of a smoke test."""

    name: Literal["subset"] = _name("subset")
    problem_ids: tuple[str, ...] = Field((), description="for subset: the problems; excludes size")
    size: int = Field(0, ge=0, description="for subset: the number of problems, chosen by run.seed")
    pass_rates: InputFile = _pass_rates()

    @model_validator(mode="after")
    def _one_way(self) -> SubsetCurriculum:
        if bool(self.problem_ids) == bool(self.size):
            raise ValueError("subset needs problem_ids or size, not both")
        if self.pass_rates and not self.size:
            raise ValueError("pass_rates is for a subset of a size: with it only problems of 0 < pass rate < 1 count")
        return self


class _NeedsPassRates(_CurriculumSection):
    pass_rates: InputFile = _pass_rates()

    @model_validator(mode="after")
    def _has_pass_rates(self) -> _NeedsPassRates:
        if not self.pass_rates:
            raise ValueError("pass_rates is needed: the file of base pass rates")
        return self


class PassRatesCurriculum(_NeedsPassRates, PassRateBounds):
    """The offline filter: shuffled epochs over the problems whose base pass rate is within bounds."""

    name: Literal["pass_rates"] = _name("pass_rates")


class PoolStage(PassRateBounds):
    """A difficulty pool and its number of epochs."""

    epochs: int = Field(1, ge=1, description="epochs of this pool; the last pool lasts for ever")


class PoolsCurriculum(_NeedsPassRates):
    """Difficulty pools, one after another, such as all problems first and only hard ones late."""

    name: Literal["pools"] = _name("pools")
    stages: tuple[PoolStage, ...] = Field(
        (), description="for pools: the pools in their order, each with bounds and epochs"
    )

    @model_validator(mode="after")
    def _has_stages(self) -> PoolsCurriculum:
        if not self.stages:
            raise ValueError("pools needs at least one of stages")
        return self


class PotentialCurriculum(_NeedsPassRates):
    """The problems of highest potential 4p(1-p) first, then more of them (R1-Code-Interpreter)."""

    name: Literal["potential"] = _name("potential")
    parts: int = Field(4, ge=1, description="for potential: stage i has the i / parts of highest potential")
    epochs: int = Field(1, ge=1, description="for potential: epochs of each stage; the last lasts for ever")


class PrioritiesCurriculum(_CurriculumSection):
    """Each problem is sampled in a share of the epochs: by its weight, or by its failure rate in the run."""

    name: Literal["priorities"] = _name("priorities")
    priorities: InputFile = Field(
        "",
        description="for priorities: file with problem_id and priority in each line; empty: 1 - pass rate in the run",
    )
    least: float = Field(0.1, ge=0.01, le=1, description="for priorities: the least share of the epochs")


def _tag_of(value: Any) -> str:
    name = value.get("name", "epochs") if isinstance(value, dict) else getattr(value, "name", None)
    return f"{TAG}{name}"


CurriculumSection = Annotated[
    Annotated[EpochsCurriculum, Tag("name=epochs")]
    | Annotated[SubsetCurriculum, Tag("name=subset")]
    | Annotated[PassRatesCurriculum, Tag("name=pass_rates")]
    | Annotated[PoolsCurriculum, Tag("name=pools")]
    | Annotated[PotentialCurriculum, Tag("name=potential")]
    | Annotated[PrioritiesCurriculum, Tag("name=priorities")],
    Discriminator(
        _tag_of,
        custom_error_type="curriculum_name",
        custom_error_message=f"a section whose name must be one of {_NAMES}",
    ),
]
