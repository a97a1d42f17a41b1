"""What is written of a checkpoint with parts that are not trained (a vision tower, heads for later tokens) is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.services.model_types import _SIZES, TYPES, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from nouscoder.generation.engines.architecture import Architecture
from nouscoder.generation.engines.base import EngineError
from nouscoder.learner.model.synthetic import write_policy_folder
from nouscoder.learner.model.weights import empty_model, load_model, stored_dtypes
from nouscoder.learner.publication.published import PolicyPublisher, StagedPolicy
from nouscoder.policy_folder.compose import PolicyFilesMissing, compose_policy
from nouscoder.policy_folder.identity import differing_tensor, weights_digest
from nouscoder.policy_folder.weights_files import WEIGHTS_FILE, weights_files

_TOWER: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_heads": 4, "num_hidden_layers": 2},
    **{"depth": 2, "image_size": 28, "patch_size": 14, "out_hidden_size": 32, "num_position_embeddings": 16},
}
COMPOSITE = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "gemma3": "gemma3_text"}


def with_tower(kind: str, folder: Path) -> Path:
    text = {**_SIZES, **TYPES[COMPOSITE[kind]]}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=dict(_TOWER))
    torch.manual_seed(0)
    write_policy_folder(folder, AutoModelForImageTextToText.from_config(config, dtype=torch.float32))  # type: ignore[no-untyped-call]
    return folder


def with_more(kind: str, name: str, folder: Path) -> Path:
    write_policy_folder(folder, tiny_model(kind))
    weights = load_file(folder / WEIGHTS_FILE) | {name: torch.randn(4, 4)}
    save_file(weights, folder / WEIGHTS_FILE, {"format": "pt"})
    return folder


def published(first: Path, to: Path, *, resumed: bool = False) -> Path:
    """A version that the learner publishes of the model, each trained weight changed."""
    model = load_model(first)
    if resumed:
        state = model.state_dict()
        model = empty_model(first)
        model.load_state_dict(state)
    with torch.no_grad():
        for weight in dict.fromkeys(model.parameters()):
            weight.mul_(1.25)
    staged = StagedPolicy.of(model, 1, 1, stored_dtypes(first), first)
    return Path(PolicyPublisher(to, 1, first=first).write(staged).folder)


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("kind", COMPOSITE)
def test_a_written_policy_has_the_other_towers_byte_for_byte(kind: str, resumed: bool, tmp_path: Path) -> None:
    first = with_tower(kind, tmp_path / "first")
    version = published(first, tmp_path / "policies", resumed=resumed)
    compose_policy(tmp_path / "written", first, version)
    before, after = (load_file(folder / WEIGHTS_FILE) for folder in (first, tmp_path / "written"))
    assert before.keys() == after.keys()
    if kind != "gemma3":  # which the learner loads whole
        assert all(torch.equal(before[name], after[name]) for name in before if "visual" in name)
    (trained,) = (name for name in before if name.endswith("embed_tokens.weight"))
    assert torch.equal(after[trained], 1.25 * before[trained])
    autos: list[Any] = [AutoModelForImageTextToText, AutoModelForCausalLM]
    for auto in autos:
        _, found = auto.from_pretrained(tmp_path / "written", output_loading_info=True)
        assert not any(found.values()), found
    for folder in (first, version):
        Architecture(first).check(weights_files(folder), "the policy")


HEADS = [
    ("qwen3_5_text", "mtp.fc.weight"),
    ("qwen3_next", "mtp.fc.weight"),
    ("glm4_moe", "model.layers.46.eh_proj.weight"),
    ("deepseek_v3", "model.layers.61.eh_proj.weight"),
]


@pytest.mark.parametrize(("kind", "name"), HEADS)
def test_heads_for_later_tokens_stay(kind: str, name: str, tmp_path: Path) -> None:
    first = with_more(kind, name, tmp_path / "first")
    version = published(first, tmp_path / "policies")
    before, after = (load_file(folder / WEIGHTS_FILE) for folder in (first, version))
    assert before.keys() == after.keys()
    assert torch.equal(before[name], after[name])
    Architecture(first).check(weights_files(version), "the policy")


def test_a_lost_tensor_is_seen_by_each(tmp_path: Path) -> None:
    first = with_more("qwen3_next", "mtp.fc.weight", tmp_path / "first")
    lossy = tmp_path / "lossy"
    lossy.mkdir()
    weights = load_file(first / WEIGHTS_FILE)
    del weights["mtp.fc.weight"]
    save_file(weights, lossy / WEIGHTS_FILE)
    ours, theirs = weights_files(lossy), weights_files(first)
    assert weights_digest(ours) != weights_digest(theirs)
    assert differing_tensor(ours, theirs) == "mtp.fc.weight"
    with pytest.raises(EngineError, match=r"mtp.fc.weight is missing"):
        Architecture(first).check(ours, "the policy")
    with pytest.raises(PolicyFilesMissing, match=r"lacks mtp.fc.weight, which .* has: the policy would not be whole"):
        compose_policy(tmp_path / "written", first, lossy)
    assert not (tmp_path / "written").exists()
