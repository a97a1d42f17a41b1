"""Adapters as published policies, beside whole ones: their size, and the time to publish one and to load it.

The learner trains in float32, and weights are stored as bfloat16. Whole weights have the adapter merged into them. The
engine loads each form in place of an earlier version of it, so it has the base of the adapter already.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from nouscoder.bench.errors import BenchError
from nouscoder.domain.batch import Batch
from nouscoder.domain.policy import PolicyManifest
from nouscoder.generation.engines.torch import ModelWeights
from nouscoder.learner.publish import PolicyPublisher, StagedPolicy
from nouscoder.learner.trainer import Trainer
from nouscoder.policy_folder.policy_tensors import PolicyTensors
from nouscoder.policy_folder.weights_files import policy_files

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class AdapterFigures:
    """One version as an adapter and whole: bytes, and seconds to publish it and to load it."""

    rank: int
    adapter_bytes: int
    full_bytes: int
    publish_s: float
    full_publish_s: float
    load_s: float
    full_load_s: float


def measure_adapter(trainer: Trainer, engine: PreTrainedModel, batch: Batch, rank: int) -> AdapterFigures:
    """Publish the policy before and after training on the batch, and load it into the model of an engine.

    `trainer` has adapters of this rank. Raises BenchError when the two forms have different weights.
    """
    with torch.no_grad():
        for weight in trainer.model.parameters():
            if not weight.requires_grad:
                weight.copy_(weight.to(torch.bfloat16))  # as a learner loads them
    with tempfile.TemporaryDirectory(prefix="nouscoder-bench-") as name:
        first = Path(PolicyPublisher(Path(name) / "first", keep=1).write(_whole(trainer, 0)).folder)
        whole, adapters = (PolicyPublisher(Path(name) / kind, keep=2, first=first) for kind in ("whole", "adapters"))
        before = [whole.write(_whole(trainer, 0)), adapters.write(_adapter(trainer, 0))]
        trainer.train_batch(batch)
        full_publish_s, full = _timed(lambda: whole.write(_whole(trainer, 1)))
        publish_s, adapter = _timed(lambda: adapters.write(_adapter(trainer, 1)))
        _refuse_difference(_tensors(full, first), _tensors(adapter, first))
        full_load_s, load_s = (
            _load_s(engine, _files(old, first), _files(new, first))
            for old, new in zip(before, (full, adapter), strict=True)
        )
        return AdapterFigures(rank, adapter.num_bytes, full.num_bytes, publish_s, full_publish_s, load_s, full_load_s)


def _whole(trainer: Trainer, version: int) -> StagedPolicy:
    names = [name for name, _ in trainer.model.named_parameters()]
    return StagedPolicy.of(trainer.model, version, trainer.step, dict.fromkeys(names, torch.bfloat16))


def _adapter(trainer: Trainer, version: int) -> StagedPolicy:
    return StagedPolicy.of_adapter(trainer.model, version, trainer.step)


def _files(manifest: PolicyManifest, first: Path) -> tuple[Path, ...]:
    return policy_files(Path(manifest.folder), first)


def _tensors(manifest: PolicyManifest, first: Path) -> dict[str, torch.Tensor]:
    return dict(PolicyTensors(_files(manifest, first)).read())


def _load_s(engine: PreTrainedModel, old: Sequence[Path], new: Sequence[Path]) -> float:
    """Seconds to load the files `new` in place of `old`."""
    weights = ModelWeights(engine)
    weights.load(old, "the version before")
    return _timed(partial(weights.load, new, "the new version"))[0]


def _timed(work: Callable[[], Answer]) -> tuple[float, Answer]:
    started = time.perf_counter()
    answer = work()
    return time.perf_counter() - started, answer


def _refuse_difference(full: dict[str, torch.Tensor], adapter: dict[str, torch.Tensor]) -> None:
    """Both are rounded to bfloat16 after the same sum, so they differ by one unit at most, and hardly anywhere."""
    for name, tensor in full.items():
        if not torch.allclose(adapter[name].float(), tensor.float(), rtol=2**-7, atol=0):
            raise BenchError(f"{name} of the adapter's policy differs from that of the whole policy")
