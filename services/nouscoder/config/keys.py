"""Every key of the configuration, found by walking its models: for messages, for paths and for the documentation."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from nouscoder.config.base import Place


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
    def place(self) -> Place | None:
        """What the key's value names on the disk; None when it is no path."""
        return next((mark for mark in self.field.metadata if isinstance(mark, Place)), None)


def sections_in(annotation: object) -> list[type[BaseModel]]:
    """The sections that a field holds: one, those of a union, or none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in typing.get_args(annotation) for section in sections_in(argument)]


def keys_of(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[Key]:
    """The keys of a section and of the sections in it, in the order of their definition. A union's keys come once."""
    seen: set[tuple[str, ...]] = set()
    for attribute, field in model.model_fields.items():
        name = field.alias or attribute
        inner = sections_in(field.annotation)
        found = [key for section in inner for key in keys_of(section, (*path, name))]
        for key in found if inner else [Key((*path, name), field)]:
            if key.path not in seen:
                seen.add(key.path)
                yield key
