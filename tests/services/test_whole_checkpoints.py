"""What is written of a checkpoint with parts that are not trained (a vision tower, heads for later tokens) is whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.services.model_types import _SIZES, TYPES, tiny_model
from tests.services.test_lora_of_model_types import logits
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from nouscoder.config import LoraSection
from nouscoder.errors import Unusable
from nouscoder.generation.engines.architecture import Architecture
from nouscoder.generation.engines.base import EngineError
from nouscoder.learner.model.adapters import adapted_layers, add_adapters
from nouscoder.learner.model.synthetic import write_policy_folder
from nouscoder.learner.model.weights import empty_model, load_model, stored_dtypes
from nouscoder.learner.publication.publisher import PolicyPublisher, StagedPolicy
from nouscoder.policy_folder.compose import PolicyFilesMissing, compose_policy
from nouscoder.policy_folder.identity import differing_tensor, weights_digest
from nouscoder.policy_folder.weights_files import WEIGHTS_FILE, weights_files

pytestmark = pytest.mark.alone

_TOWER: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_heads": 4, "num_hidden_layers": 2},
    **{"depth": 2, "image_size": 28, "patch_size": 14, "out_hidden_size": 32, "num_position_embeddings": 16},
}
COMPOSITE = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "gemma3": "gemma3_text"}
OTHERS = {"llama4": "llama4_text", "mistral3": "mistral"}


def with_tower(kind: str, folder: Path) -> Path:
    text = {**_SIZES, **TYPES[(COMPOSITE | OTHERS)[kind]]}
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


REFUSED = {
    "llama4": r"holds multi_modal_projector.\S+ and \d+ more, which the model of its config.json has not$",
    "mistral3": r"Mistral3Config'> for this kind of AutoModel: AutoModelForCausalLM.$",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_towers_that_transformers_cannot_leave_out_are_refused_in_one_sentence(kind: str, tmp_path: Path) -> None:
    with pytest.raises(Unusable, match=REFUSED[kind]):
        load_model(with_tower(kind, tmp_path))


QUANTISED: list[tuple[str, torch.dtype]] = [("fp8", torch.float8_e4m3fn), ("mxfp4", torch.uint8), ("gptq", torch.int32)]


@pytest.mark.parametrize(("method", "dtype"), QUANTISED)
def test_a_quantised_folder_is_refused(method: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Its scales would not be those of the trained weights."""
    write_policy_folder(tmp_path, tiny_model("qwen3"))
    name = "model.layers.0.mlp.down_proj.weight"
    weights = load_file(tmp_path / WEIGHTS_FILE)
    weights |= {name: weights[name].to(dtype), f"{name}_scale_inv": torch.ones(1, 1)}
    save_file(weights, tmp_path / WEIGHTS_FILE, {"format": "pt"})
    with pytest.raises(Unusable, match=f"{name}_scale_inv, which the model of its config.json has not"):
        load_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for load in (load_model, empty_model):
        with pytest.raises(Unusable, match=rf"quantised \({method}\): take the model's unquantised weights$"):
            load(tmp_path)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", TYPES)
def test_a_written_policy_of_each_type_loads_with_no_missing_and_no_unexpected_tensor(
    kind: str, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    write_policy_folder(first, tiny_model(kind))
    try:
        version = published(first, tmp_path / "policies")
    except Unusable as error:
        pytest.skip(str(error))
    compose_policy(tmp_path / "written", first, version)
    before, after = (load_file(folder / WEIGHTS_FILE) for folder in (first, tmp_path / "written"))
    assert before.keys() == after.keys()
    auto: Any = AutoModelForCausalLM
    _, found = auto.from_pretrained(tmp_path / "written", output_loading_info=True)
    assert not any(found.values()), found
    trained = load_model(first)
    with torch.no_grad():
        for weight in dict.fromkeys(trained.parameters()):
            weight.mul_(1.25)
    loaded = load_model(tmp_path / "written").state_dict()
    assert loaded.keys() == trained.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in trained.state_dict().items())


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


