"""Configurations to begin with: the recipes of configs/, and what `nouscoder init` writes.

The comment of each key is its description in the configuration's models, so that it cannot become untrue.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import tomli_w

from nouscoder.config.base import ConfigError, keys_of
from nouscoder.config.tree import Config

_HEAD = """\
# A run of NousCoder. Begin it with: nouscoder train {file}
# Relative paths start at the folder of this file. docs/configuration.md describes every key.
# nouscoder data schema prints the format of the problem file.
"""
_TEMPLATE = "{prompt}\n\nWrite the solution in Python, in one block that begins with ```python."
_TOKENS = 4096  # of prompt and completion, unless the model was made for fewer


def starter(model: str, problems: str, name: str, positions: int | None = None) -> dict[str, Any]:
    """The values of the file. `positions` is the number of tokens that the model was made for, if it is known."""
    tokens = min(_TOKENS, positions or _TOKENS)
    return {
        "run": {"name": name, "root": "runs", "seed": 0, "total_batches": 30},
        "policy": {"path": model},
        "problems": {"train": problems, "held_out_share": 0.1, "held_out_samples": 1},
        "generation": {
            "device": "cpu",
            "max_running": 32,
            "max_tokens_total": tokens,
            "sampling": {"temperature": 1.0, "max_new_tokens": tokens // 2},
            "environment": {"prompt_as": "auto", "prompt_template": _TEMPLATE},
        },
        "broker": {"group_size": 8, "batch_size": 64, "drop_zero_variance": True, "reward": {"rule": "sign"}},
        "learner": {"device": "cpu", "steps_per_batch": 4, "learning_rate": 1e-6},
    }


def starter_text(values: dict[str, Any], file: str) -> str:
    """The values as TOML, each key below its description."""
    described = {key.path: key.field.description or "" for key in keys_of(Config)}
    return _HEAD.format(file=file) + "".join(_section(described, (name,), section) for name, section in values.items())


def _section(described: dict[tuple[str, ...], str], path: tuple[str, ...], values: dict[str, Any]) -> str:
    lines = [f"\n[{'.'.join(path)}]\n"]
    for name, value in values.items():
        if not isinstance(value, dict):
            lines.append(f"# {described[(*path, name)]}\n{tomli_w.dumps({name: value})}")
    lines += [_section(described, (*path, name), value) for name, value in values.items() if isinstance(value, dict)]
    return "".join(lines)


def write_starter(file: Path, model: str, problems: str, positions: int | None) -> None:
    """Write a new file. Raises ConfigError when it exists or cannot be written."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).strip("._-") or "run"
    values = starter(model, problems, name, positions)
    try:
        with file.open("x", encoding="utf8") as out:
            out.write(starter_text(values, file.name))
    except FileExistsError:
        raise ConfigError(f"{file} exists already: give another name") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from error


_PACKAGE = Path(__file__).parents[1]


def recipe_path(name: str) -> Path:
    """The TOML file of a recipe. Raises ConfigError naming the existing recipes."""
    folders = [_PACKAGE / "configs", _PACKAGE.parents[1] / "configs"]
    for folder in folders:
        if (folder / f"{name}.toml").is_file():
            return folder / f"{name}.toml"
    known = sorted({file.stem for folder in folders for file in folder.glob("*.toml")})
    raise ConfigError(f"there is no recipe {name!r}; there are: {', '.join(known)}")
