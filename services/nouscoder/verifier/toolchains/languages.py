"""How the languages of languages.toml are compiled and run, and which are installed where candidates run.

A language is installed when each of its tools is in a folder that candidates can see (`SEARCH_PATH`), or in a toolchain
of a home folder that the language's `locate` finds, such as rustup's. Candidates then see the toolchain's folder alone.
Each slot has the tools of its own machine: `in_slot` gives a language the paths of them.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nouscoder.domain.languages import FILE, KEYS, REQUIRED, read_tables
from nouscoder.private_folder import is_trusted, user_cache

SEARCH_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/go/bin:/usr/lib/go/bin"
ON_THIS_MACHINE = ("local", "runsc", "fake")  # backends whose candidates have the languages of this machine
_MEMORY = "{memory_bytes}"
_UNBUFFERED = {"unbuffered_prelude", "unbuffered_tail", "unbuffered_run"}
_OPTIONAL = {"compile", "run", "prepare", "locate", "version", "libraries", *_UNBUFFERED} | (KEYS - REQUIRED)
_LOCATE_LIMIT_S = 10.0
_KEYS = _OPTIONAL | REQUIRED | {"source", "time_factor", "memory_extra_bytes", "detect"}


@dataclass(frozen=True, slots=True)
class Language:
    """How programs of one language are compiled and run. `run` is None for Python: the warm interpreter runs it.

    For an installed language, the tools in every command and in `detect` are absolute paths. `cache` is the folder
    of its toolchain cache (toolchain_cache.py), and `home` that of a toolchain outside the search path: `compile` needs
    them, and candidates must see them.
    """

    name: str
    source_name: str
    compile: tuple[str, ...] | None
    run: tuple[str, ...] | None
    time_factor: float
    memory_extra_bytes: int
    detect: tuple[str, ...]
    prepare: tuple[str, ...] | None = None
    version: tuple[str, ...] | None = None
    libraries: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    cache: Path | None = None
    locate: tuple[str, ...] | None = None
    home: Path | None = None
    unbuffered_prelude: str = ""
    unbuffered_tail: str = ""
    unbuffered_run: tuple[str, ...] | None = None


def registry(path: Path = FILE) -> Mapping[str, Language]:
    """Every language of the file, installed or not. Raises ValueError naming the invalid table."""
    return MappingProxyType({name: _language(name, table) for name, table in read_tables(path).items()})


def find_installed(languages: Mapping[str, Language], search_path: str = SEARCH_PATH) -> Mapping[str, Language]:
    """The languages whose tools are all in `search_path`, with their tools as absolute paths."""
    found = {}
    for name, language in languages.items():
        tools = {tool: shutil.which(tool, path=search_path) for tool in language.detect}
        if all(tools.values()):
            found[name] = _resolved(language, {tool: path for tool, path in tools.items() if path})
    return MappingProxyType(found)


def installed() -> Mapping[str, Language]:
    """The languages that candidates can use: those that open sandboxes offer, or those of this host if none is open."""
    return _offered if _offered is not None else _installed_here()


@functools.cache
def _known() -> Mapping[str, Language]:
    return registry()


@functools.cache
def _own_tools() -> Mapping[str, str]:
    """The paths of this host's tools by name, of the languages that are installed."""
    pairs = ((_known()[name].detect, language.detect) for name, language in _installed_here().items())
    return {tool: path for names, paths in pairs for tool, path in zip(names, paths, strict=True)}


@functools.cache
def _installed_here() -> Mapping[str, Language]:
    known = _known()
    found = dict(find_installed(known))
    for name, language in known.items():
        if name not in found and (located := find_located(language)) is not None:
            found[name] = located
    return MappingProxyType({name: _with_cache(found[name]) for name in known if name in found})


def find_located(language: Language, search_path: str = SEARCH_PATH) -> Language | None:
    """The language with the toolchain that its `locate` names, for tools that are not in `search_path`; else None."""
    if language.locate is None:
        return None
    command = [os.path.expanduser(language.locate[0]), *language.locate[1:]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_LOCATE_LIMIT_S)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    home = Path(done.stdout.strip())
    if not home.is_absolute() or len(home.parts) < 3:  # never a whole home folder, or the root
        return None
    tools = {tool: shutil.which(tool, path=f"{search_path}:{home / 'bin'}") for tool in language.detect}
    if not all(tools.values()):
        return None
    return replace(_resolved(language, {tool: path for tool, path in tools.items() if path}), home=home.resolve())


_offers: dict[object, frozenset[str] | None] = {}  # tools by sandbox; None for one that runs candidates on this host
_offered: Mapping[str, Language] | None = None


def offer(sandbox: object, tools: Collection[str] | None) -> None:
    """Offer the languages of these tools, in addition to those offered before; those of this host for None.

    Commands of a remote host keep the names of the tools: each slot puts in its own paths (`in_slot`), so that no host
    changes a command for another one. Remote hosts have no toolchain cache.
    """
    before = _offers.get(sandbox, frozenset())
    after = None if tools is None or before is None else before | frozenset(tools)
    if sandbox not in _offers or after != before:
        _offers[sandbox] = after
        _combine()


def withdraw(sandbox: object) -> None:
    """Offer nothing of this sandbox any more: it is closed."""
    if sandbox in _offers:
        del _offers[sandbox]
        _combine()


