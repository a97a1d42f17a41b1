"""Published recipes: the files of configs/, the table `[recipe]` in each, and where each of its values comes from.

A recipe is found by its name, in the package or in the folder configs/ of the source. Its data and its model have
places of their own: the files that its commands make in the working directory, and the model of a hub. Whether a value
is exact is what configs/recipes-table.md says of it, which is a page of the documents too.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints

from nouscoder.errors import did_you_mean
from nouscoder.sections import ConfigError, Section

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parents[1] / "configs")
_HEADER = re.compile(r"\[+([\w.-]+)\]+")
_VALUE = re.compile(r"([\w.-]+) *= *(.*)")
_STAGE = re.compile(r"plan\.stages\[\d+\]\.name$")
_TABLE = "recipes-table.md"
_CELL = re.compile(r"`(?:stage ([\w-]+): )?([\w.]+) = [^`]+`")  # (stage, key) of a value in the table

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
    """Where a value comes from, by the state of its row in the table; without a row it is a choice of ours."""

    EXACT = "exact"
    APPROXIMATE = "approximate, or a choice of ours"
    UNKNOWN = "unknown, so ours"


_STATES = {"works": Origin.EXACT, "approximate": Origin.APPROXIMATE, "unknown": Origin.UNKNOWN}


@dataclass(frozen=True, slots=True)
class RecipeValue:
    """A value of a recipe file as it is written, the comment beside it, and where it comes from."""

    key: str
    value: str
    comment: str
    origin: Origin = Origin.APPROXIMATE


def recipe_head(file: Path) -> str:
    """The comment at the head of a recipe file."""
    lines = []
    for line in file.read_text(encoding="utf8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return "\n".join(lines)


def recipe_values(file: Path) -> list[RecipeValue]:
    """The values of a recipe file in its order, without the table [recipe]; `plan.stages[0]` is the first stage."""
    values = {each.key: each for each in _written(file)}
    stages = {json.loads(each.value): key.removesuffix(".name") for key, each in values.items() if _STAGE.match(key)}
    for stage, key, origin in _table_rows(file.stem):
        places = [f"{stages[stage]}.set.{key}", f"{stages[stage]}.{key}", key] if stage else [key]
        # An inline table has all of its keys in one value.
        for known in (one for place in places for one in values if f"{place}.".startswith(f"{one}.")):
            values[known] = replace(values[known], origin=origin)
            break
    return [*values.values()]


def _table_rows(name: str) -> Iterator[tuple[str, str, Origin]]:
    """(stage or "", key, origin) of each value that the table has of a recipe."""
    recipes: list[str] = []
    file = next(folder / _TABLE for folder in _FOLDERS if (folder / _TABLE).is_file())
    for line in file.read_text(encoding="utf8").splitlines():
        if line.startswith("## "):
            recipes = line[3:].split(", ")
        elif name in recipes and line.startswith("| "):
            _, _, values, state, *_ = line.split("|")
            yield from ((*found, _STATES[re.findall(r"\w+", state)[0]]) for found in _CELL.findall(values))


def _written(file: Path) -> Iterator[RecipeValue]:
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
