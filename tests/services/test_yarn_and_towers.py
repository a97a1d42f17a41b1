"""What is written of a policy loads in transformers as it was trained: its frequencies with YaRN, and all its parts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.services.model_types import tiny_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3_5Config

from nouscoder.learner.model.weights import load_model, weights_of
from nouscoder.policy_folder.compose import YarnUnusable, compose_policy, with_yarn
from nouscoder.policy_folder.inspection import context_tokens

FACTOR, ORIGINAL = 4.0, 64


def yarn_frequencies(plain: torch.Tensor, base: float) -> list[float]:
    """Of arXiv 2309.00071, section 3.2 (NTK-by-parts), by hand: beta_fast 32, beta_slow 1, with whole bounds."""
    half = len(plain)

    def place(rotations: float) -> float:
        return 2 * half * math.log(ORIGINAL / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(place(32.0)), 0), min(math.ceil(place(1.0)), 2 * half - 1)
    found = []
    for index, value in enumerate(plain.tolist()):
        ramp = min(max((index - low) / max(high - low, 0.001), 0.0), 1.0)
        found.append(value / FACTOR * ramp + value * (1 - ramp))
    return found


def frequencies(folder: Path) -> dict[str, torch.Tensor]:
    """The frequencies of each kind of layers in the model that transformers loads; "": of all layers."""
    rotary = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb
    found = {name: value for name, value in rotary.named_buffers() if name.endswith("inv_freq")}
    return {name.removesuffix("inv_freq").rstrip("_"): value for name, value in found.items()}


def extended(folder: Path, kind: str, **changes: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = tiny_model(kind)
    model.save_pretrained(folder / "plain")
    file = folder / "plain/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    compose_policy(
        folder / "long", folder / "plain", folder / "plain", config=with_yarn(folder / "plain", FACTOR, ORIGINAL)
    )
    assert context_tokens(folder / "long") == FACTOR * ORIGINAL
    return frequencies(folder / "plain"), frequencies(folder / "long")


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3_text", "olmo3", "smollm3", "qwen3_5_text"])
def test_yarn_changes_the_frequencies_of_full_attention_as_its_paper_says(tmp_path: Path, kind: str) -> None:
    plain, long = extended(tmp_path, kind)
    config = json.loads((tmp_path / "long/config.json").read_text())
    ropes = config["rope_parameters"]
    changed = [name for name in plain if not torch.equal(plain[name], long[name])]
    assert changed == [name for name in plain if "sliding" not in name], "windows are as they were"
    for name in changed:
        base = ropes.get(name, ropes)["rope_theta"]
        assert long[name].tolist() == pytest.approx(yarn_frequencies(plain[name], base), rel=1e-5)


def test_a_policy_that_is_scaled_otherwise_is_refused(tmp_path: Path) -> None:
    llama3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "rope_parameters": llama3}))
    with pytest.raises(YarnUnusable, match="scaled by llama3 already"):
        with_yarn(tmp_path, FACTOR, ORIGINAL)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "rope_parameters": {"main": {}}}))
    with pytest.raises(YarnUnusable, match="has only main"):
        with_yarn(tmp_path, FACTOR, ORIGINAL)


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
