"""One value of `--set a.b=value`, put into the unchecked tree of a configuration.

    learner.learning_rate=1e-6           a key
    plan.stages.0.run.total_batches=3    what the first stage sets; `plan.stages.0.set.run...` is the same
    plan.stages.long.from=best           a key of the stage that is named long
    run.sinks.0=wandb                    one element of a list that the file gives

A stage is named, or counted from 0. A stage of that name goes first.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from nouscoder.config.run import StageSection
from nouscoder.errors import did_you_mean
from nouscoder.sections import ConfigError, keys_of, place_paths

_STAGES = ["plan", "stages"]


def put(tree: dict[str, Any], override: str, model: type[BaseModel], file: Mapping[str, Any] | None = None) -> None:
    """Put the value of `a.b=value` into `tree`: TOML, or else a bare string. Its relative paths start at the working
    directory.

    `file` has the stages and lists that `tree` lacks. A stage that `tree` lacks is a section named by its index there.
    Raises ConfigError.
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {override!r} is not of the form a.b=value")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    path = key.split(".")
    known = (tree, file or {})
    if path[:2] == _STAGES and len(path) > 2:
        stages = next((found for each in known if isinstance(found := _at(each, _STAGES), list)), [])
        path = _of_stage(path, stages)
    given: dict[str, Any] = {path[-1]: value}
    for parent in reversed(path[:-1]):
        given = {parent: given}
    for each in (given, *changes_of_stages(given)):
        place_paths(each, model, Path.cwd())
    path, value = _whole_list(path, _at(given, path), known, model)
    node: Any = tree
    for part in path[:-1]:
        node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        if not isinstance(node, dict | list):
            raise ConfigError(f"--set {key}: {part} is a value, not a section")
    if isinstance(node, dict) and isinstance(node.get(path[-1]), dict) and not isinstance(value, dict):
        raise ConfigError(f"--set {key}: {path[-1]} is a section already, not a value")
    node[int(path[-1]) if isinstance(node, list) else path[-1]] = value


def changes_of_stages(tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each stage in an unchecked tree sets."""
    stages = _at(tree, _STAGES)
    found = stages.values() if isinstance(stages, dict) else stages if isinstance(stages, list) else ()
    return [stage["set"] for stage in found if isinstance(stage, dict) and isinstance(stage.get("set"), dict)]


def _of_stage(path: Sequence[str], stages: Sequence[Any]) -> list[str]:
    """The path with the index of its stage, and with `set` before a key of the configuration."""
    names = [str(stage.get("name")) if isinstance(stage, dict) else "" for stage in stages]
    which, rest = path[2], [*path[3:]]
    index = names.index(which) if which in names else int(which) if which.isdecimal() else len(names)
    if index >= len(names):
        there = ", ".join(f"{number} {name}" for number, name in enumerate(names)) or "none"
        raise ConfigError(f"--set {'.'.join(path)}: no stage is {which}{did_you_mean(which, names)} (stages: {there})")
    own = [field.alias or name for name, field in StageSection.model_fields.items()]
    if rest and rest[0] not in own:
        if near := did_you_mean(rest[0], own):
            raise ConfigError(f"--set {'.'.join(path)}: a stage has no key {rest[0]}{near}")
        rest = ["set", *rest]
    return [*_STAGES, str(index), *rest]


def _whole_list(
    path: list[str], value: Any, known: Sequence[Mapping[str, Any]], model: type[BaseModel]
) -> tuple[list[str], Any]:
    """The path of the list that has the element, and the list with its new element; the same of any other path."""
    keys = {key.path for key in keys_of(model)}
    for end in range(1, len(path)):
        before, index = path[:end], path[end]
        if before == _STAGES or not index.isdecimal():
            continue
        whole = deepcopy(next((found for each in known if (found := _at(each, before)) is not None), None))
        if isinstance(whole, list) and int(index) < len(whole):
            inner = {index: whole[int(index)]}
            node: Any = inner
            for part in path[end:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = value
            return before, [*whole[: int(index)], inner[index], *whole[int(index) + 1 :]]
        if tuple(before[4:] if before[:2] == _STAGES else before) in keys or isinstance(whole, list):
            size = len(whole) if isinstance(whole, list) else 0
            raise ConfigError(f"--set {'.'.join(path)}: the file gives {size} elements of this list: set it as a whole")
    return path, value


def _at(tree: Any, path: Sequence[str]) -> Any:
    for part in path:
        if isinstance(tree, list) and part.isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree
