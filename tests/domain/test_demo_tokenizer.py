"""The character tokenizer: it is lossless, names unknown characters, and is the same after loading."""

from __future__ import annotations

from pathlib import Path

import pytest

from nouscoder import policy_folder
from nouscoder.demo.policy import BOS_ID, EOS_ID, PAD_ID, CharTokenizer, NotInVocabulary
from nouscoder.policy_folder.tokenizer import load_tokenizer


def test_every_printable_character_and_the_newline_are_decoded_as_encoded() -> None:
    tokenizer = CharTokenizer()
    text = "".join(map(chr, range(32, 127))) + "\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(set(ids)) == len(text) == tokenizer.vocab_size - 3
    assert not {PAD_ID, BOS_ID, EOS_ID} & set(ids)


def test_a_prompt_begins_with_bos_and_decoding_skips_special_tokens() -> None:
    tokenizer = CharTokenizer()
    ids = tokenizer.encode_prompt("ab")
    assert ids[0] == BOS_ID
    assert tokenizer.decode([*ids, EOS_ID, PAD_ID, 9999]) == "ab"


def test_an_unknown_character_is_named() -> None:
    with pytest.raises(NotInVocabulary, match="'é'"):
        CharTokenizer().encode("caf\u00e9")


def test_the_saved_tokenizer_loads_in_transformers_with_the_same_ids(tmp_path: Path) -> None:
    tokenizer = CharTokenizer()
    tokenizer.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    loaded = load_tokenizer(tmp_path)
    text = tokenizer.characters + "  <eos>\n\n<bos> print(1)"
    assert loaded.encode(text) == tokenizer.encode_prompt(text)
    assert loaded.encode_inside(text) == tokenizer.encode(text)
    assert loaded.decode([*tokenizer.encode_prompt(text), EOS_ID, PAD_ID]) == text
    assert (loaded.stop_ids, loaded.pad_id) == (frozenset({EOS_ID}), PAD_ID)
    with pytest.raises(policy_folder.tokenizer.TokenizerError, match="4 characters cannot be encoded"):
        loaded.encode("caf\u00e9")
