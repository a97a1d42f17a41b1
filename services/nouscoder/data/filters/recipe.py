"""A recipe: the TOML file that names the inputs and the filters of a whole selection, in their order.

name = "deepcoder"
inputs = ["problems.parquet"]

[[steps]]
filter = "num_tests"
at_least = 5
"""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from nouscoder.data.filters.decontaminate import Decontaminate, ExactDuplicates
from nouscoder.data.filters.embedding_duplicates import EmbeddingDuplicates
from nouscoder.data.filters.judge_votes import JudgeVotes
from nouscoder.data.filters.near_duplicates import NearDuplicates
from nouscoder.data.filters.pass_rates import PassRate, Potential, Sample
from nouscoder.data.filters.rules import (
    Metadata,
    NoImages,
    NoUrls,
    NumTests,
    PromptLength,
    PromptScript,
    TestsSize,
    TestsType,
)
from nouscoder.data.filters.step import CannotFilter, Step
from nouscoder.data.filters.verified import ReferencesPass, WrongSolutionsFail
from nouscoder.errors import did_you_mean
from nouscoder.formats.body import Body

FILTERS: tuple[type[Step], ...] = (
    *(ExactDuplicates, Decontaminate, NearDuplicates),
    *(NumTests, TestsSize, TestsType, PromptLength, PromptScript, NoUrls, NoImages, Metadata),
    *(PassRate, Potential, Sample),
    *(ReferencesPass, WrongSolutionsFail),
    *(JudgeVotes, EmbeddingDuplicates),
)
NAMES = {kind.model_fields["filter"].annotation.__args__[0]: kind for kind in FILTERS}  # type: ignore[union-attr]


class RecipeBody(Body):
    """The fields of the file."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$", description="of the selection")
    inputs: list[str] = Field(min_length=1, description="problem files, in the order of the output")
    steps: list[dict[str, Any]] = Field(min_length=1, description="the filters")


class Recipe:
    """A recipe that was read. `folder` is where its relative paths start."""

    def __init__(self, name: str, inputs: tuple[str, ...], steps: tuple[Step, ...], folder: Path) -> None:
        self.name = name
        self.inputs = inputs
        self.steps = steps
        self.folder = folder

    @property
    def sha256(self) -> str:
        """The digest of what it says, so comments and the place of the file do not count."""
        said = [self.name, *self.inputs, *(step.model_dump_json() for step in self.steps)]
        return hashlib.sha256("\n".join(said).encode()).hexdigest()


def read_recipe(path: Path, folder: Path | None = None) -> Recipe:
    """The recipe in a TOML file. Relative paths start at `folder`, by default that of the file.

    Raises CannotFilter with a sentence for each fault, also for files that do not exist.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError) as error:
        raise CannotFilter(f"{path} cannot be read: {error}") from error
    faults: list[str] = []
    body = _validated(RecipeBody, tree, "", faults)
    steps = [_step(number, given, faults) for number, given in enumerate([] if body is None else body.steps, 1)]
    if body is None or faults:
        raise CannotFilter("\n".join(f"{path}: {fault}" for fault in faults))
    known = tuple(step for step in steps if step is not None)
    recipe = Recipe(body.name, tuple(body.inputs), known, (folder or path.parent).absolute())
    named = [*recipe.inputs, *(name for step in known for name in step.files())]
    missing = [name for name in dict.fromkeys(named) if not (recipe.folder / name).is_file()]
    if missing:
        raise CannotFilter("\n".join(f"{path}: there is no file {recipe.folder / name}" for name in missing))
    return recipe


def _step(number: int, given: dict[str, Any], faults: list[str]) -> Step | None:
    name = given.get("filter")
    if name not in NAMES:
        faults.append(f"step {number}: {name!r:.60} is not a filter{did_you_mean(str(name), NAMES)}")
        return None
    step: Step | None = _validated(NAMES[name], given, f"step {number} ({name}): ", faults)
    return step


def _validated(kind: type[Any], given: Any, place: str, faults: list[str]) -> Any:
    """The record, or None after adding its faults."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            key = ".".join(str(part) for part in fault["loc"])
            if fault["type"] == "extra_forbidden":
                faults.append(f"{place}unknown key {key}{did_you_mean(key, kind.model_fields)}")
            elif fault["type"] == "missing":
                faults.append(f"{place}{key} is missing")
            else:
                wrong = fault["msg"].removeprefix("Value error, ")
                faults.append(f"{place}{key}: {wrong}" if key else f"{place}{wrong}")
        return None
