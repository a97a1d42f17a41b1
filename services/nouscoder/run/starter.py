"""`nouscoder init`: a new configuration for a model and a problem file, checked as far as they are here.

The comment of each key in the file is its description in the configuration's models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w

from nouscoder.atomic_files import naming_storage_faults, whole_or_gone
from nouscoder.config import Config, ConfigError, VerifierSection
from nouscoder.policy_folder.inspection import engine_faults, faults_of, is_hub_id
from nouscoder.run.preflight import fault_of, no_such, require_gradable
from nouscoder.sections import keys_of


def starter_inputs(out: Path, model: str, problems: str, engine: str) -> tuple[str, str]:
    """Model and problem file as the new configuration `out` names them. Raises ConfigError with all faults.

    Relative names start at the folder of `out`; what is only in the working directory becomes absolute. An empty name
    is not checked: a person edits the file.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already: give another name")
    place = out.absolute().parent
    faults = [*_model_faults(_found(place, model), model, engine)] if model else []
    faults += _problem_faults(_found(place, problems)) if problems else []
    if faults:
        raise ConfigError("\n".join(faults))
    return _as_named(place, model) or "model", _as_named(place, problems) or "problems.jsonl"


def _model_faults(folder: Path, model: str, engine: str) -> Iterator[str]:
    if folder.exists():
        yield from faults_of(folder) or engine_faults(folder, engine, how="give --engine vllm")
    elif not is_hub_id(model):
        yield f"the model: {no_such(folder)}; a model of a hub is named ORGANISATION/MODEL"


def _problem_faults(file: Path) -> Iterator[str]:
    if file.exists():
        yield from fault_of("the problem file", lambda: require_gradable(file, VerifierSection()))
    else:
        yield f"the problem file: {no_such(file)}"


def _found(place: Path, name: str) -> Path:
    """The path that a name means: in `place`, else in the working directory."""
    here = Path(name).absolute()
    return here if not (place / name).exists() and here.exists() else place / name


def _as_named(place: Path, name: str) -> str:
    return name if not name or _found(place, name) == place / name else str(_found(place, name))


_STARTER_HEAD = """\
# A run of NousCoder. Begin it with: nouscoder train {file}
# Relative paths start at the folder of this file. docs/configuration.md describes every key.
# nouscoder data schema prints the format of the problem file; nouscoder recipes lists published configurations.
# generation.environment can also give feedback, an interpreter, agents or a class of your own: docs/environments.md.
"""
_STARTER_TEMPLATE = "{prompt}\n\nWrite the solution in {language}, in one block that begins with {block}."
_STARTER_TOKENS = 4096  # of prompt and completion, unless the model was made for fewer


def starter(
    model: str,
    problems: str,
    name: str,
    positions: int | None = None,
    engine: str = "auto",
    prompt: dict[str, str] | None = None,
) -> dict[str, Any]:
    """The values of the file. `positions` is the number of tokens that the model was made for, if it is known.

    Of `name` the run has the characters that its name may have. `prompt` is how the policy was asked in its training;
    None for a policy that was not trained here.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("._-") or "run"
    tokens = min(_STARTER_TOKENS, positions or _STARTER_TOKENS)
    return {
        "run": {"name": name, "root": "runs", "seed": 0, "total_batches": 30, "sinks": []},
        "policy": {"path": model},
        "problems": {"train": problems, "held_out_share": 0.1},
        "evaluation": {"samples": 1},
        "generation": {
            "engine": engine,
            "device": "auto",
            "max_running": 32,
            "max_tokens_total": tokens,
            "sampling": {"temperature": 1.0, "max_new_tokens": tokens // 2},
            "environment": prompt or {"prompt_as": "auto", "prompt_template": _STARTER_TEMPLATE},
        },
        "broker": {"group_size": 8, "batch_size": 64, "drop_zero_variance": True, "reward": {"rule": "sign"}},
        "learner": {"device": "auto", "steps_per_batch": 4, "learning_rate": 1e-6},
    }


def starter_text(values: dict[str, Any], file: str) -> str:
    """The values as TOML, each key below its description."""
    described = {key.path: key.field.description or "" for key in keys_of(Config)}
    return _STARTER_HEAD.format(file=file) + "".join(
        _starter_section(described, (name,), section) for name, section in values.items()
    )


def _starter_section(described: dict[tuple[str, ...], str], path: tuple[str, ...], values: dict[str, Any]) -> str:
    lines = [f"\n[{'.'.join(path)}]\n"]
    for name, value in values.items():
        if not isinstance(value, dict):
            lines.append(f"# {described[(*path, name)]}\n{tomli_w.dumps({name: value})}")
    lines += [
        _starter_section(described, (*path, name), value) for name, value in values.items() if isinstance(value, dict)
    ]
    return "".join(lines)


def write_starter(file: Path, values: dict[str, Any]) -> None:
    """Write the values to a new file. Raises ConfigError when it exists or its folder does not, and StorageError."""
    text = starter_text(values, file.name).encode()
    if not file.parent.is_dir():
        raise ConfigError(f"{file} cannot be written: {file.parent} is no folder")
    with whole_or_gone(file), naming_storage_faults(file):
        try:
            with file.open("xb") as out:
                out.write(text)
        except FileExistsError:
            raise ConfigError(f"{file} exists already: give another name") from None
