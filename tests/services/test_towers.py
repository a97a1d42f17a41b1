"""What is written of a policy with a vision tower loads in transformers with all its parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3_5Config

from nouscoder.learner.model.weights import load_model, weights_of
from nouscoder.policy_folder.compose import compose_policy, with_yarn
from nouscoder.policy_folder.inspection import context_tokens

FACTOR, ORIGINAL = 4.0, 64


def loaded_with_info(kind: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model, and what transformers says of missing, unexpected and mismatched tensors."""
    found: tuple[Any, dict[str, Any]] = kind.from_pretrained(folder, output_loading_info=True)
    return found


def with_vision_tower(folder: Path) -> None:
    text = {
        **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 40, "head_dim": 8},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "max_position_embeddings": 512},
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(text_config=text, vision_config=vision)
    model: Any = AutoModelForImageTextToText.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)


def test_weights_of_the_text_alone_have_the_configuration_of_the_text(tmp_path: Path) -> None:
    """Under the configuration with a vision tower 21 of 77 tensors were drawn at random without a word."""
    with_vision_tower(tmp_path / "first")
    model = load_model(tmp_path / "first")
    (tmp_path / "weights").mkdir()
    save_file(weights_of(model), tmp_path / "weights/model.safetensors", {"format": "pt"})
    compose_policy(tmp_path / "made", tmp_path / "first", tmp_path / "weights")
    config = json.loads((tmp_path / "made/config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("qwen3_5_text", ["Qwen3_5ForCausalLM"])
    loaded, info = loaded_with_info(AutoModelForCausalLM, tmp_path / "made")
    assert not any(info.values())
    tokens = torch.arange(3, 30)[None]
    assert torch.equal(loaded(tokens).logits, AutoModelForCausalLM.from_pretrained(tmp_path / "first")(tokens).logits)


def test_a_copy_of_a_policy_with_towers_keeps_them_and_its_configuration(tmp_path: Path) -> None:
    with_vision_tower(tmp_path / "first")
    compose_policy(
        tmp_path / "made",
        tmp_path / "first",
        tmp_path / "first",
        config=with_yarn(tmp_path / "first", FACTOR, ORIGINAL),
    )
    loaded, info = loaded_with_info(AutoModelForImageTextToText, tmp_path / "made")
    assert not any(info.values())
    assert loaded.config.text_config.rope_parameters["rope_type"] == "yarn"
    assert context_tokens(tmp_path / "made") == FACTOR * ORIGINAL
