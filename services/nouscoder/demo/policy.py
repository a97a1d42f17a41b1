"""The demo's policy: a Qwen3 decoder of a few hundred thousand parameters, and its tokens.

The policy has random weights or is read from a folder. The vocabulary has three special tokens, then one token for each
printable ASCII character and the newline. The warm start encodes with this module, which needs no library. All other
parts load the folder that `save` writes: a Hugging Face tokenizer with the same token ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
_SPECIAL = {"<pad>": PAD_ID, "<bos>": BOS_ID, "<eos>": EOS_ID}
_CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))


class NotInVocabulary(ValueError):
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
        """Token ids [characters], with no special tokens. Raises NotInVocabulary naming the first unknown character."""
        ids = [self.characters.find(character) for character in text]
        if -1 in ids:
            raise NotInVocabulary(f"the tokenizer has no character {text[ids.index(-1)]!r}")
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


@dataclass(frozen=True, slots=True)
class PolicySize:
    """The sizes of the decoder. The defaults were chosen by measurements on one core."""

    hidden_size: int = 128
    num_layers: int = 3
    intermediate_size: int = 256
    num_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_positions: int = 192


def build_policy(*, seed: int, size: PolicySize = PolicySize(), vocab_size: int | None = None) -> Qwen3ForCausalLM:
    """A float32 policy whose random weights depend only on the seed. The global random state does not change."""
    config = Qwen3Config(
        vocab_size=vocab_size or CharTokenizer().vocab_size,
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers,
        intermediate_size=size.intermediate_size,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_key_value_heads,
        head_dim=size.head_dim,
        max_position_embeddings=size.max_positions,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        dtype="float32",
    )
    config._attn_implementation = "sdpa"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def save_policy(policy: Qwen3ForCausalLM, folder: Path) -> None:
    """Write a Hugging Face folder: configuration, weights and tokenizer."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    policy.save_pretrained(folder)
    CharTokenizer().save(folder)
