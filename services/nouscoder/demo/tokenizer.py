"""A character-level tokenizer: printable ASCII and the newline, after three special tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
_NUM_SPECIAL = 3
_FILE_NAME = "char_tokenizer.json"
_CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))


class TokenizerError(ValueError):
    """A text or a saved tokenizer that this tokenizer cannot read; the message names what is at fault."""


@dataclass(frozen=True, slots=True)
class CharTokenizer:
    """Token id = position in `characters` + 3; pad, bos and eos are 0, 1 and 2."""

    characters: str = _CHARACTERS

    @property
    def vocab_size(self) -> int:
        """Characters and special tokens together."""
        return len(self.characters) + _NUM_SPECIAL

    def encode(self, text: str) -> list[int]:
        """Token ids [characters], with no special tokens. Raises TokenizerError naming the first unknown character."""
        ids = [self.characters.find(character) for character in text]
        if -1 in ids:
            raise TokenizerError(f"the tokenizer has no character {text[ids.index(-1)]!r}")
        return [token + _NUM_SPECIAL for token in ids]

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids [1 + characters]: bos, then the text."""
        return [BOS_ID, *self.encode(text)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; special tokens and ids past the vocabulary are left out."""
        last = self.vocab_size
        return "".join(self.characters[token - _NUM_SPECIAL] for token in ids if _NUM_SPECIAL <= token < last)

    def save(self, folder: Path) -> None:
        """Writes char_tokenizer.json into the folder, which must be there."""
        (folder / _FILE_NAME).write_text(json.dumps({"kind": "char", "characters": self.characters}) + "\n")

    @classmethod
    def load(cls, folder: Path) -> CharTokenizer:
        """Reads what `save` wrote. Raises TokenizerError when the file is missing or is not such a tokenizer."""
        path = folder / _FILE_NAME
        try:
            stored = json.loads(path.read_text())
            characters = stored["characters"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TokenizerError(f"{path} is not a saved character tokenizer: {error}") from error
        if not isinstance(characters, str) or len(set(characters)) != len(characters):
            raise TokenizerError(f"{path}: `characters` must be a text without repeats")
        return cls(characters)


def trim_at_eos(ids: Sequence[int]) -> list[int]:
    """The ids before the first eos."""
    kept = list(ids)
    return kept[: kept.index(EOS_ID)] if EOS_ID in kept else kept