def load_faults(folder: Path) -> str:
    """How many tensors transformers finds missing and unexpected, as "0/0"; others it must not name either."""
    auto: Any = AutoModelForCausalLM
    _, found = auto.from_pretrained(folder, output_loading_info=True)
    assert not found["mismatched_keys"]
    return f"{len(found['missing_keys'])}/{len(found['unexpected_keys'])}"


SOME = ("gpt2", "gpt_oss", "minimax_m2", "qwen3_moe")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in SOME else pytest.mark.soak) for kind in TYPES])
def test_every_type_is_written_whole_with_merged_adapters(kind: str, tmp_path: Path) -> None:
    first = tmp_path / "first"
    write_policy_folder(first, tiny_model(kind))
    model = load_model(first)
    model.set_attn_implementation("eager")
    add_adapters(model, LoraSection(rank=2, alpha=4.0), seed=1)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            for _, b in layer.adapted.values():
                layer.get_parameter(b).fill_(0.1)
    staged = StagedPolicy.of(model, 1, 1, stored_dtypes(first), first)
    compose_policy(tmp_path / "written", first, Path(PolicyPublisher(tmp_path, 1, first=first).write(staged).folder))
    assert load_file(first / WEIGHTS_FILE).keys() == load_file(tmp_path / "written" / WEIGHTS_FILE).keys()
    assert load_faults(tmp_path / "written") == "0/0"
    auto: Any = AutoModelForCausalLM
    written = auto.from_pretrained(tmp_path / "written", attn_implementation="eager")
    torch.testing.assert_close(logits(written.eval()), logits(model.train(False)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("form", ["of_the_model", "without_its_prefix"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "minimax_m2", "gpt_neox", "gpt2"])
def test_names_of_another_form_of_the_folder_stay(kind: str, form: str, resumed: bool, tmp_path: Path) -> None:
    """Experts that transformers holds together; the files of gpt2 on the hub have no `transformer.`."""
    model, first = tiny_model(kind), tmp_path / "first"
    write_policy_folder(first, model)
    model.save_pretrained(first, save_original_format=False)
    prefix = f"{model.base_model_prefix}." if form == "without_its_prefix" else ""
    weights = {name.removeprefix(prefix): weight for name, weight in load_file(first / WEIGHTS_FILE).items()}
    save_file(weights, first / WEIGHTS_FILE, {"format": "pt"})
    version = published(first, tmp_path / "policies", resumed=resumed)
    compose_policy(tmp_path / "written", first, version)
    assert load_file(tmp_path / "written" / WEIGHTS_FILE).keys() == weights.keys()
    auto: Any = AutoModelForCausalLM
    _, found = auto.from_pretrained(tmp_path / "written", output_loading_info=True)
    assert not any(found.values()), found
    Architecture(first).check(weights_files(version), "the policy")


@pytest.mark.parametrize("kept", [["lm_head.weight"], ["model.embed_tokens.weight", "lm_head.weight"]])
def test_a_tied_output_layer_keeps_a_name_that_the_folder_has(kept: list[str], tmp_path: Path) -> None:
    first = tmp_path / "first"
    write_policy_folder(first, tiny_model("llama", tie_word_embeddings=True))
    weights = load_file(first / WEIGHTS_FILE)
    tied = weights.pop("model.embed_tokens.weight")
    save_file(weights | {name: tied.clone() for name in kept}, first / WEIGHTS_FILE, {"format": "pt"})
    version = published(first, tmp_path / "policies")
    compose_policy(tmp_path / "written", first, version)
    assert load_file(tmp_path / "written" / WEIGHTS_FILE).keys() == {*weights, kept[-1] if len(kept) == 1 else kept[0]}


def test_a_folder_without_weights_takes_the_names_of_the_first_policy(tmp_path: Path) -> None:
    """Generation without a shared disk has only the other files of the folder."""
    first = with_more("glm4_moe", "model.layers.46.eh_proj.weight", tmp_path / "first")
    version = published(first, tmp_path / "policies")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "config.json").write_bytes((first / "config.json").read_bytes())
    Architecture(tmp_path / "cache").check(weights_files(version), "the policy")


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
    with pytest.raises(PolicyFilesMissing, match=r"^only one of .* has mtp.fc.weight: the policy would not fit"):
        compose_policy(tmp_path / "written", first, lossy)
    assert not (tmp_path / "written").exists()
