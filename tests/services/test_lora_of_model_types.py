"""Adapters on every model type: what they reach, by the names of weights; merged weights give the adapted logits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tests.services.model_types import TYPES, tiny_model
from tests.services.test_model_types import _REFUSED, COMMON, DOCUMENT
from transformers import PreTrainedModel

from nouscoder.config import LoraSection
from nouscoder.learner.model.adapters import adapted_layers, add_adapters, said_of_adapters, sizes_of_kinds
from nouscoder.learner.model.synthetic import write_policy_folder
from nouscoder.learner.model.weights import weights_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.alone]
ALL_LAYERS = LoraSection(rank=4, alpha=8.0)
IDS = torch.tensor([[3, 5, 7, 9, 4, 6, 8, 10]])
# Matrices without an adapter, by the parts of their names: embeddings and heads, routers, convolutions, states.
NOT_ADAPTED = re.compile(
    r"embed|\bwte\b|\bwpe\b|^lm_head|^head\.|^cls\.|router|\.gate\.|shared_expert_gate|conv1d|conv_1d|conv\.conv|A_log"
    r"|time_mix|dt_proj|_bias$|gate_weight$"
)
SHARES = dict(re.findall(r"^\| `([\w-]+)` \| ([\d.]+) % \|", DOCUMENT.read_text(), re.MULTILINE))
EVERY_TYPE = [pytest.param(kind, marks=() if kind in COMMON else pytest.mark.heavy) for kind in TYPES]


def reached(model: PreTrainedModel) -> set[str]:
    return {f"{path}.{name}" for path, layer in adapted_layers(model).items() for name in layer.adapted}


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


@pytest.mark.parametrize("kind", EVERY_TYPE)
def test_adapters_reach_all_matrices_and_merge_into_the_same_logits(kind: str) -> None:
    model, plain = tiny_model(kind), tiny_model(kind)
    matrices = {name for name, weight in plain.named_parameters() if weight.ndim > 1}
    add_adapters(model, ALL_LAYERS, seed=1)
    assert reached(model) == {name for name in matrices if not NOT_ADAPTED.search(name)}
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-5, atol=1e-5)
    sizes = sizes_of_kinds(model)
    share = sum(size for (_, has_adapter), size in sizes.items() if has_adapter) / sum(sizes.values())
    assert SHARES.get(kind) == (None if kind in _REFUSED else f"{100 * share:.1f}")
    chance = torch.Generator().manual_seed(5)
    for layer in adapted_layers(model).values():
        for _, b in layer.adapted.values():
            own = layer.get_parameter(b)
            own.data = 0.3 * torch.randn(own.shape, generator=chance)
    adapted = logits(model)
    assert not torch.allclose(adapted, logits(plain), atol=0.1)
    weights, before = weights_of(model), plain.state_dict()
    assert {name for name, weight in weights.items() if not torch.equal(weight, before[name])} == reached(model)
    plain.load_state_dict(weights, strict=False)
    torch.testing.assert_close(adapted, logits(plain), rtol=1e-4, atol=1e-4)


def test_experts_of_a_type_that_names_their_weights_otherwise_have_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """JetMoE, which is not in the table: 2.4 % were reached."""
    sizes = {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    monkeypatch.setitem(TYPES, "jetmoe", sizes)
    model = tiny_model("jetmoe")
    assert ": 98.6% of the decoder's weights" in add_adapters(model, ALL_LAYERS, seed=1)
    chance = torch.Generator().manual_seed(5)
    for layer in adapted_layers(model).values():
        for _, b in layer.adapted.values():
            layer.get_parameter(b).data.normal_(0.0, 0.3, generator=chance)
    plain = tiny_model("jetmoe")
    plain.load_state_dict(weights_of(model), strict=False)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen2_moe", "glm4_moe", "qwen3_moe", "qwen3_next", "gpt_oss", "deepseek_v3", "phi3"])
def test_the_frozen_share_is_said_before_weights_are_loaded(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    write_policy_folder(tmp_path, model)
    sentence = said_of_adapters(tmp_path, ALL_LAYERS)
    rest = {name: weight.numel() for name, weight in model.named_parameters() if not re.search("embed|^lm_head", name)}
    frozen = sum(n for name, n in rest.items() if NOT_ADAPTED.search(name) or model.get_parameter(name).ndim == 1)
    assert f": {1 - frozen / sum(rest.values()):.1%} of the decoder's weights; the others stay frozen" in sentence
