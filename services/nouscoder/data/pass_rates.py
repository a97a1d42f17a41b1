"""Files of pass rates: one {"problem_id", "passed", "sampled"} for each problem, as JSON lines or as one array.

The counts come from any evaluation: that of the base policy (NousCoder's and Skywork-OR1's offline filters), of a
strong model (Klear-Reasoner), or of a run (`nouscoder data stats RUN --json`). Several records of one problem are added
up. Other fields are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, Field, model_validator

from nouscoder.data.json_records import checked_records
from nouscoder.formats.body import Body


class PassRateBody(Body):
    """One record of a file of pass rates."""

    model_config = ConfigDict(extra="ignore")

    problem_id: str = Field(min_length=1)
    passed: int = Field(ge=0)
    sampled: int = Field(ge=1)

    @model_validator(mode="after")
    def _at_most_all(self) -> PassRateBody:
        if self.passed > self.sampled:
            raise ValueError(f"passed {self.passed} is more than sampled {self.sampled}")
        return self


@dataclass(frozen=True, slots=True)
class PassCount:
    """Rollouts of one problem, and how many of them passed."""

    passed: int
    sampled: int

    @property
    def rate(self) -> float:
        """The share that passed."""
        return self.passed / self.sampled


def read_pass_rates(path: Path) -> dict[str, PassCount]:
    """The counts of each problem. Raises BadRecord and UnreadableFile."""
    found: dict[str, PassCount] = {}
    for body in checked_records(path, PassRateBody):
        earlier = found.get(body.problem_id, PassCount(0, 0))
        found[body.problem_id] = PassCount(earlier.passed + body.passed, earlier.sampled + body.sampled)
    return found
