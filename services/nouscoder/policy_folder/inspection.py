"""What the files of a policy folder say, read without a model library: before a run starts a process.

The folder may be one of a hub: ORGANISATION/MODEL is downloaded once, into Hugging Face's cache.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nouscoder.errors import Unusable
from nouscoder.input_file import json_object, regular
from nouscoder.policy_folder.engine_types import engine_fault, positions_of
from nouscoder.policy_folder.weights_files import WeightsMissing, WeightsUnusable, stored_weights
from nouscoder.sections import HUB_ID

_STOP_FILES = ("generation_config.json", "config.json")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


class StopTokensError(ValueError):
    """A configuration file has invalid token ids. The message names the file."""


def stop_token_ids(folder: Path) -> frozenset[int]:
    """Every `eos_token_id` of generation_config.json and config.json, such as a turn's and a document's end.

    Raises StopTokensError.
    """
    found: set[int] = set()
    for file in (folder / name for name in _STOP_FILES):
        if file.is_file():
            found |= _eos_ids(file)
    return frozenset(found)


def _eos_ids(file: Path) -> set[int]:
    try:
        config: Any = json.loads(file.read_text(encoding="utf8"))
        value = config.get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise StopTokensError(f"{file} is not a configuration: {error}") from error
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(each, int) or isinstance(each, bool) for each in values):
        raise StopTokensError(f"{file}: eos_token_id must be a token id or a list of token ids")
    return set(values)


def faults_of(folder: Path) -> list[str]:
    """What makes the folder unusable as a policy, one sentence each; empty when nothing does."""
    if not folder.is_dir():
        how = f": nouscoder model import {folder} --out FOLDER makes one" if folder.suffix == ".gguf" else ""
        return [f"{folder} is not a folder{how}"]
    return config_faults(folder) or [*_tokenizer_faults(folder), *weights_faults(folder)]


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer's files hold a chat template."""
    return bool(chat_template_text(folder))


def chat_template_text(folder: Path) -> str:
    """The chat templates that the tokenizer's files hold; empty when there is none."""
    beside = [folder / name for name in ("chat_template.jinja", "chat_template.json")]
    inside = json_object(folder / "tokenizer_config.json").get("chat_template") or ""
    return "".join([*(file.read_text(encoding="utf8") for file in beside if file.is_file()), str(inside)])


def context_tokens(folder: Path) -> int | None:
    """The number of positions that the model was made for; None when its configuration does not say."""
    return positions_of(json_object(folder / "config.json"))


def engine_faults(folder: Path, engine: str, **how: str) -> list[str]:
    """Why an engine cannot sample from the model: one sentence, or none. See `engine_fault`."""
    config = json_object(folder / "config.json")
    model_type, layers = config.get("model_type"), config.get("layer_types")
    if not isinstance(model_type, str):
        return []  # config_faults says so
    fault = engine_fault(engine, model_type, layers if isinstance(layers, list) else (), **how)
    return [f"{folder}: {fault}"] if fault else []


def config_faults(folder: Path) -> list[str]:
    """What makes config.json unusable. Raises NoRegularFile for a pipe or a device beside it."""
    file = regular(folder) / "config.json"
    if not file.is_file():
        return [f"{folder} has no config.json, so it is not a Hugging Face model folder"]
    is_model = json_object(file).get("model_type")
    return [] if is_model else [f"{file} is not a model's configuration: it has no model_type"]


def _tokenizer_faults(folder: Path) -> list[str]:
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if not any((folder / name).is_file() for name in names):
        return [f"{folder} has no tokenizer (tokenizer.json, tokenizer_config.json)"]
    try:
        stops = stop_token_ids(folder)
    except StopTokensError as error:
        return [str(error)]
    if not stops and not json_object(folder / "tokenizer_config.json").get("eos_token"):
        return [f"{folder}: neither the tokenizer nor config.json has an end-of-sequence token"]
    config = json_object(folder / "config.json")
    rows, most = (config.get("text_config") or config).get("vocab_size"), _largest_id(folder)
    if isinstance(rows, int) and most >= rows:
        return [
            f"{folder}: the tokenizer has a token {most}, and the model has {rows} (vocab_size of config.json): take"
            " the tokenizer of this model, or add rows to its embedding (resize_token_embeddings of transformers)"
        ]
    return []


def _largest_id(folder: Path) -> int:
    """The largest token id in a tokenizer's files; -1 where none says so."""
    names = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "vocab.json")
    tokenizer, config, added, plain = (json_object(folder / name) for name in names)
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else plain
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary or ()) - 1]
    ids += [token.get("id") for token in tokenizer.get("added_tokens") or () if isinstance(token, dict)]
    ids += [*added.values(), *(int(each) for each in config.get("added_tokens_decoder") or () if each.isdecimal())]
    return max((each for each in ids if isinstance(each, int)), default=-1)


def weights_faults(folder: Path) -> list[str]:
    """What makes whole weights unusable, the first fault only. Reads only the headers of their files."""
    try:
        stored_weights(folder)
    except (WeightsMissing, WeightsUnusable) as error:
        return [str(error)]
    return []


class HubUnavailable(Unusable):
    """A model cannot be fetched from the hub. The message names it and says why."""


def is_hub_id(text: str) -> bool:
    """Whether the text has the form ORGANISATION/MODEL."""
    return HUB_ID.fullmatch(text) is not None


def downloaded(hub_id: str) -> Path:
    """The folder of a hub's model, fetched when it is not in the cache. Raises HubUnavailable."""
    # Importing the library takes a second.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the library raises errors of httpx, of the disk and of its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise HubUnavailable(
            f"{hub_id} is no folder here, and a hub did not give it: {reason[:200]}; where there is a connection:"
            f" hf download {hub_id} --local-dir FOLDER, then policy.path=FOLDER"
        ) from error
