"""docs/configuration.md and what `nouscoder init` writes follow from the configuration's models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from nouscoder.cli.app import app
from nouscoder.config import Config, load_config
from nouscoder.sections import keys_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_document_has_every_key() -> None:
    """tests/chart/test_chart_values.py checks that it is what `make generated` writes."""
    text = DOCUMENT.read_text(encoding="utf8")
    for key in keys_of(Config):
        section = text.split(f"\n## {'.'.join(key.path[:-1])}\n")[1].split("\n## ")[0]
        assert f"| `{key.path[-1]}` |" in section


def test_init_writes_a_commented_file_that_is_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config_json = {"model_type": "qwen3", "eos_token_id": 1, "max_position_embeddings": 1000}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config_json))
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    save_file({"lm_head.weight": np.zeros((2, 2), np.float32)}, tmp_path / "model" / "model.safetensors")
    tests = {"type": "stdin", "cases": [{"input": "1", "output": "2"}]}
    (tmp_path / "sums.jsonl").write_text(json.dumps({"problem_id": "a", "prompt": "Add.", "tests": tests}))
    out = tmp_path / "my run.toml"
    answer = CliRunner().invoke(app, ["init", "model", "sums.jsonl", "--out", str(out)])
    assert answer.exit_code == 0, answer.output
    config = load_config(out)
    assert config.policy.path == tmp_path / "model"
    assert config.problems.train == tmp_path / "sums.jsonl"
    assert config.run.root == tmp_path / "runs"
    assert config.run.name == "my-run"
    assert config.generation.max_tokens_total == 1000
    assert config.generation.environment.prompt_as == "auto"
    lines = out.read_text().splitlines()
    keys = [number for number, line in enumerate(lines) if " = " in line and not line.startswith("#")]
    assert len(keys) > 15
    assert all(lines[number - 1].startswith("# ") for number in keys)


@pytest.mark.parametrize("place", ["there.toml", "no/folder/my.toml"])
def test_init_overwrites_nothing_and_names_a_place_that_cannot_be_written(tmp_path: Path, place: str) -> None:
    (tmp_path / "there.toml").write_text("mine")
    answer = CliRunner().invoke(app, ["init", "--out", str(tmp_path / place)])
    assert answer.exit_code == 1
    assert "exists already" in str(answer.exception) or "cannot be written" in str(answer.exception)
    assert (tmp_path / "there.toml").read_text() == "mine"
