"""Models, configurations and tokenizers of transformers, from Hugging Face folders.

INVARIANT: no code of a folder runs, and nobody is asked whether it may. Only this module calls from_pretrained and
from_config. A folder may name Python files of its own (auto_map); transformers would ask on the terminal and run them.
Weights are read from safetensors only, because other files are pickles.

INVARIANT: each tensor of a model from `load_whole` is that of the folder's weights files (weights_files.py). No tensor
is left as the library has drawn it, and none of the files' is left out, except those that the library knows to be of no
use. Where config.json ties the output layer to the embedding, the files hold one of the two, or equal ones.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from nouscoder.policy_folder.weights_files import WeightsUnusable, is_ignored, stored_weights

_WEIGHTLESS = ("AutoConfig", "AutoTokenizer")


class FolderNeedsCode(ValueError):
    """A folder cannot be read without running its own code. The message does not name the folder."""

    def __init__(self) -> None:
        super().__init__(
            "it needs Python code of its own (auto_map), which NousCoder never runs:"
            " use a model whose classes are in transformers"
        )


def load_pretrained(kind: Any, folder: Path, **settings: Any) -> Any:
    """`kind`.from_pretrained(folder), which must exist. Raises FolderNeedsCode, and what the library raises."""
    if kind.__name__ not in _WEIGHTLESS:
        settings |= {"use_safetensors": True}
    try:
        return kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **settings)
    except ValueError as error:
        raise _explained(error) from error


def load_whole(kind: Any, folder: Path, *, without: str = "", new: Collection[str] = (), **settings: Any) -> Any:
    """`kind`.from_pretrained(folder) with all its tensors from the files.

    `without` begins the names of tensors that the files may have for nothing, and `new` are tensors that they need not
    have. Raises WeightsUnusable and WeightsMissing in one sentence, and as `load_pretrained`.
    """
    from transformers.utils import logging as transformers_logging  # `kind` has loaded it

    stored_weights(folder)
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # the sentences here say it
    try:
        model, found = load_pretrained(kind, folder, output_loading_info=True, ignore_mismatched_sizes=True, **settings)
    except RuntimeError as error:  # its conversion of names has failed
        reason = " ".join(str(error).split())[:300]
        raise WeightsUnusable(f"{folder}: the weights do not fit the model of its config.json: {reason}") from error
    for name, stored, wanted in sorted(found["mismatched_keys"]):
        raise WeightsUnusable(f"{folder!s}: {name} has shape {[*stored]}, the model of config.json needs {[*wanted]}")
    missing = [name for name in found["missing_keys"] if name not in new]
    if missing:
        raise WeightsUnusable(f"{folder} lacks {some_of(missing)}: its weights are not complete")
    unknown = [
        name for name in found["unexpected_keys"] if not is_ignored(name) and not (without and name.startswith(without))
    ]
    if unknown:
        raise WeightsUnusable(f"{folder} holds {some_of(unknown)}, which the model of its config.json has not")
    inner, outer = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if is_tied and outer is not None and outer.weight is not inner.weight:
        raise WeightsUnusable(untied(str(folder), "the output layer", "the embedding"))
    return model


def untied(source: str, one: str, other: str) -> str:
    """The sentence about tied tensors with different values."""
    return (
        f"{source}: config.json ties {one} to {other} (tie_word_embeddings), but the files hold different values for"
        " them: set tie_word_embeddings to false, or remove the one that is not meant"
    )


def some_of(names: Collection[str]) -> str:
    """The first of some names, and how many there are besides."""
    first, more = min(names), len(names) - 1
    return f"{first} and {more} more" if more else first


def build_model(kind: Any, config: Any, **settings: Any) -> Any:
    """`kind`.from_config(config): a model without the weights of its folder. Raises as `load_pretrained`."""
    try:
        return kind.from_config(config, trust_remote_code=False, **settings)
    except ValueError as error:
        raise _explained(error) from error


def _explained(error: ValueError) -> ValueError:
    return FolderNeedsCode() if "trust_remote_code" in str(error) else error
