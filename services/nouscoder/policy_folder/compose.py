"""A Hugging Face folder from the configuration and tokenizer of one folder and the weights of another.

The learner publishes only weights, or an adapter of the first ones. Everything else of a policy is in the
folder that the run began with.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from nouscoder.atomic_files import link_or_copy, whole_folder
from nouscoder.domain.prompt import PromptSettings
from nouscoder.errors import ExitCode, NousCoderError, Unusable
from nouscoder.input_file import read_json_object
from nouscoder.policy_folder.identity import odd_tensor
from nouscoder.policy_folder.inspection import config_faults, downloaded, is_hub_id, weights_faults
from nouscoder.policy_folder.prompt_file import PROMPT_FILE, prompt_json, recorded_prompt
from nouscoder.policy_folder.trained_on import TRAINED_ON_FILE
from nouscoder.policy_folder.weights_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
    is_adapter,
    is_sharded,
    stored_tensors,
    weights_files,
)

CONFIG_FILE = "config.json"
_SUFFIXES = {".json", ".txt", ".model", ".jinja"}
_OF_EXPERTS = re.compile(r"\.(?:gate|up|down)_proj\.lora_")
_WINDOWED = frozenset({"sliding_attention", "chunked_attention"})
# Of phi3 transformers reads yarn as longrope; of mixtral, minimax and recurrent_gemma it cannot compute it.
_OWN_ROPE = ("codegen", "gptj", "phi3", "phimoe", "mixtral", "minimax", "recurrent_gemma", "granitemoehybrid")
_IGNORES_ROPE_SCALING = ("cohere2_moe",)  # in transformers: it reads rope_parameters, also where there is rope_scaling


class PolicyFilesMissing(NousCoderError):
    """A file of the policy is missing or cannot be read. The message names it."""

    exit_code = ExitCode.DAMAGED


def compose_policy(
    to: Path,
    first: Path,
    weights: Path,
    *,
    config: dict[str, Any] | None = None,
    prompt: PromptSettings | None = None,
    card: str = "",
    trained: Path | None = None,
    link: bool = False,
) -> None:
    """Write the folder `to`: everything but weights is that of `first`, and the weights are those in `weights`.

    An adapter in `weights` is merged into the weights of `first`. `config` replaces config.json, `prompt` what the
    folder says of the prompt, `card` becomes README.md, and the run `trained` says what it trained on. With `link`
    whole weights are hard links where the file system has them. `to` appears complete or not at all. Raises
    PolicyFilesMissing, WeightsMissing, WeightsUnusable and StorageError.
    """
    whole = first if is_adapter(weights) else weights
    files = _there([first / CONFIG_FILE, *_whole_weights(whole)])[1:]
    if faults := [*config_faults(first), *weights_faults(whole)]:
        raise PolicyFilesMissing(faults[0])
    if whole != first and has_weights(first) and (odd := odd_tensor(weights_files(first), weights_files(whole))):
        raise PolicyFilesMissing(f"only one of {first} and {whole} has {odd}: the policy would not fit its config.json")
    with whole_folder(to) as part:
        for file in sorted((*first.iterdir(), *first.glob("additional_chat_templates/*"))):
            if file.suffix in _SUFFIXES and file.name != INDEX_FILE and file.is_file():
                (part / file.relative_to(first)).parent.mkdir(exist_ok=True)
                shutil.copyfile(file, part / file.relative_to(first))
        if is_adapter(weights):
            from nouscoder.policy_folder.policy_tensors import write_merged  # it loads torch

            write_merged(first, weights, part)
            files = [file for file in files if file.name == INDEX_FILE]
        put = link_or_copy if link else shutil.copyfile
        for file in files:
            put(file, part / file.name)
        if config is not None:
            (part / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf8")
        if prompt is not None:
            (part / PROMPT_FILE).write_text(prompt_json(prompt), encoding="utf8")
        if card:
            (part / "README.md").write_text(card, encoding="utf8")
        if trained is not None and (trained / TRAINED_ON_FILE).is_file():
            shutil.copyfile(trained / TRAINED_ON_FILE, part / TRAINED_ON_FILE)


def merged_policy(to: Path, adapter: Path) -> Path:
    """The new folder `to`: the adapter, merged into the base that it names. Raises PolicyFilesMissing."""
    base = Path(str(read_json_object(adapter / ADAPTER_CONFIG_FILE, PolicyFilesMissing).get("base_model_name_or_path")))
    if not base.is_dir() and is_hub_id(str(base)):
        base = downloaded(str(base))
    if not base.is_dir():
        raise PolicyFilesMissing(
            f"{adapter} is an adapter of {base}, which is no folder here: write its folder into {ADAPTER_CONFIG_FILE}"
            " (base_model_name_or_path), or export the policy without --adapter"
        )
    compose_policy(to, base, adapter, prompt=recorded_prompt(adapter), trained=adapter)
    return to


def link_weights(to: Path, weights: Path) -> None:
    """Link the weights, or the adapter, into `to`. Raises PolicyFilesMissing, WeightsMissing and StorageError."""
    files = _there(_adapter_files(weights) if is_adapter(weights) else _whole_weights(weights))
    with whole_folder(to) as part:
        for file in files:
            link_or_copy(file, part / file.name)


def compose_adapter(to: Path, adapter: Path, base: str, prompt: PromptSettings, card: str, trained: Path) -> None:
    """Write the folder `to`: the adapter, as PEFT loads it, of the policy named `base`, with `card` as README.md.

    `prompt` is how its policy was asked, in the run `trained`. In a model with experts PEFT (0.21) loads
    gate_proj, up_proj and down_proj into the experts only: an adapter that has them in other layers too is refused.
    Raises PolicyFilesMissing, StorageError, Unusable.
    """
    weights, config = _there(_adapter_files(adapter))
    kinds = {".experts." in name for name in stored_tensors(weights) if _OF_EXPERTS.search(name)}
    if len(kinds) > 1:
        raise Unusable(
            f"{weights} has adapters of experts and of other layers with their names (gate_proj, up_proj, down_proj),"
            " which PEFT would leave out without a word: export the policy without --adapter"
        )
    with whole_folder(to) as part:
        shutil.copyfile(weights, part / weights.name)
        settings = read_json_object(config, PolicyFilesMissing) | {"base_model_name_or_path": base}
        (part / config.name).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf8")
        (part / PROMPT_FILE).write_text(prompt_json(prompt), encoding="utf8")
        (part / "README.md").write_text(card, encoding="utf8")
        if (trained / TRAINED_ON_FILE).is_file():
            shutil.copyfile(trained / TRAINED_ON_FILE, part / TRAINED_ON_FILE)


def with_yarn(folder: Path, factor: float, original_tokens: int) -> dict[str, Any]:
    """config.json of `folder` with YaRN rope scaling (arXiv 2309.00071) from `original_tokens` positions.

    transformers 5 keeps it in rope_parameters, of some types one for each kind of layer; older configurations have
    rope_scaling. Layers with a window keep their frequencies: no distance in them grows. A model with other towers has
    it in text_config. Raises PolicyFilesMissing and Unusable.
    """
    config = read_json_object(folder / CONFIG_FILE, PolicyFilesMissing)
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    if text.get("model_type") in _IGNORES_ROPE_SCALING and "rope_theta" in text:
        scaling = text.pop("rope_scaling", None) or {}
        text["rope_parameters"] = {"rope_theta": text["rope_theta"], **scaling, **(text.get("rope_parameters") or {})}
    key = "rope_parameters" if isinstance(text.get("rope_parameters"), dict) else "rope_scaling"
    ropes = text.get(key) or {}
    kinds = [kind for kind, rope in ropes.items() if isinstance(rope, dict) and kind not in _WINDOWED]
    is_rotary = any(name.startswith(("rope_", "rotary_")) for name in text) and text.get("model_type") not in _OWN_ROPE
    if not is_rotary or (not kinds and _WINDOWED & ropes.keys()):
        raise Unusable(
            f"{folder / CONFIG_FILE}: YaRN cannot scale the positions of this {config.get('model_type')}: take its own"
            " context, or another model"
        )
    if original_tokens > text.get("max_position_embeddings", original_tokens):
        has = f"has {text['max_position_embeddings']} positions, so YaRN cannot start from {original_tokens}"
        raise Unusable(f"{folder / CONFIG_FILE} {has}: take at most as many for yarn.original_tokens")
    for kind in kinds:
        ropes[kind] = _scaled(folder, ropes[kind], factor, original_tokens)
    text[key] = ropes if kinds else _scaled(folder, ropes, factor, original_tokens)
    text["max_position_embeddings"] = round(factor * original_tokens)
    return config


def _scaled(folder: Path, rope: dict[str, Any], factor: float, original_tokens: int) -> dict[str, Any]:
    """The rope parameters of a layer with YaRN. Raises Unusable for ones that are scaled already."""
    how, before = rope.get("rope_type", rope.get("type", "default")), rope.get("original_max_position_embeddings")
    if how not in ("default", "mrope", "yarn") or (how == "yarn" and before not in (None, original_tokens)):
        of = f" from {before} positions" if before else ""
        raise Unusable(
            f"{folder / CONFIG_FILE} has rope scaling of type {how}{of} already, so YaRN from {original_tokens}"
            " positions would have other frequencies than those that the model was trained with: leave yarn out"
        )
    kept = {name: value for name, value in rope.items() if name not in ("type", "attention_factor")}
    return kept | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original_tokens}


def has_weights(folder: Path) -> bool:
    """Whether the folder holds a safetensors file, an index of them, or an adapter."""
    return any((folder / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE, ADAPTER_FILE))


def _whole_weights(folder: Path) -> list[Path]:
    return [*weights_files(folder), *([folder / INDEX_FILE] if is_sharded(folder) else [])]


def _adapter_files(folder: Path) -> list[Path]:
    return [folder / ADAPTER_FILE, folder / ADAPTER_CONFIG_FILE]


def _there(files: list[Path]) -> list[Path]:
    """The files, all of which are there. Raises PolicyFilesMissing."""
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise PolicyFilesMissing(f"{missing[0]} does not exist: the policy is not complete")
    return files
