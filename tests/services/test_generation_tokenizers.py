"""One seam over both kinds of tokenizer a policy folder may hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nouscoder.demo.tokenizer import BOS_ID, CharTokenizer
from nouscoder.policy_folder.tokenizer import TokenizerError, load_tokenizer

VOCABULARY = {"<unk>": 0, "<end>": 1, "print": 2, "(": 3, "1": 4, ")": 5}


def save_words(folder: Path, **special: str) -> None:
    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    build: Any = PreTrainedTokenizerFast
    build(tokenizer_object=words, unk_token="<unk>", **special).save_pretrained(folder)


def test_char_tokenizer_starts_prompts_with_bos_and_leaves_special_tokens_out_of_text(tmp_path: Path) -> None:
    CharTokenizer().save(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("print(1)\n")
    assert ids[0] == BOS_ID
    assert len(ids) == 10
    assert tokenizer.decode([*ids, tokenizer.eos_id, tokenizer.pad_id]) == "print(1)\n"
    with pytest.raises(TokenizerError, match="no character 'é'"):
        tokenizer.encode("é")


def test_a_transformers_tokenizer_is_read_where_there_is_no_other(tmp_path: Path) -> None:
    save_words(tmp_path, eos_token="<end>")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("print ( 1 )") == [2, 3, 4, 5]
    assert (tokenizer.eos_id, tokenizer.pad_id) == (1, 1)
    assert tokenizer.decode([2, 3, 4, 5, 1]).split() == ["print", "(", "1", ")"]


def test_a_tokenizer_that_cannot_end_a_rollout_is_refused(tmp_path: Path) -> None:
    save_words(tmp_path)
    with pytest.raises(TokenizerError, match="no end-of-sequence token"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [None, "{", '{"characters": "aa"}'])
def test_a_folder_without_a_usable_tokenizer_is_refused_by_name(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "char_tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=str(tmp_path)):
        load_tokenizer(tmp_path)
