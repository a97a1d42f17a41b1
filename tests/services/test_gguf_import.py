"""`nouscoder model import`: a GGUF file becomes a folder with the same log-probabilities, tokens and end of a turn."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.services.gguf_file import TEMPLATE, WORDS, tiny_llama, write_gguf
from typer.testing import CliRunner

from nouscoder.cli.app import app
from nouscoder.domain.conversation import Message, Role
from nouscoder.installation import how_to_install
from nouscoder.learner.model.weights import load_model
from nouscoder.policy_folder.gguf import GgufUnusable, import_gguf
from nouscoder.policy_folder.tokenizer import load_tokenizer

pytest.importorskip("gguf", reason=f"the package gguf is not installed: {how_to_install('gguf')}")


@dataclass
class Made:
    """A folder made of a GGUF file, and the model whose weights the file has, quantised and multiplied out."""

    file: Path
    model: Any
    folder: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder = self.file.with_name("imported")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    whole = Made(file, write_gguf(file, tiny_llama()))
    answer = CliRunner().invoke(app, ["model", "import", str(file), "--out", str(whole.folder), "--dtype", "float32"])
    assert answer.exit_code == 0, answer.output
    return whole


def test_the_folder_has_the_log_probabilities_of_the_files_weights(made: Made) -> None:
    ids = torch.randint(3, 200, (2, 20), generator=torch.Generator().manual_seed(1))
    wanted, found = (model(input_ids=ids).logits.log_softmax(-1) for model in (made.model, load_model(made.folder)))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_the_tokenizer_is_that_of_the_file(made: Made) -> None:
    tokenizer = load_tokenizer(made.folder)
    text = "n is 4212, é!\n\n  return n"
    assert tokenizer.decode(tokenizer.encode_inside(text)) == text
    # SmolLM splits digits, so that a merge of two digits is never used.
    assert [WORDS[token] for token in tokenizer.encode_inside("12")] == ["1", "2"]
    assert [WORDS[token] for token in tokenizer.encode_inside("is")] == ["is"]


def test_the_chat_template_and_the_end_of_a_turn_are_those_of_the_file(made: Made) -> None:
    tokenizer = load_tokenizer(made.folder)
    assert tokenizer.stop_ids == {WORDS.index("<|im_end|>")}
    rendered = tokenizer.render([Message(Role.USER, "is")], None)
    assert rendered == "<|im_start|>user\nis<|im_end|>\n<|im_start|>assistant\n"
    assert "add_generation_prompt" in TEMPLATE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"splits": "of-tomorrow"}, "tokenizer.ggml.pre of-tomorrow"),
        ({"without": "blk.1.ffn_up.weight"}, "it has no model.layers.1.mlp.up_proj.weight"),
        ({"architecture": "of-tomorrow"}, "of-tomorrow"),
    ],
)
def test_a_file_that_cannot_be_imported_rightly_is_refused(
    tmp_path: Path, change: dict[str, str], message: str
) -> None:
    write_gguf(tmp_path / "odd.gguf", tiny_llama(), **change)
    with pytest.raises(GgufUnusable, match=message):
        import_gguf(tmp_path / "odd.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_of_another_kind_and_an_existing_folder_are_refused(tmp_path: Path, made: Made) -> None:
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(GgufUnusable, match="is no GGUF file"):
        import_gguf(tmp_path / "text.gguf", tmp_path / "out")
    with pytest.raises(GgufUnusable, match="cannot be read: No such file"):
        import_gguf(tmp_path / "none.gguf", tmp_path / "out")
    with pytest.raises(GgufUnusable, match="exists already"):
        import_gguf(made.file, made.folder)
    damaged = tmp_path / "half.gguf"
    damaged.write_bytes(made.file.read_bytes()[:4000])
    with pytest.raises(GgufUnusable, match=r"half\.gguf cannot be imported"):
        import_gguf(damaged, tmp_path / "out")


def test_without_the_package_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nouscoder.policy_folder.gguf.find_spec", lambda name: None)
    with pytest.raises(GgufUnusable, match=re.escape(how_to_install("gguf"))):
        import_gguf(tmp_path / "any.gguf", tmp_path / "out")
