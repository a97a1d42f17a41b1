"""A run goes on only with the policy with which it began, as far as it reads it again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.services.model_types import tiny_model

from nouscoder.config import Config, load_config
from nouscoder.errors import Unusable
from nouscoder.learner.model.synthetic import write_policy_folder
from nouscoder.learner.state.first_policy import FILE, require_first_policy


@pytest.fixture
def config(tmp_path: Path) -> Config:
    write_policy_folder(tmp_path / "policy", tiny_model("qwen2"))
    (tmp_path / "run").mkdir()
    return load_config(None, [f"run.root={tmp_path}", "run.name=run", f"policy.path={tmp_path / 'policy'}"])


def change_tensor(policy: Path) -> None:
    weights = load_file(policy / "model.safetensors")
    save_file({name: torch.zeros_like(weight) for name, weight in weights.items()}, policy / "model.safetensors")


def test_a_base_that_was_replaced_under_adapters_or_a_reference_is_refused(config: Config, tmp_path: Path) -> None:
    require_first_policy(config, reads_weights_again=True)
    require_first_policy(config, reads_weights_again=True)
    change_tensor(tmp_path / "policy")
    before = (tmp_path / "run" / FILE).read_bytes()
    with pytest.raises(Unusable, match=r"policy.path: a tensor in .*policy changed after the run in .*run began: put"):
        require_first_policy(config, reads_weights_again=True)
    assert (tmp_path / "run" / FILE).read_bytes() == before


def test_weights_that_the_checkpoints_hold_may_change(config: Config, tmp_path: Path) -> None:
    require_first_policy(config, reads_weights_again=False)
    change_tensor(tmp_path / "policy")
    require_first_policy(config, reads_weights_again=False)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "generation_config.json"])
def test_a_tokenizer_or_template_that_was_replaced_or_added_is_refused(
    name: str, config: Config, tmp_path: Path
) -> None:
    require_first_policy(config, reads_weights_again=False)
    (tmp_path / "policy" / name).write_text("{}")
    with pytest.raises(Unusable, match=rf"policy.path: {name} in .* changed after the run"):
        require_first_policy(config, reads_weights_again=False)


def test_a_run_of_an_earlier_release_gets_its_note(config: Config, tmp_path: Path) -> None:
    (tmp_path / "run" / FILE).unlink(missing_ok=True)
    require_first_policy(config, reads_weights_again=False)
    require_first_policy(config, reads_weights_again=True)  # a reference policy is new since this start
    change_tensor(tmp_path / "policy")
    with pytest.raises(Unusable, match="a tensor"):
        require_first_policy(config, reads_weights_again=True)
