"""Published recipes: the files of configs/, the table `[recipe]` in each, and where each of its values comes from.

A recipe is found by its name, in the package or in the folder configs/ of the source. Its data and its model have
places of their own: the files that its commands make in the working directory, and the model of a hub.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints

from nouscoder.config.base import ConfigError, Section
from nouscoder.errors import did_you_mean

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parents[1] / "configs")
_HEADER = re.compile(r"\[+([\w.-]+)\]+")
_VALUE = re.compile(r"([\w.-]+) *= *(.*)")
_UNKNOWN, _OURS = re.compile(r"\bunknown\b"), re.compile(r"\bours\b")

Command = Annotated[str, StringConstraints(pattern=r"^nouscoder ")]


class RecipeSection(Section):
    """What a published recipe is, for `nouscoder recipes`. A run only names it in messages."""

    source: str = Field("", description="paper, report or repository of the numbers")
    base_model: str = Field("", description="ORGANISATION/MODEL that is trained")
    data: tuple[Command, ...] = Field((), description="commands that make the problem files in the working directory")
    train: str = Field("", description="file of these commands to train on")
    held_out: str = Field("", description="file of these commands for evaluations")
    hardware: str = Field("", description="what the authors trained on, or what is enough")
    expected: tuple[str, ...] = Field((), description="published results, and of which benchmark")

    def inputs(self) -> list[str]:
        """Overrides `a.b=value` that name the recipe's files and model."""
        named = {"problems.train": self.train, "problems.held_out": self.held_out, "policy.path": self.base_model}
        return [f'{key}="{value}"' for key, value in named.items() if value]


SELECTIONS = "data"  # the folder of the recipes of `nouscoder data filter`


def recipe_names(kind: str = "") -> list[str]:
    """The names of all recipes, or of those in the folder `kind`."""
    return sorted({file.stem for folder in _FOLDERS for file in (folder / kind).glob("*.toml")})


def recipe_path(name: str, kind: str = "") -> Path:
    """The TOML file of a recipe. Raises ConfigError naming the existing recipes."""
    for folder in _FOLDERS:
        if (folder / kind / f"{name}.toml").is_file():
            return folder / kind / f"{name}.toml"
    names = recipe_names(kind)
    raise ConfigError(f"there is no recipe {name!r}{did_you_mean(name, names)} (known recipes: {', '.join(names)})")


class Origin(StrEnum):
    """Where a value comes from: the comment beside it says so."""

    EXACT = "exact"
    APPROXIMATE = "approximate, or a choice of ours"
    UNKNOWN = "unknown, so ours"


@dataclass(frozen=True, slots=True)
class RecipeValue:
    """A value of a recipe file as it is written, and the comment beside it."""

    key: str
    value: str
    comment: str

    @property
    def origin(self) -> Origin:
        """UNKNOWN or APPROXIMATE where the comment says "unknown" or "ours", else EXACT: as its source has it."""
        if _UNKNOWN.search(self.comment):
            return Origin.UNKNOWN
        return Origin.APPROXIMATE if _OURS.search(self.comment) else Origin.EXACT


def recipe_head(file: Path) -> str:
    """The comment at the head of a recipe file."""
    lines = []
    for line in file.read_text(encoding="utf8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return "\n".join(lines)


def recipe_values(file: Path) -> Iterator[RecipeValue]:
    """The values of a recipe file in its order, without the table [recipe]; `plan.stages[0]` is the first stage."""
    section, stage = "", -1
    lines = iter(file.read_text(encoding="utf8").splitlines())
    for line in lines:
        if header := _HEADER.fullmatch(line.partition("#")[0].strip()):
            stage += line.startswith("[[plan.stages]]")
            section = f"plan.stages[{stage}]" if line.startswith("[[") else header[1]
        elif found := _VALUE.fullmatch(line.strip()):
            text = found[2]
            while (ends := _value_end(text)) is None:
                text = f"{text}\n{next(lines)}"
            if section != "recipe":
                comment = text[ends:].strip().removeprefix("#").strip()
                yield RecipeValue(f"{section}.{found[1]}".lstrip("."), text[:ends].strip(), comment)


def _value_end(text: str) -> int | None:
    """Where the comment after the value begins, or the text ends; None when the value goes on in the next line."""
    for end in (*(index for index, character in enumerate(text) if character == "#"), len(text)):
        try:
            tomllib.loads(f"value = {text[:end]}")
        except tomllib.TOMLDecodeError:
            continue
        return end
    return None
