"""Deltas of published policies, beside the whole ones: size and time at several learning rates.

A policy is trained and published as bfloat16 after each batch of steps. Its float32 masters are random, so they lie
anywhere between two bfloat16 values, as in a run that has lasted a while.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nouscoder.atomic_files import sha256_of
from nouscoder.bench.errors import BenchError
from nouscoder.domain.batch import Batch
from nouscoder.domain.policy import PolicyManifest
from nouscoder.learner.publication.published import PolicyPublisher, StagedPolicy
from nouscoder.learner.trainer import Trainer
from nouscoder.policy_folder.delta import apply_delta, write_delta


@dataclass(frozen=True, slots=True)
class DeltaFigures:
    """The last version. write_s, apply_s: to make the delta and to apply it; full_s: to write the whole policy."""

    learning_rate: float
    full_bytes: int
    delta_bytes: int
    full_s: float
    write_s: float
    apply_s: float


def measure_delta(trainer: Trainer, batches: Sequence[Batch], learning_rate: float) -> DeltaFigures:
    """Publish after each batch, and measure the last delta. Raises BenchError when it does not give the policy."""
    with tempfile.TemporaryDirectory(prefix="nouscoder-bench-") as name:
        publisher = PolicyPublisher(Path(name) / "policies", keep=2, deltas=True)
        before = newest = publisher.write(_staged(trainer, 0))
        for version, batch in enumerate(batches, 1):
            trainer.train_batch(batch)
            before, newest = newest, publisher.write(_staged(trainer, version))
        staged = _staged(trainer, len(batches))
        alone = PolicyPublisher(Path(name) / "alone", keep=2)
        started = time.perf_counter()
        alone.write(staged)
        full_s = time.perf_counter() - started
        return _applied(before, newest, Path(name), learning_rate, full_s)


def _staged(trainer: Trainer, version: int) -> StagedPolicy:
    names = [name for name, _ in trainer.model.named_parameters()]
    return StagedPolicy.of(trainer.model, version, trainer.step, dict.fromkeys(names, torch.bfloat16))


def _applied(
    before: PolicyManifest, newest: PolicyManifest, folder: Path, learning_rate: float, full_s: float
) -> DeltaFigures:
    (shard,) = newest.shards
    base, file = Path(before.folder) / shard.name, Path(newest.folder) / shard.name
    started = time.perf_counter()
    write_delta(base, file, folder / "delta")
    written = time.perf_counter()
    apply_delta(base, folder / "delta", folder / "made")
    applied = time.perf_counter()
    if sha256_of(folder / "made") != shard.sha256:
        raise BenchError("a policy made from its delta differs from the published one")
    size = (folder / "delta").stat().st_size
    return DeltaFigures(learning_rate, shard.num_bytes, size, full_s, written - started, applied - written)
