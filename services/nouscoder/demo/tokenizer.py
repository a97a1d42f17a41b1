"""The demo's vocabulary: three special tokens, then one token for each printable ASCII character and the newline.

The warm start encodes with this module, which needs no library. All other parts load the folder that `save` writes: a
Hugging Face tokenizer with the same token ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
_SPECIAL = {"<pad>": PAD_ID, "<bos>": BOS_ID, "<eos>": EOS_ID}
_CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))


class TokenizerError(ValueError):
    """The text has a character that is not in the vocabulary. The message names it."""


@dataclass(frozen=True, slots=True)
class CharTokenizer:
    """Token id = position in `characters` + 3; pad, bos and eos are 0, 1 and 2."""

    characters: str = _CHARACTERS

    @property
    def vocab_size(self) -> int:
        """The number of characters and special tokens."""
        return len(self.characters) + len(_SPECIAL)

    def encode(self, text: str) -> list[int]:
        """Token ids [characters], with no special tokens. Raises TokenizerError naming the first unknown character."""
        ids = [self.characters.find(character) for character in text]
        if -1 in ids:
            raise TokenizerError(f"the tokenizer has no character {text[ids.index(-1)]!r}")
        return [token + len(_SPECIAL) for token in ids]

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids [1 + characters]: bos, then the text."""
        return [BOS_ID, *self.encode(text)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids. Special tokens and ids outside the vocabulary are skipped."""
        first, end = len(_SPECIAL), self.vocab_size
        return "".join(self.characters[token - first] for token in ids if first <= token < end)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json of transformers into the folder."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        vocabulary = _SPECIAL | dict(zip(self.characters, self.encode(self.characters), strict=True))
        tokenizer = Tokenizer(models.WordLevel(vocabulary))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS_ID)])
        build: Any = PreTrainedTokenizerFast
        names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
        build(tokenizer_object=tokenizer, **names).save_pretrained(folder)
