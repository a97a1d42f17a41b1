"""The character tokenizer: it loses nothing, names what it cannot read, and comes back from its folder the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from nouscoder.demo.tokenizer import BOS_ID, EOS_ID, PAD_ID, CharTokenizer, TokenizerError, trim_at_eos


def test_every_printable_character_and_the_newline_come_back() -> None:
    tokenizer = CharTokenizer()
    text = "".join(map(chr, range(32, 127))) + "\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(set(ids)) == len(text) == tokenizer.vocab_size - 3
    assert not {PAD_ID, BOS_ID, EOS_ID} & set(ids)


def test_a_prompt_begins_with_bos_and_decoding_leaves_special_tokens_out() -> None:
    tokenizer = CharTokenizer()
    ids = tokenizer.encode_prompt("ab")
    assert ids[0] == BOS_ID
    assert tokenizer.decode([*ids, EOS_ID, PAD_ID, 9999]) == "ab"


def test_an_unknown_character_is_named() -> None:
    with pytest.raises(TokenizerError, match="'é'"):
        CharTokenizer().encode("caf\u00e9")


def test_a_saved_tokenizer_loads_and_a_broken_file_is_named(tmp_path: Path) -> None:
    tokenizer = CharTokenizer("ab\n")
    tokenizer.save(tmp_path)
    assert CharTokenizer.load(tmp_path) == tokenizer
    for broken in ("{", "[]", '{"characters": "aa"}', '{"characters": 3}'):
        (tmp_path / "char_tokenizer.json").write_text(broken)
        with pytest.raises(TokenizerError, match=r"char_tokenizer\.json"):
            CharTokenizer.load(tmp_path)
    with pytest.raises(TokenizerError):
        CharTokenizer.load(tmp_path / "nowhere")


def test_what_follows_eos_is_cut() -> None:
    assert trim_at_eos([5, 6, EOS_ID, 7]) == [5, 6]
    assert trim_at_eos([5, 6]) == [5, 6]
