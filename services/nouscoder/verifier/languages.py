"""The languages that can be graded, read from languages.toml, and which of them this host has.

A language is installed when each of its tools is in a folder that candidates see too (`SEARCH_PATH`): a compiler in
somebody's home folder is of no use inside a sandbox.
"""

from __future__ import annotations

import functools
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

SEARCH_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/go/bin:/usr/lib/go/bin"
_REGISTRY = Path(__file__).with_name("languages.toml")
_KEYS = {"source", "compile", "run", "time_factor", "memory_extra_bytes", "detect"}


@dataclass(frozen=True, slots=True)
class Language:
    """How programs of one language are compiled and run. `run` is None for python: the warm interpreter runs it.

    Of an installed language the tools in `compile`, `run` and `detect` are absolute paths.
    """

    name: str
    source_name: str
    compile: tuple[str, ...] | None
    run: tuple[str, ...] | None
    time_factor: float
    memory_extra_bytes: int
    detect: tuple[str, ...]


def registry(path: Path = _REGISTRY) -> Mapping[str, Language]:
    """Every language of the file, installed or not. Raises ValueError naming the table at fault."""
    tables = tomllib.loads(path.read_text("utf-8"))
    return MappingProxyType({name: _language(name, table) for name, table in tables.items()})


def find_installed(languages: Mapping[str, Language], search_path: str = SEARCH_PATH) -> Mapping[str, Language]:
    """Those whose tools are all found in `search_path`, with their tools as absolute paths."""
    found = {}
    for name, language in languages.items():
        tools = {tool: shutil.which(tool, path=search_path) for tool in language.detect}
        if all(tools.values()):
            found[name] = _resolved(language, {tool: path for tool, path in tools.items() if path})
    return MappingProxyType(found)


@functools.cache
def installed() -> Mapping[str, Language]:
    """The languages of this host, looked for once a process."""
    return find_installed(registry())


def _language(name: str, table: Mapping[str, Any]) -> Language:
    unknown = table.keys() - _KEYS
    missing = _KEYS - {"compile", "run"} - table.keys()
    if unknown or missing:
        raise ValueError(f"languages.toml: [{name}] has unknown keys {sorted(unknown)}, lacks {sorted(missing)}")
    if not table["time_factor"] > 0 or table["memory_extra_bytes"] < 0:
        raise ValueError(f"languages.toml: [{name}] has a time_factor or memory_extra_bytes out of range")
    return Language(
        name=name,
        source_name=table["source"],
        compile=tuple(table["compile"]) if "compile" in table else None,
        run=tuple(table["run"]) if "run" in table else None,
        time_factor=float(table["time_factor"]),
        memory_extra_bytes=int(table["memory_extra_bytes"]),
        detect=tuple(table["detect"]),
    )


def _resolved(language: Language, tools: Mapping[str, str]) -> Language:
    def argv(command: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if command is None else tuple(tools.get(word, word) for word in command)

    return replace(
        language,
        compile=argv(language.compile),
        run=argv(language.run),
        detect=tuple(tools[tool] for tool in language.detect),
    )
