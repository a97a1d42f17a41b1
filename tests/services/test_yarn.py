"""YaRN (arXiv 2309.00071): the frequencies of the model that transformers makes of the written config.json."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.services.model_types import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from nouscoder.errors import Unusable
from nouscoder.policy_folder.compose import with_yarn

FACTOR, ORIGINAL = 4.0, 512


def published(dim: int, theta: float) -> torch.Tensor:
    """Section 3.2 and appendix A.2 of the paper: a ramp between interpolated and unchanged, beta 32 and 1."""

    def dimension(rotations: int) -> float:
        return dim * math.log(ORIGINAL / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), dim - 1)
    ramp = [min(max((n - low) / (high - low), 0.0), 1.0) for n in range(dim // 2)]
    return torch.tensor([(1 - r + r / FACTOR) * theta ** (-2 * n / dim) for n, r in enumerate(ramp)])


def frequencies(config: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """Each table of inverse frequencies of the model of a configuration, by the end of its name."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))  # type: ignore[no-untyped-call]
    found = {name.rpartition(".")[2]: value for name, value in model.named_buffers() if name.endswith("inv_freq")}
    return {name: value for name, value in found.items() if "original" not in name}


def written(kind: str, folder: Path, **changes: Any) -> Path:
    tiny_model(kind, **changes).config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "kind",
    ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "olmo2", "gpt_neox", "glm4", "granite", "smollm3", "seed_oss"],
)
def test_the_frequencies_of_a_type_are_those_of_the_paper(kind: str, tmp_path: Path) -> None:
    folder = written(kind, tmp_path / "first", hidden_size=256)
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    before = frequencies(json.loads((folder / "config.json").read_text()), tmp_path / "before")["inv_freq"]
    after = frequencies(with_yarn(folder, FACTOR, ORIGINAL), tmp_path / "after")["inv_freq"]
    torch.testing.assert_close(after, published(2 * len(before), rope["rope_theta"]))
    assert not torch.equal(after, before)


@pytest.mark.parametrize("form", [4, 5])
def test_a_type_that_reads_no_rope_scaling_is_scaled_from_both_forms(form: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 64, "max_position_embeddings": ORIGINAL}
    ends = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    rope: dict[str, Any] = {"rope_theta": 50_000.0, "rope_scaling": None}
    if form == 5:
        rope = {"rope_parameters": {"rope_theta": 50_000.0, "rope_type": "default"}}
    config = {"model_type": "cohere2_moe", **sizes, **ends, **rope}
    before = frequencies(config, tmp_path)["inv_freq"]
    after = frequencies(with_yarn(tmp_path, FACTOR, ORIGINAL), tmp_path / "after")["inv_freq"]
    torch.testing.assert_close(after, published(64, 50_000.0))
    assert not torch.equal(after, before)


def said_of_yarn(kind: str, folder: Path, **sizes: int) -> str:
    """For the table of model types: the largest difference from the paper of what transformers computes, or "refused".

    Frequencies of layers with windows do not count, which stay. A difference is relative to the frequency.
    """
    changes = {"layer_types": ["sliding_attention", "full_attention"]} if kind in ("gemma3_text", "olmo3") else {}
    try:
        scaled = with_yarn(written(kind, folder, **changes, **sizes), FACTOR, ORIGINAL)
    except Unusable:
        return "refused"
    before = frequencies(json.loads((folder / "config.json").read_text()), folder / "before")
    if max(map(len, before.values())) == 1 and not sizes:  # one frequency, which YaRN leaves as it is
        return said_of_yarn(kind, folder, hidden_size=256)
    rope = scaled["rope_parameters"]
    theta = rope.get("full_attention", rope)["rope_theta"]
    worst = 0.0
    for name, found in frequencies(scaled, folder / "after").items():
        if "sliding" not in name:
            assert not torch.equal(found, before[name]), f"{kind}: {name} is not scaled"
            wanted = published(2 * len(found), theta)
            worst = max(worst, ((found - wanted).abs() / wanted).max().item())
    assert worst < 1e-4, f"{kind} is scaled otherwise than in the paper: {worst}"
    return f"{worst:.0e}"


@pytest.mark.parametrize("kind", ["gemma3_text", "olmo3"])
@pytest.mark.parametrize("form", [4, 5])
def test_layers_of_full_attention_are_scaled_and_windows_stay(kind: str, form: int, tmp_path: Path) -> None:
    folder = written(kind, tmp_path / "first", layer_types=["sliding_attention", "full_attention"])
    config = json.loads((folder / "config.json").read_text())
    if form == 4:
        ropes = config.pop("rope_parameters")
        config |= {"rope_theta": ropes["full_attention"]["rope_theta"], "rope_scaling": None}
        if kind == "gemma3_text":
            config["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
        (folder / "config.json").write_text(json.dumps(config))
    before = frequencies(config, tmp_path / "before")
    scaled = with_yarn(folder, FACTOR, ORIGINAL)
    assert scaled["max_position_embeddings"] == FACTOR * ORIGINAL
    after = frequencies(scaled, tmp_path / "after")
    theta = 1e6 if kind == "gemma3_text" else float(AutoConfig.for_model(kind).default_theta)
    full = "full_attention_inv_freq"
    torch.testing.assert_close(after[full], published(2 * len(before[full]), theta))
    assert torch.equal(after["sliding_attention_inv_freq"], before["sliding_attention_inv_freq"])


def test_it_stands_in_the_text_config_of_a_model_with_towers(tmp_path: Path) -> None:
    text = json.loads((written("gemma3_text", tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    scaled = with_yarn(tmp_path, FACTOR, ORIGINAL)
    assert scaled.keys() == {"model_type", "text_config"}
    assert scaled["text_config"]["rope_parameters"]["full_attention"]["rope_type"] == "yarn"
    assert scaled["text_config"]["max_position_embeddings"] == FACTOR * ORIGINAL


@pytest.mark.parametrize("how", ["linear", "dynamic", "llama3", "longrope"])
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_a_policy_that_is_scaled_already_is_refused(how: str, key: str, tmp_path: Path) -> None:
    config = {"model_type": "llama", key: {"rope_type": how, "factor": 8.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Unusable, match=f"has rope scaling of type {how} already"):
        with_yarn(tmp_path, FACTOR, ORIGINAL)


def test_yarn_is_changed_only_from_the_same_positions(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": ORIGINAL, "attention_factor": 1.07}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "rope_parameters": rope}))
    changed = with_yarn(tmp_path, FACTOR, ORIGINAL)["rope_parameters"]
    assert changed == {"rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": ORIGINAL}
    with pytest.raises(Unusable, match="of type yarn from 512 positions already"):
        with_yarn(tmp_path, FACTOR, 1024)


@pytest.mark.parametrize("kind", ["gpt2", "gptj", "mamba", "bloom", "mixtral", "recurrent_gemma", "granitemoehybrid"])
def test_a_type_without_rope_parameters_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="YaRN cannot scale the positions of this"):
        with_yarn(written(kind, tmp_path), FACTOR, ORIGINAL)
