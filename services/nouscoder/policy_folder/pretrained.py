"""Models, configurations and tokenizers of transformers, from Hugging Face folders.

INVARIANT: no code of a folder runs, and nobody is asked whether it may. Only this module calls from_pretrained and
from_config. A folder may name Python files of its own (auto_map); transformers would ask on the terminal and run them.
Weights are read from safetensors only, because other files are pickles.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_WEIGHTLESS = ("AutoConfig", "AutoTokenizer")


class FolderNeedsCode(ValueError):
    """A folder cannot be read without running its own code. The message does not name the folder."""

    def __init__(self) -> None:
        super().__init__(
            "it needs Python code of its own (auto_map), which NousCoder never runs:"
            " use a model whose classes are in transformers"
        )


def load_pretrained(kind: Any, folder: Path, **settings: Any) -> Any:
    """`kind`.from_pretrained(folder). Raises FolderNeedsCode, and what the library raises for unusable files.

    The folder must exist: the library takes another path for the name of a model on a hub.
    """
    if kind.__name__ not in _WEIGHTLESS:
        settings |= {"use_safetensors": True}
    try:
        return kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **settings)
    except ValueError as error:
        raise _explained(error) from error


def build_model(kind: Any, config: Any, **settings: Any) -> Any:
    """`kind`.from_config(config): a model without the weights of its folder. Raises as `load_pretrained`."""
    try:
        return kind.from_config(config, trust_remote_code=False, **settings)
    except ValueError as error:
        raise _explained(error) from error


def _explained(error: ValueError) -> ValueError:
    return FolderNeedsCode() if "trust_remote_code" in str(error) else error
