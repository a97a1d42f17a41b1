"""The languages of languages.toml: their names, and what prompts, answers, pages and documents say of them.

The file is the only place that lists languages. Its other keys, how programs are compiled and run, are read by
verifier/toolchains/languages.py.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

FILE = Path(__file__).with_name("languages.toml")


@dataclass(frozen=True, slots=True)
class KnownLanguage:
    """A language, whether or not it is installed somewhere. The head of languages.toml describes the fields."""

    name: str
    debian: tuple[str, ...]
    starter: str
    aliases: tuple[str, ...]
    compilers: tuple[str, ...]
    written: str
    tag: str
    comment: str
    family: str
    needs: tuple[str, ...]
    versions: tuple[str, ...]
    standards: str
    highlight: str

    def takes(self, standard: int) -> bool:
        """Whether programs of this standard, edition or major version run as those of the language here."""
        if not self.standards:
            return True
        ends = [part.partition(" to ") for part in self.standards.split(", ")]
        return any(int(first) <= standard <= int(last or first) for first, _, last in ends)


REQUIRED = frozenset({"debian", "starter"})
KEYS = frozenset(field.name for field in fields(KnownLanguage)) - {"name"}


def read_tables(path: Path) -> dict[str, dict[str, Any]]:
    """The table of each language by its name, unchecked."""
    return tomllib.loads(path.read_text("utf-8"))


def _known(name: str, table: Mapping[str, Any]) -> KnownLanguage:
    tag = table.get("tag", name)
    return KnownLanguage(
        name=name,
        debian=tuple(table["debian"]),
        starter=table["starter"],
        aliases=tuple(table.get("aliases", ())),
        compilers=tuple(table.get("compilers", ())),
        written=table.get("written", name.capitalize()),
        tag=tag,
        comment=table.get("comment", "//"),
        family=table.get("family", name),
        needs=tuple(table.get("needs", ())),
        versions=tuple(table.get("versions", ())),
        standards=table.get("standards", ""),
        highlight=table.get("highlight", tag),
    )


KNOWN: Mapping[str, KnownLanguage] = MappingProxyType(
    {name: _known(name, table) for name, table in read_tables(FILE).items()}
)
