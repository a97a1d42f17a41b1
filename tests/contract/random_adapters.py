"""Random adapters of a policy folder, in the form in which the learner publishes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nouscoder.domain.policy import PolicyManifest
from nouscoder.policy_folder.compose import compose_policy
from nouscoder.policy_folder.policy_tensors import Adapter
from nouscoder.policy_folder.weights_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    policy_files,
    shards_of,
    weights_files,
)

RANK, ALPHA = 3, 4.0
TARGETS = ("q_proj", "k_proj", "down_proj")


def manifest_of(first: Path) -> PolicyManifest:
    """The manifest of the first policy."""
    return PolicyManifest(0, 0, str(first), shards_of(first))


def random_adapter(first: Path, seed: int, targets: Iterable[str] = TARGETS) -> Adapter:
    """An adapter of all layers of these names, which changes their outputs clearly."""
    chance = torch.Generator().manual_seed(seed)
    matrices = {}
    for file in weights_files(first):
        with safe_open(file, framework="pt") as shard:
            for name in sorted(shard.keys()):
                path = name.removesuffix(".weight")
                if path.rpartition(".")[2] in targets:
                    num_out, num_in = shard.get_slice(name).get_shape()
                    a, b = torch.randn(RANK, num_in, generator=chance), torch.randn(num_out, RANK, generator=chance)
                    matrices[path] = (0.3 * a, 0.3 * b)
    return Adapter(ALPHA, matrices, manifest_of(first).digest)


def write_adapter(folder: Path, adapter: Adapter) -> Path:
    """Write the folder of an adapter. Returns it."""
    folder.mkdir(parents=True)
    save_file(adapter.tensors, folder / ADAPTER_FILE, adapter.metadata)
    (folder / ADAPTER_CONFIG_FILE).write_text(adapter.config("the first policy"))
    return folder


def adapted(folder: Path, first: Path, seed: int) -> tuple[tuple[Path, ...], Path]:
    """The files of a random adapter's policy, and a Hugging Face folder with the same weights merged."""
    adapter = write_adapter(folder / "adapter", random_adapter(first, seed))
    compose_policy(folder / "merged", first, adapter)
    return policy_files(adapter, first), folder / "merged"


def metadata_of(file: Path) -> dict[str, str]:
    """The metadata of a safetensors file."""
    with safe_open(file, framework="pt") as stored:
        return dict(stored.metadata())
