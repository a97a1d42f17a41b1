"""A policy for tests of trainers: a random model of one layer, and a tokenizer whose tokens are whole answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PROMPT = "Add."
RIGHT = "```python\nprint(sum(map(int, input().split())))\n```"
WRONG = "```python\nprint(-1)\n```"
LOST = "```python\nprint('lost')\n```"  # the transport of the script fails for it
ANSWERS = (RIGHT, WRONG, LOST)
TESTS = [
    {"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10\n"]},
    {"inputs": ["7 1\n"], "outputs": ["8\n"], "fn_name": None},
]


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Write the tokenizer: PROMPT and each answer is one token; nothing else has one."""
    plain = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    plain.add_tokens([AddedToken(word, normalized=False) for word in (PROMPT, *ANSWERS)])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_policy(folder: Path) -> Path:
    """Write tokenizer and model."""
    tokenizer = save_tokenizer(folder)
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer), **shape,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
