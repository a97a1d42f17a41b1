"""The tokenizer of a policy folder behind one small seam: the demo's character tokenizer, or transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from nouscoder.demo.tokenizer import EOS_ID, PAD_ID, CharTokenizer
from nouscoder.demo.tokenizer import TokenizerError as CharTokenizerError

_CHAR_FILE = "char_tokenizer.json"


class TokenizerError(ValueError):
    """A folder holds no usable tokenizer, or a text cannot be encoded; the message names which."""


class Tokenizer(Protocol):
    """What sampling and training need of a tokenizer."""

    eos_id: int
    pad_id: int

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt [prompt_tokens], after the special tokens prompts start with. Raises TokenizerError."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; special tokens are left out."""
        ...


class _CharPolicyTokenizer:
    """The demo's character tokenizer."""

    eos_id = EOS_ID
    pad_id = PAD_ID

    def __init__(self, tokenizer: CharTokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode_prompt(text)
        except CharTokenizerError as error:
            raise TokenizerError(str(error)) from error

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)


class _TransformersTokenizer:
    """Any tokenizer that transformers can read."""

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        if tokenizer.eos_token_id is None:
            raise TokenizerError(f"the tokenizer in {folder} has no end-of-sequence token")
        self._tokenizer = tokenizer
        self.eos_id: int = tokenizer.eos_token_id
        self.pad_id: int = self.eos_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a policy folder; transformers is imported only when it is needed. Raises TokenizerError."""
    if (folder / _CHAR_FILE).is_file():
        try:
            return _CharPolicyTokenizer(CharTokenizer.load(folder))
        except CharTokenizerError as error:
            raise TokenizerError(str(error)) from error
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise TokenizerError(f"{folder} holds no tokenizer: {str(error).splitlines()[0]}") from error
    return _TransformersTokenizer(loaded, folder)
