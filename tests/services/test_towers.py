"""What is written of a policy with a vision tower loads in transformers with all its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForImageTextToText, Qwen3_5Config

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
