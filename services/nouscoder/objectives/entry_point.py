"""An objective of the user: a subclass of ObjectiveSection in a package of its own, as the objectives here are."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationError

from nouscoder.entry_points import PATTERN, load_entry_point
from nouscoder.errors import Unusable, plain_fault
from nouscoder.objectives.loss import NAME, ObjectiveSection
from nouscoder.sections import Options, Section

_KEY = "learner.objective"


class EntryPointObjective(Section):
    """A class of the user, as docs/recipes.md describes."""

    name: Literal["entry_point"] = Field("entry_point", description=NAME)
    entry_point: str = Field(pattern=PATTERN, description="package.module:Class")
    options: Options = Field({}, description="settings of the class, which checks them")

    def loaded(self) -> ObjectiveSection:
        """The user's objective with its settings. Raises Unusable."""
        kind = load_entry_point(f"{_KEY}.entry_point", self.entry_point)
        if not (isinstance(kind, type) and issubclass(kind, ObjectiveSection)):
            raise Unusable(
                f"{_KEY}.entry_point {self.entry_point!r} is no subclass of nouscoder.objectives.loss.ObjectiveSection"
            )
        try:
            return kind.model_validate(self.options)
        except ValidationError as error:
            faults = (f"{'.'.join(map(str, one['loc']))}: {plain_fault(one['msg'])}" for one in error.errors())
            raise Unusable(f"{_KEY}.options do not fit {self.entry_point}: {'; '.join(faults)}") from error
