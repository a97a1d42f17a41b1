"""What every section of the configuration is made of, the list of all keys (found by walking the sections), and paths.

Relative paths start at the folder of the file that names them. Defaults are not changed: `problems.train`,
`problems.held_out`, `policy.path` and `broker.records.folder` start at the run folder then, where `nouscoder demo` and
`nouscoder prepare-run` make their inputs. HUB_ID is the form of a model's name on a hub.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from nouscoder.errors import Unusable
from nouscoder.input_file import regular

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class ConfigError(Unusable):
    """The configuration cannot be used. The message has one sentence for each fault, naming file and key."""


Record = TypeVar("Record", bound="DataclassInstance")


class Section(BaseModel):
    """Base of every section: unknown keys fail, and it is immutable. A part of the project receives its section.

    The domain knows no configuration. What one of its functions needs is a record that `record` makes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    def _faults(self) -> Iterator[str]:
        """Why the values do not fit together, a sentence each. Only the first is told."""
        yield from ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for fault in self._faults():
            raise ValueError(fault)
        return self

    def record(self, kind: type[Record], **others: Any) -> Record:
        """A record of the domain. A field has the value of this section's key of the same name, or one of `others`."""
        names = [field.name for field in fields(kind) if field.init and field.name not in others]
        return kind(**{name: getattr(self, name) for name in names}, **others)


def grpc_address(port: int) -> Any:
    """The key `grpc` of a service, with its usual port."""
    return Field(f"127.0.0.1:{port}", description="address to listen on; port 0 takes a free one; also unix:PATH")


class ServiceSection(Section):
    """The addresses of a service."""

    grpc: str = grpc_address(0)
    metrics: str = Field("127.0.0.1:0", description="address of the Prometheus page")
    grpc_health: str = Field("", description="address of grpc.health.v1 alone, never encrypted; empty turns it off")


# The tags of sections that one key tells apart begin with that key, so that the report of a fault can leave them out.
TAGS = ("name=", "kind=")


@dataclass(frozen=True, slots=True)
class OneOf:
    """Chooses among the sections of a union by the value of `key`, whose names are those of the sections' literals.

    It stands in the annotation: Annotated[A | B, OneOf("name", default="a")]. Without the key it is the `default`.
    """

    key: str
    default: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A union with tags KEY=VALUE."""
        sections = {f"{self.key}={name}": kind for kind in sections_in(source) for name in self._names(kind)}
        return core_schema.tagged_union_schema(
            {tag: handler.generate_schema(kind) for tag, kind in sections.items()},
            self._tag_of,
            custom_error_type="one_of",
            custom_error_message=f"a section whose {self.key} must be one of {', '.join(self.names(source))}",
        )

    def names(self, union: object) -> list[str]:
        """The names of all sections of a union."""
        return [name for kind in sections_in(union) for name in self._names(kind)]

    def _names(self, kind: type[BaseModel]) -> tuple[str, ...]:
        return typing.get_args(kind.model_fields[self.key].annotation)

    def _tag_of(self, value: Any) -> str:
        chosen = value.get(self.key, self.default) if isinstance(value, dict) else getattr(value, self.key, None)
        return f"{self.key}={chosen}"


class PathKind(StrEnum):
    """What a path names. A relative path starts at the folder of the configuration file.

    INPUT      a file or folder that must exist
    OUTPUT     a file or folder that is made when it is missing
    RUN_INPUT  like INPUT; when nothing is there, the key's default starts at the run folder
    MODEL      like RUN_INPUT; when nothing is there, ORGANISATION/MODEL is a model of a hub
    """

    INPUT = "input"
    OUTPUT = "output"
    RUN_INPUT = "run_input"
    MODEL = "model"


InputFile = Annotated[str, PathKind.INPUT]
OutputFile = Annotated[str, PathKind.OUTPUT]
OutputPath = Annotated[Path, PathKind.OUTPUT]
RunInput = Annotated[Path, PathKind.RUN_INPUT]
Model = Annotated[Path, PathKind.MODEL]
InputPaths = Annotated[tuple[Path, ...], PathKind.INPUT]
Options = dict[str, str | int | float | bool]  # of code of the user, which reads them itself


@dataclass(frozen=True, slots=True)
class Key:
    """One key. `path` leads to it from the root, such as ("run", "seed")."""

    path: tuple[str, ...]
    field: FieldInfo

    @property
    def name(self) -> str:
        """run.seed."""
        return ".".join(self.path)

    @property
    def place(self) -> PathKind | None:
        """What the key's value names on the disk; None when it is no path."""
        return next((mark for mark in self.field.metadata if isinstance(mark, PathKind)), None)


def sections_in(annotation: object) -> list[type[BaseModel]]:
    """The sections that a field holds: one, those of a union, or none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in typing.get_args(annotation) for section in sections_in(argument)]


def keys_of(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[Key]:
    """The keys of a section and of the sections in it, in the order of their definition.

    A union's keys come once, and the one that chooses has the names of all sections as its type.
    """
    seen: set[tuple[str, ...]] = set()
    for attribute, field in model.model_fields.items():
        name = field.alias or attribute
        inner = sections_in(field.annotation)
        found = [key for section in inner for key in keys_of(section, (*path, name))]
        chooser = next((mark for mark in field.metadata if isinstance(mark, OneOf)), None)
        for key in found if inner else [Key((*path, name), field)]:
            if chooser is not None and key.path == (*path, name, chooser.key):
                key = Key(key.path, copy(key.field))
                names = tuple(chooser.names(field.annotation))
                key.field.annotation = typing.cast("type[Any]", typing.Literal[names])
            if key.path not in seen:
                seen.add(key.path)
                yield key


def kinds_with(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The tags, such as name=subset, of those sections of a union that have the key; empty when no union has it."""
    sections = [model]
    for part in path[:-1]:
        fields = [section.model_fields.get(part) for section in sections]
        sections = [inner for field in fields if field is not None for inner in sections_in(field.annotation)]
    tags = [
        f"{tag}{value}"
        for section in sections
        if path[-1] in section.model_fields
        for tag in TAGS
        if (chosen := section.model_fields.get(tag.removesuffix("="))) is not None
        for value in typing.get_args(chosen.annotation)
    ]
    return list(dict.fromkeys(tags))


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def place_paths(tree: dict[str, Any], model: type[BaseModel], folder: Path) -> None:
    """Make the relative paths in `tree`, the unchecked values of `model`, absolute. They start at `folder`."""
    for key in keys_of(model):
        if key.place is None:
            continue
        node: Any = tree
        for part in key.path[:-1]:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict) and key.path[-1] in node:
            node[key.path[-1]] = _placed(node[key.path[-1]], folder, key)


def _placed(value: Any, folder: Path, key: Key) -> Any:
    if isinstance(value, list):
        return [_placed(each, folder, key) for each in value]
    if not isinstance(value, str) or not value or "://" in value:
        return value
    placed = (folder / value).resolve()
    if placed.exists() and key.place is not PathKind.OUTPUT:
        regular(placed)
    if Path(value).is_absolute():
        return value
    return value if not placed.exists() and _may_be_elsewhere(value, key) else str(placed)


def _may_be_elsewhere(value: str, key: Key) -> bool:
    """Whether the value may name something that is not in the file's folder: in the run folder, or on a hub."""
    is_default = key.place in (PathKind.RUN_INPUT, PathKind.MODEL) and Path(value) == key.field.default
    return is_default or (key.place is PathKind.MODEL and HUB_ID.fullmatch(value) is not None)
