"""Learner and generation compare the first policy before the first rollout: tensors and tokenizer, by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nouscoder.demo.policy import CharTokenizer
from nouscoder.domain.policy import PolicyManifest
from nouscoder.generation.engines.base import Engine
from nouscoder.generation.weights.errors import PoliciesDiffer
from nouscoder.generation.weights.policies import Policies, follow_policies
from nouscoder.policy_folder.identity import differing_file, tokenizer_digests, weights_digest
from nouscoder.policy_folder.weights_files import INDEX_FILE, WEIGHTS_FILE, shards_of, weights_files

TENSORS = {
    "model.embed_tokens.weight": torch.arange(12.0).view(3, 4),
    "model.norm.weight": torch.ones(4),
    "lm_head.weight": torch.arange(12.0).view(3, 4) + 1,
}
TIED = {**TENSORS, "lm_head.weight": TENSORS["model.embed_tokens.weight"].clone()}


def saved(folder: Path, tensors: dict[str, Tensor], *, shards: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    CharTokenizer().save(folder)
    if not shards:
        save_file(tensors, folder / WEIGHTS_FILE, {"format": "pt"})
        return folder
    for number, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, folder / f"model-{number}.safetensors")
    places = {name: f"model-{number}.safetensors" for number, name in enumerate(tensors)}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": places}))
    return folder


def digest(folder: Path) -> str:
    return weights_digest(weights_files(folder))


def manifest_of(folder: Path, version: int = 0) -> PolicyManifest:
    return PolicyManifest(
        version, version, str(folder), shards_of(folder), weights=digest(folder), tokenizer=tokenizer_digests(folder)
    )


def test_a_digest_does_not_depend_on_files_their_order_or_a_saved_tied_head(tmp_path: Path) -> None:
    one = digest(saved(tmp_path / "one", TENSORS))
    assert digest(saved(tmp_path / "shards", dict(reversed(TENSORS.items())), shards=True)) == one
    rotary = {**TENSORS, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    assert digest(saved(tmp_path / "rotary", rotary)) == one
    without_head = {name: tensor for name, tensor in TIED.items() if name != "lm_head.weight"}
    assert digest(saved(tmp_path / "tied", TIED)) == digest(saved(tmp_path / "once", without_head)) != one


CHANGES: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "bytes": lambda tensors: tensors["model.norm.weight"].__setitem__(1, -1.0),
    "sign of zero": lambda tensors: tensors["model.embed_tokens.weight"].__setitem__((0, 0), -0.0),
    "type": lambda tensors: tensors.update({"model.norm.weight": torch.ones(8, dtype=torch.bfloat16)[:4].clone()}),
    "shape": lambda tensors: tensors.update({"model.norm.weight": torch.ones(2, 2)}),
    "name": lambda tensors: tensors.update({"model.norms.weight": tensors.pop("model.norm.weight")}),
    "head": lambda tensors: tensors["lm_head.weight"].__setitem__((0, 0), 0.5),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_learner_with_other_tensors_is_refused_by_name_before_a_rollout(tmp_path: Path, change: str) -> None:
    sampled = saved(tmp_path / "policy", TENSORS)
    tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
    CHANGES[change](tensors)
    trained = saved(tmp_path / "policies" / "00000000", tensors, shards=True)
    assert digest(sampled) != digest(trained)
    policies = Policies(cast(Engine, AnyEngine()))
    await policies.update(manifest_of(sampled))
    with pytest.raises(PoliciesDiffer, match=r"(embed_tokens|norm|norms|lm_head)\.weight in .*00000000 is not"):
        await follow_policies(announced([manifest_of(trained)]), policies)


async def test_equal_tensors_in_other_files_are_the_same_policy(tmp_path: Path) -> None:
    policies = Policies(cast(Engine, AnyEngine()))
    await policies.update(manifest_of(saved(tmp_path / "policy", TIED)))
    assert not await policies.follow(manifest_of(saved(tmp_path / "published", TIED, shards=True)))
    head_only = {"lm_head.weight": TIED["lm_head.weight"], "model.norm.weight": TIED["model.norm.weight"]}
    policies = Policies(cast(Engine, AnyEngine()))
    await policies.update(manifest_of(saved(tmp_path / "head", head_only)))
    embedding_only = {name: tensor for name, tensor in TIED.items() if name != "lm_head.weight"}
    assert not await policies.follow(manifest_of(saved(tmp_path / "embedding", embedding_only)))


@pytest.mark.parametrize("file", ["tokenizer.json", "chat_template.jinja", "generation_config.json"])
async def test_another_tokenizer_is_refused_by_its_file_with_every_version(tmp_path: Path, file: str) -> None:
    own = saved(tmp_path / "own", TENSORS)
    other = saved(tmp_path / "other", TENSORS)
    (other / file).write_text('{"eos_token_id": 7}')
    policies = Policies(cast(Engine, AnyEngine()), tokenizer=tokenizer_digests(own))
    assert await policies.follow(manifest_of(own))
    with pytest.raises(PoliciesDiffer, match=rf"^{file} is not the same"):
        await policies.update(manifest_of(other, 1))
    with pytest.raises(PoliciesDiffer, match=rf"^{file} is not the same"):
        await follow_policies(announced([manifest_of(other, 2)]), policies)
    assert differing_file(tokenizer_digests(own), tokenizer_digests(own)) is None


class AnyEngine:
    """Takes every file."""

    async def load_policy(self, files: Sequence[Path], policy_version: int) -> float:
        for file in files:
            load_file(file)
        return 0.0


async def announced(manifests: Sequence[PolicyManifest]) -> Any:
    for manifest in manifests:
        yield manifest