def _combine() -> None:
    global _offered
    if not _offers:
        _offered = None
        return
    there = [tools for tools in _offers.values() if tools is not None]
    here = _installed_here() if None in _offers.values() else {}
    remote = {name: one for tools in there for name, one in _known().items() if tools >= set(one.detect)}
    _offered = MappingProxyType({**here, **remote})


def known_tools(found: object) -> Mapping[str, str]:
    """The tools that a remote host may report, out of what it did report: in a folder of SEARCH_PATH, by their name."""
    if not isinstance(found, dict):
        return {}
    folders = SEARCH_PATH.split(":")
    return {tool: found[tool] for tool in all_tools() if found.get(tool) in [f"{folder}/{tool}" for folder in folders]}


def _with_tools(command: tuple[str, ...] | None, tools: Mapping[str, str]) -> tuple[str, ...] | None:
    """The command with the names of tools replaced by their paths."""
    return None if command is None else tuple(tools.get(word, word) for word in command)


class ToolsMissing(Exception):
    """A machine lacks a tool of the language."""


def in_slot(language: Language, tools: Mapping[str, str] | None) -> Language:
    """The language with the paths of one machine's tools: those given by name, or this host's for None.

    Raises ToolsMissing. A language that is not in languages.toml is returned as it is.
    """
    known = _known().get(language.name)
    if known is None or (tools is None and all(map(os.path.isabs, language.detect))):
        return language
    own = _own_tools()
    there = own if tools is None else tools
    if missing := [tool for tool in known.detect if tool not in there]:
        raise ToolsMissing(f"{language.name} needs {', '.join(missing)}")
    return _resolved(language, {**there, **{path: there[tool] for tool, path in own.items() if tool in there}})


def with_memory_limit(command: tuple[str, ...] | None, memory_bytes: int) -> tuple[str, ...] | None:
    """The command with the memory limit of a submission, which Java's heap is a part of."""
    return None if command is None else tuple(word.replace(_MEMORY, str(memory_bytes)) for word in command)


def forget_installed() -> None:
    """Detect the languages of this host again when they are next needed."""
    _installed_here.cache_clear()
    _own_tools.cache_clear()
    if _offers:
        _combine()


def all_tools() -> tuple[str, ...]:
    """The names of the tools of all languages, installed or not."""
    return tuple(sorted({tool for language in registry().values() for tool in language.detect}))


def cache_folders() -> tuple[str, ...]:
    """The folders of toolchains and of the toolchain cache, which candidates must see."""
    folders = (folder for language in installed().values() for folder in (language.cache, language.home))
    return tuple(str(folder) for folder in folders if folder is not None)


def cache_folder_of(language: Language) -> Path:
    """The folder of a language's toolchain cache, whether or not it exists. Its tools must be absolute paths."""
    made = hashlib.sha256(repr((language.prepare, language.compile)).encode())
    for tool in language.detect:
        stat = os.stat(tool)
        made.update(f"{os.path.realpath(tool)} {stat.st_size} {stat.st_mtime_ns}".encode())
    return user_cache("toolchains") / f"{language.name}-{made.hexdigest()[:16]}"


def _with_cache(language: Language) -> Language:
    """The language with its toolchain cache, if the cache exists: the last argument of its compiler's command."""
    if language.prepare is None or language.compile is None or not is_trusted(folder := cache_folder_of(language)):
        return language
    return replace(language, compile=(*language.compile, str(folder)), cache=folder)


def _language(name: str, table: Mapping[str, Any]) -> Language:
    unknown = table.keys() - _KEYS
    missing = _KEYS - _OPTIONAL - table.keys()
    if unknown or missing:
        raise ValueError(f"languages.toml: [{name}] has unknown keys {sorted(unknown)}, lacks {sorted(missing)}")
    if not table["time_factor"] > 0 or table["memory_extra_bytes"] < 0:
        raise ValueError(f"languages.toml: [{name}] has a time_factor or memory_extra_bytes out of range")
    return Language(
        name=name,
        source_name=table["source"],
        compile=_argv(table, "compile"),
        run=_argv(table, "run"),
        time_factor=float(table["time_factor"]),
        memory_extra_bytes=int(table["memory_extra_bytes"]),
        detect=tuple(table["detect"]),
        prepare=_argv(table, "prepare"),
        version=_argv(table, "version"),
        libraries={library: tuple(argv) for library, argv in table.get("libraries", {}).items()},
        locate=_argv(table, "locate"),
        unbuffered_prelude=table.get("unbuffered_prelude", ""),
        unbuffered_tail=table.get("unbuffered_tail", ""),
        unbuffered_run=_argv(table, "unbuffered_run"),
    )


def _argv(table: Mapping[str, Any], key: str) -> tuple[str, ...] | None:
    return tuple(table[key]) if key in table else None


def _resolved(language: Language, tools: Mapping[str, str]) -> Language:
    return replace(
        language,
        compile=_with_tools(language.compile, tools),
        run=_with_tools(language.run, tools),
        prepare=_with_tools(language.prepare, tools),
        unbuffered_run=_with_tools(language.unbuffered_run, tools),
        version=_with_tools(language.version, tools),
        detect=tuple(tools.get(tool, tool) for tool in language.detect),
    )
