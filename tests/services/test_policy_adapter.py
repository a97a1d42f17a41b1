"""Published adapters: with their base they are the merged policy, in every version; a wrong one changes no weight."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file, save_file
from tests.contract.random_adapters import RANK, adapted, manifest_of, metadata_of, random_adapter, write_adapter
from tests.fake_learner_broker import FakeBroker
from transformers import AutoModelForCausalLM

from nouscoder.atomic_files import sha256_of
from nouscoder.config import Config, LearnerSection, RunSection
from nouscoder.domain.policy import PolicyDelta, PolicyManifest, Shard
from nouscoder.generation.engines.stepped import SteppedEngine
from nouscoder.generation.engines.torch import ModelWeights, TorchEngine
from nouscoder.generation.metrics import GenerationMetrics
from nouscoder.generation.weights.errors import PolicyUnusable
from nouscoder.generation.weights.policies import Policies
from nouscoder.generation.weights.source import FolderSource
from nouscoder.learner import compare
from nouscoder.learner.core import LearnerCore
from nouscoder.learner.metrics.prometheus import LearnerMetrics
from nouscoder.learner.model.adapters import add_adapters
from nouscoder.learner.model.synthetic import random_batch, random_policy, write_policy_folder
from nouscoder.learner.publication.publisher import PolicyPublisher, StagedPolicy
from nouscoder.learner.worker import LearnerWorker
from nouscoder.policy_folder.compose import compose_policy
from nouscoder.policy_folder.identity import weights_digest
from nouscoder.policy_folder.policy_tensors import PolicyTensors
from nouscoder.policy_folder.weights_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    WeightsUnusable,
    policy_files,
    weights_files,
)
from nouscoder.rpc.pairs import MANIFEST
from nouscoder.run.evaluation_files import keep_weights, weights_folder

NUM_BATCHES, NUM_UPDATES = 3, 200
LORA = {"rank": 4, "alpha": 6.0, "target_modules": ("q_proj", "v_proj", "down_proj")}


@pytest.fixture(autouse=True)
def _restore_determinism() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def config_of(root: Path, publication: str) -> Config:
    learner = {
        "steps_per_batch": 2,
        "learning_rate": 1e-2,
        "peak_flops": 1e9,
        "lora": {**LORA, "publication": publication},
    }
    run = RunSection(root=root, seed=5, total_batches=NUM_BATCHES)
    return Config(run=run, learner=LearnerSection.model_validate(learner))


async def trained(config: Config) -> list[PolicyManifest]:
    """What a learner publishes while it trains every batch. It goes on where an earlier one ended."""
    broker = FakeBroker(lambda batch_id, version: random_batch(batch_id, seed=1, policy_version=version))
    worker = LearnerWorker(config, broker, LearnerMetrics(CollectorRegistry()), LearnerCore(config))
    try:
        await asyncio.wait_for(worker.run(), 240)
    finally:
        await worker.close()
    return broker.policies


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Config, list[PolicyManifest]]]:
    """The same run of a bfloat16 policy with both publications: its configuration, and its policies."""
    found = {}
    for publication in ("merged", "adapter"):
        config = config_of(tmp_path_factory.mktemp(publication), publication)
        write_policy_folder(config.run.folder / "policy", random_policy(0).to(torch.bfloat16))  # type: ignore[arg-type]
        found[publication] = (config, asyncio.run(trained(config)))
    return found


async def tensors_of(manifest: PolicyManifest) -> dict[str, torch.Tensor]:
    return dict(PolicyTensors(await FolderSource().files_of(manifest)).read())


async def test_adapters_with_their_base_are_the_merged_publication_in_every_version(
    runs: dict[str, tuple[Config, list[PolicyManifest]]],
) -> None:
    (config, merged), (_, adapters) = runs["merged"], runs["adapter"]
    first = dict(PolicyTensors(weights_files(config.run.folder / "policy")).read())
    assert len(adapters) == len(merged) == NUM_BATCHES + 1
    for whole, adapter in zip(merged, adapters, strict=True):
        wanted, found = await tensors_of(whole), await tensors_of(adapter)
        assert found.keys() == wanted.keys()
        changed = {name for name, tensor in found.items() if not torch.equal(tensor, first[name])}
        expected = {name for name in first if name.split(".")[-2] in LORA["target_modules"]}  # type: ignore[operator]
        assert changed == (expected if whole.policy_version else set())
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype == torch.bfloat16
            # Both round the same float32 sum, which may differ in its last bit: at most one unit of bfloat16.
            torch.testing.assert_close(found[name], tensor, rtol=2**-7, atol=0)
            assert float((found[name] != tensor).float().mean()) < 0.01
    assert {shard.name for manifest in adapters for shard in manifest.shards} == {ADAPTER_FILE}
    assert len({manifest.digest for manifest in adapters}) == NUM_BATCHES + 1
    base = weights_digest(weights_files(config.run.folder / "policy"))
    assert [manifest.weights for manifest in adapters] == [base] + [""] * NUM_BATCHES
    assert [manifest.weights for manifest in merged] == [base] + [""] * NUM_BATCHES
    assert {manifest.base for manifest in adapters if manifest.base is not None} == {adapters[0].base}
    assert adapters[-1].num_bytes < merged[-1].num_bytes


async def test_a_learner_that_resumes_publishes_the_same_adapter(
    runs: dict[str, tuple[Config, list[PolicyManifest]]],
) -> None:
    config, published = runs["adapter"]
    core = LearnerCore(config)
    core.start()
    try:
        again = core.write_policy(core.stage_policy())
    finally:
        core.close()
    assert again == published[-1]


def test_the_objectives_are_compared_at_a_published_adapter(
    runs: dict[str, tuple[Config, list[PolicyManifest]]],
) -> None:
    merged, adapted_ = (compare._policy(config, config.run.folder, 2) for config, _ in runs.values())
    for name, weight in merged.state_dict().items():
        torch.testing.assert_close(adapted_.state_dict()[name], weight, rtol=2**-7, atol=0)


def test_the_best_adapter_is_kept_and_begins_a_stage_as_whole_weights(
    runs: dict[str, tuple[Config, list[PolicyManifest]]], tmp_path: Path
) -> None:
    config, published = runs["adapter"]
    run, newest = config.run.folder, published[-1]
    keep_weights(run, newest.policy_version)
    kept = run / "kept" / f"{newest.policy_version:08d}"
    assert sorted(file.name for file in kept.iterdir()) == [ADAPTER_CONFIG_FILE, ADAPTER_FILE]
    assert (kept / ADAPTER_FILE).samefile(Path(newest.folder) / ADAPTER_FILE)
    weights = weights_folder(config, newest.policy_version)
    compose_policy(tmp_path / "policy", run / "policy", kept, link=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.bfloat16).state_dict()
    for name, tensor in PolicyTensors(policy_files(weights, run / "policy")).read():
        assert torch.equal(loaded[name], tensor), name


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """The folder of a first policy, in several files."""
    folder = tmp_path / "first"
    policy = random_policy(0)
    policy.save_pretrained(folder, max_shard_size="40KB")
    assert len(weights_files(folder)) > 1
    return folder


def test_two_hundred_adapters_in_a_row_leave_no_rounding_behind(first: Path, tmp_path: Path) -> None:
    """They change different layers. Afterwards the weights are bit for bit those of the last one alone."""
    model, fresh = random_policy(1), random_policy(2)
    weights = ModelWeights(model)
    targets = [("q_proj", "down_proj"), ("q_proj", "v_proj"), ("o_proj",)]
    for version in range(NUM_UPDATES):
        adapter = write_adapter(tmp_path / str(version), random_adapter(first, version, targets[version % 3]))
        weights.load(policy_files(adapter, first), f"policy version {version}")
    files = policy_files(adapter, first)
    ModelWeights(fresh).load(files, "the last one alone")
    wanted = dict(PolicyTensors(files).read())
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, fresh.state_dict()[name]), name
        assert torch.equal(weight, wanted[name]), name


def test_only_what_adapters_change_is_read_again_until_the_base_changes(first: Path, tmp_path: Path) -> None:
    model = random_policy(1)
    weights = ModelWeights(model)
    one, other = (write_adapter(tmp_path / str(seed), random_adapter(first, seed)) for seed in (1, 2))
    weights.load(policy_files(one, first), "one")
    frozen = model.get_parameter("model.norm.weight").data
    true_value = frozen.clone()
    frozen.fill_(7.0)  # shows whether the tensor is read
    weights.load(policy_files(other, first), "other")
    assert torch.equal(frozen, torch.full_like(frozen, 7.0))
    for file in weights_files(first):
        os.utime(file, ns=(1, 1))
    weights.load(policy_files(one, first), "one")
    assert torch.equal(frozen, true_value)
    frozen.fill_(7.0)
    weights.load(weights_files(first), "whole weights")
    assert torch.equal(frozen, true_value)


async def published(folder: Path, first: Path, version: int, seed: int) -> PolicyManifest:
    """A version with a random adapter, as the learner publishes it."""
    adapter = replace(random_adapter(first, seed), base_digest="")
    publisher = PolicyPublisher(folder, keep=10, first=first)
    return publisher.write(StagedPolicy(version, version, {}, adapter))


def changed_file(manifest: PolicyManifest, change: Callable[[dict[str, torch.Tensor]], object]) -> PolicyManifest:
    """The manifest of the adapter after its tensors were changed."""
    file = Path(manifest.folder) / ADAPTER_FILE
    metadata, tensors = metadata_of(file), load_file(file)
    change(tensors)
    save_file(tensors, file, metadata)
    return with_file(manifest)


def with_file(manifest: PolicyManifest) -> PolicyManifest:
    """The manifest of the adapter that is there now."""
    file = Path(manifest.folder) / ADAPTER_FILE
    return replace(manifest, shards=(Shard(ADAPTER_FILE, sha256_of(file), file.stat().st_size),))


def spoiled(fault: str, manifest: PolicyManifest) -> PolicyManifest:
    """The manifest of an adapter with a fault."""
    file = Path(manifest.folder) / ADAPTER_FILE
    name = next(name for name in load_file(file) if name.endswith("layers.0.self_attn.q_proj.lora_B.weight"))
    if fault == "cut file":
        file.write_bytes(file.read_bytes()[:-100])
        return manifest
    if fault == "cut before its checksum was taken":
        file.write_bytes(file.read_bytes()[:-100])
        return with_file(manifest)
    if fault == "no alpha":
        save_file(load_file(file), file)
        return with_file(manifest)
    if fault == "other base":
        base = manifest.base
        assert base is not None
        random_policy(9).save_pretrained(base.folder, max_shard_size="40KB")
        return manifest
    changes: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
        "wrong shape": lambda tensors: tensors.update({name: tensors[name][1:].contiguous()}),
        "wrong rank": lambda tensors: tensors.update({name: tensors[name][:, 1:].contiguous()}),
        "missing matrix": lambda tensors: tensors.pop(name),
        "unknown layer": lambda tensors: tensors.update({name.replace("layers.0", "layers.7"): tensors.pop(name)}),
        "not finite": lambda tensors: tensors[name].fill_(float("inf")),
    }
    return changed_file(manifest, changes[fault])


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("cut file", "bytes, its manifest says"),
        ("cut before its checksum was taken", "holds no readable adapter"),
        ("no alpha", "is not NousCoder's, so .*: merge it with PEFT"),
        ("other base", "has the SHA-256 .* its manifest says"),
        ("wrong shape", r"do not fit model\.layers\.0\.self_attn\.q_proj"),
        ("wrong rank", r"do not fit model\.layers\.0\.self_attn\.q_proj"),
        ("missing matrix", "must hold two matrices of each adapted layer"),
        ("unknown layer", "must hold two matrices of each adapted layer"),
        ("not finite", r"model\.layers\.0\.self_attn\.q_proj\.weight holds values that are not finite"),
    ],
)
async def test_a_wrong_adapter_is_refused_as_a_whole_and_the_old_version_stays_in_use(
    first: Path, tmp_path: Path, fault: str, says: str
) -> None:
    stepped = TorchEngine(first, max_running=2, max_tokens_total=60)
    async with SteppedEngine(stepped, GenerationMetrics()) as engine:
        policies = Policies(engine)
        assert await policies.follow(await published(tmp_path / "policies", first, 1, seed=1))
        before = {name: weight.clone() for name, weight in stepped._decoder.model.state_dict().items()}
        good = await published(tmp_path / "policies", first, 2, seed=2)
        with pytest.raises(PolicyUnusable, match=says):
            await policies.follow(spoiled(fault, good))
        assert engine.policy_version == 1
        assert all(torch.equal(weight, before[name]) for name, weight in stepped._decoder.model.state_dict().items())
        if fault == "other base":
            return
        assert await policies.follow(await published(tmp_path / "policies", first, 3, seed=3))
        after = stepped._decoder.model.state_dict()
        assert any(not torch.equal(weight, before[name]) for name, weight in after.items())


def test_an_adapter_is_not_merged_into_other_weights_of_the_same_shapes(first: Path, tmp_path: Path) -> None:
    (*_, adapter), merged = adapted(tmp_path / "adapted", first, seed=1)
    wanted = dict(PolicyTensors(policy_files(adapter.parent, first)).read())
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in PolicyTensors(weights_files(merged)).read())
    random_policy(9).save_pretrained(first, max_shard_size="40KB")
    with pytest.raises(WeightsUnusable, match="is an adapter of other weights than those in"):
        compose_policy(tmp_path / "other", first, adapter.parent)
    assert not (tmp_path / "other").exists()


async def test_the_same_adapter_again_gives_the_same_manifest_and_leaves_the_file(first: Path, tmp_path: Path) -> None:
    one = await published(tmp_path / "policies", first, 1, seed=1)
    file = Path(one.folder) / ADAPTER_FILE
    inode = file.stat().st_ino
    assert await published(tmp_path / "policies", first, 1, seed=1) == one
    assert file.stat().st_ino == inode
    assert one.base == manifest_of(first)
    assert file.stat().st_mode & 0o044 == 0o044, "generation may run as another user"


async def test_the_folder_of_a_published_adapter_has_the_form_of_peft(first: Path, tmp_path: Path) -> None:
    manifest = await published(tmp_path / "policies", first, 1, seed=1)
    folder = Path(manifest.folder)
    config = json.loads((folder / ADAPTER_CONFIG_FILE).read_text())
    assert (config["peft_type"], config["task_type"], config["bias"]) == ("LORA", "CAUSAL_LM", "none")
    assert (config["r"], config["lora_alpha"]) == (RANK, 4.0)
    assert config["target_modules"] == ["down_proj", "k_proj", "q_proj"]
    assert config["base_model_name_or_path"] == str(first)
    tensors = load_file(folder / ADAPTER_FILE)
    start = "base_model.model.model.layers.1.self_attn.k_proj"
    assert tensors[f"{start}.lora_A.weight"].shape == (RANK, 32)
    assert tensors[f"{start}.lora_B.weight"].shape == (16, RANK)
    assert len(tensors) == 2 * 2 * 3, "two matrices of three layers in each of two blocks"


def test_an_adapter_and_its_base_are_part_of_the_manifest_and_of_its_digest() -> None:
    base = PolicyManifest(0, 0, "/first", (Shard("model.safetensors", "a" * 64, 8),))
    other = replace(base, shards=(Shard("model.safetensors", "b" * 64, 8),))
    adapter = PolicyManifest(5, 20, "/there", (Shard(ADAPTER_FILE, "c" * 64, 3),), base=base)
    assert MANIFEST.decode(MANIFEST.encode(adapter)) == adapter
    assert len({adapter.digest, replace(adapter, base=other).digest, replace(adapter, base=None).digest}) == 3
    delta = PolicyDelta(4, "d" * 64, (Shard("model.delta", "e" * 64, 1),))
    for wrong in ({"shards": (*base.shards, *adapter.shards)}, {"delta": delta}, {"base": adapter}):
        with pytest.raises(ValueError, match="policy version 5 must be one adapter of whole weights"):
            replace(adapter, **wrong)


def test_adapters_of_a_model_are_copied_when_they_are_staged() -> None:
    model = random_policy(0)
    add_adapters(model, config_of(Path("/"), "adapter").learner.lora, seed=7)
    staged = StagedPolicy.of_adapter(model, 1, 2)
    assert staged.adapter is not None
    before = {path: (a.clone(), b.clone()) for path, (a, b) in staged.adapter.matrices.items()}
    for parameter in model.parameters():
        parameter.data.add_(1.0)
    for path, (a, b) in staged.adapter.matrices.items():
        assert torch.equal(a, before[path][0])
        assert torch.equal(b, before[path][1])
    assert len(before) == 2 * 3
