"""Settings of the objectives: one section an objective, chosen by `learner.objective.name`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nouscoder.config.base import Section


class DapoSettings(Section):
    """DAPO's clipped objective. The defaults are the published values."""

    name: Literal["dapo"] = Field("dapo", description="which objective is optimized; dapo: DAPO's clipped objective")
    clip_low: float = Field(0.2, gt=0, lt=1, description="DAPO's lower clip")
    clip_high: float = Field(0.28, gt=0, description="DAPO's higher clip")
    tis_cap: float = Field(2.0, gt=0, description="C of truncated importance sampling, min(C, pi_old / pi_sampler)")


# With a second objective this becomes Annotated[DapoSettings | Other, Field(discriminator="name")].
ObjectiveSettings = DapoSettings
