"""Published policies: policies/00000007/ holds the complete weights as safetensors files, with their digests.

Beside them it may hold deltas (policy_folder/delta.py): what changed since the version before. Then all ranks write the
files of a version together (by_ranks.py). With adapters it holds only an adapter of the run's first policy
(policy_folder/policy_tensors.py).

INVARIANT: a published file never changes while its version is among the newest `keep`. Publishing the same weights as
the same version again gives a manifest of the same digest.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save, save_file
from torch import Tensor
from transformers import PreTrainedModel

from nouscoder.atomic_files import prune, sha256_of, whole_folder
from nouscoder.domain.policy import PolicyDelta, PolicyManifest, Shard, Transport
from nouscoder.learner.model.weights import adapter_weights, weights_of
from nouscoder.learner.parallel.ranks import Ranks
from nouscoder.learner.publication.by_ranks import VersionByRanks
from nouscoder.policy_folder.delta import DeltaUnusable, write_delta
from nouscoder.policy_folder.identity import tokenizer_digests, weights_digest
from nouscoder.policy_folder.policy_tensors import Adapter, PolicyTensors, as_stored, unread_names
from nouscoder.policy_folder.weights_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
    shards_of,
    weights_files,
)

log = logging.getLogger(__name__)

_NO_LIMIT = 2**63

_OWN: Mapping[str, torch.dtype] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StagedPolicy:
    """A copy of the weights of a version, after `step` optimizer steps. Training does not change it.

    With `adapter` there are no `weights`: they are those of the first policy, changed by it. With `by_ranks` there are
    none either: each rank has its own.
    """

    policy_version: int
    step: int
    weights: dict[str, Tensor]
    adapter: Adapter | None = None
    by_ranks: VersionByRanks | None = None

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        policy_version: int,
        step: int,
        dtypes: Mapping[str, torch.dtype] = _OWN,
        first: Path | None = None,
    ) -> StagedPolicy:
        """Copy the current weights of the model, each rounded to its type in `dtypes`, or in the model's own type.

        What the model does not read of the folder `first` is added as it is there: a vision tower, heads for later
        tokens. So what is written is as whole as the first policy.
        """
        copy = model.device.type == "cpu"  # on another device `weights_of` has copied them already
        weights = {
            name: tensor.to(dtypes.get(name, tensor.dtype), copy=copy).contiguous()
            for name, tensor in as_stored(model, weights_of(model), dtypes).items()
        }
        if first is not None and (unread := unread_names(model, dtypes, weights)):
            weights |= dict(PolicyTensors(weights_files(first)).read(unread))
        return cls(policy_version, step, weights)

    @classmethod
    def of_adapter(cls, model: PreTrainedModel, policy_version: int, step: int) -> StagedPolicy:
        """Copy the current adapter of the model, in float32."""
        return cls(policy_version, step, {}, adapter_weights(model))


@dataclass(slots=True)
class PolicyPublisher:
    """The folder policies/. Old versions are kept for some time, because a generation worker may still read one.

    With `deltas` each version has also what changed since the one before, if this process wrote that. `first` is the
    folder of the first policy, the base of all adapters, and has the tokenizer.
    """

    folder: Path
    keep: int
    transport: Transport = Transport.FOLDER
    shard_bytes: int = _NO_LIMIT
    deltas: bool = field(default=False, kw_only=True)
    first: Path | None = field(default=None, kw_only=True)
    _tokenizer: tuple[str, ...] = field(default=(), init=False)
    _base: PolicyManifest | None = field(default=None, init=False)  # that of `first`, once it was needed
    _before: PolicyManifest | None = field(default=None, init=False)  # the newest that this process has written

    def write(self, policy: StagedPolicy) -> PolicyManifest:
        """Write a version and remove the oldest. Raises StorageError, and WeightsMissing for the base of an adapter."""
        final = version_folder(self.folder, policy.policy_version)
        if policy.adapter is not None:
            return self._write_adapter(final, policy, policy.adapter)
        if policy.by_ranks is not None:
            return self._write_by_ranks(final, policy, policy.by_ranks)
        parts = _cut(policy.weights, self.shard_bytes)
        delta = None
        # After a crash the same version is often published again. Workers may be reading its files, so they stay.
        if not all(_is_written(final / name, weights) for name, weights in parts.items()):
            with whole_folder(final) as part:
                for name, weights in parts.items():
                    save_file(weights, part / name)
                if len(parts) > 1:
                    total = sum(tensor.nbytes for weights in parts.values() for tensor in weights.values())
                    places = {tensor: name for name, weights in parts.items() for tensor in weights}
                    index = {"metadata": {"total_size": total}, "weight_map": places}
                    (part / INDEX_FILE).write_text(json.dumps(index, indent=1))
                delta = self._write_delta(part, policy.policy_version, tuple(parts))
        self._before = manifest = self._manifest(final, policy, parts, delta)
        return self._identified(manifest, final)

    def _manifest(
        self,
        final: Path,
        policy: StagedPolicy,
        names: Iterable[str],
        delta: PolicyDelta | None = None,
        base: PolicyManifest | None = None,
    ) -> PolicyManifest:
        """That of a version whose files are written; removes the oldest versions."""
        prune(self.folder, self.keep)
        shards = tuple(_shard(final / name) for name in names)
        version, step = policy.policy_version, policy.step
        return PolicyManifest(version, step, str(final), shards, self.transport, delta, base=base)

    def begin_by_ranks(
        self, policy_version: int, ranks: Ranks, fits: Callable[[Sequence[Path]], bool]
    ) -> VersionByRanks | None:
        """Begin a version that all ranks write. None when rank 0 must write it, from gathered weights.

        It must when no delta is wanted, when this process has not written the version before, when that has other
        tensors than the model, and when the version is there already: workers may be reading it. Raises StorageError.
        """
        before, final = self._before, version_folder(self.folder, policy_version)
        if not self.deltas or before is None or before.policy_version + 1 != policy_version or final.exists():
            return None
        files = [Path(before.folder) / shard.name for shard in before.shards]
        is_possible = all(file.is_file() for file in files) and fits(files)
        return VersionByRanks(final, files, ranks) if is_possible else None

    def _write_by_ranks(self, final: Path, policy: StagedPolicy, version: VersionByRanks) -> PolicyManifest:
        before = self._before
        assert before is not None, "begin_by_ranks needs it"
        deltas = tuple(_shard(final / name) for name in version.finish())
        delta = PolicyDelta(before.policy_version, before.digest, deltas)
        names = [file.name for file in version.before]
        self._before = manifest = self._manifest(final, policy, names, delta)
        return self._identified(manifest, final)

    def _write_adapter(self, final: Path, policy: StagedPolicy, adapter: Adapter) -> PolicyManifest:
        # Its files are read once, because they do not change during a run.
        if self._base is None:
            assert self.first is not None, "a publisher of adapters knows the first policy"
            self._base = PolicyManifest(0, 0, str(self.first), shards_of(self.first), self.transport)
        base = self._base
        adapter = replace(adapter, base_digest=base.digest)
        file, data = final / ADAPTER_FILE, save(adapter.tensors, adapter.metadata)
        if not file.exists() or file.read_bytes() != data:
            with whole_folder(final) as part:
                (part / ADAPTER_FILE).write_bytes(data)
                (part / ADAPTER_CONFIG_FILE).write_text(adapter.config(base.folder), encoding="utf8")
        return self._identified(self._manifest(final, policy, [ADAPTER_FILE], base=base), Path(base.folder))

    def _identified(self, manifest: PolicyManifest, whole: Path) -> PolicyManifest:
        """The manifest with the digests that generation compares. `whole` has the weights, of an adapter its base's.

        A published file of version 0 has what the model has in memory, so its digest is that of the tensors in use.
        """
        if self.first is None:
            return manifest
        weights = "" if manifest.policy_version else weights_digest(weights_files(whole))
        self._tokenizer = self._tokenizer or tokenizer_digests(self.first)  # it does not change during a run
        return replace(manifest, weights=weights, tokenizer=self._tokenizer)

    def _write_delta(self, folder: Path, policy_version: int, names: tuple[str, ...]) -> PolicyDelta | None:
        """Write what changed since the version before. None, and no file, when that version has not the same files."""
        before = self._before
        if not self.deltas or before is None or before.policy_version + 1 != policy_version:
            return None
        deltas = [folder / name.replace(".safetensors", ".delta") for name in names]
        try:
            for name, delta in zip(names, deltas, strict=True):
                write_delta(Path(before.folder) / name, folder / name, delta)
        except (DeltaUnusable, FileNotFoundError) as error:
            log.warning("a policy has no delta", extra={"policy_version": policy_version, "reason": str(error)})
            for delta in deltas:
                delta.unlink(missing_ok=True)
            return None
        return PolicyDelta(before.policy_version, before.digest, tuple(map(_shard, deltas)))


def _shard(file: Path) -> Shard:
    return Shard(file.name, sha256_of(file), file.stat().st_size)


def version_folder(folder: Path, policy_version: int) -> Path:
    """The folder of a version's weights in the folder policies/."""
    return folder / f"{policy_version:08d}"


def _cut(weights: dict[str, Tensor], shard_bytes: int) -> dict[str, dict[str, Tensor]]:
    """The tensors of each file, by file name, in order. Only a file of a single tensor may exceed `shard_bytes`."""
    parts: list[dict[str, Tensor]] = [{}]
    num_bytes = 0
    for name, tensor in weights.items():
        if parts[-1] and num_bytes + tensor.nbytes > shard_bytes:
            parts.append({})
            num_bytes = 0
        parts[-1][name] = tensor
        num_bytes += tensor.nbytes
    if len(parts) == 1:
        return {WEIGHTS_FILE: parts[0]}
    # The names that Hugging Face folders use.
    return {f"model-{k:05d}-of-{len(parts):05d}.safetensors": part for k, part in enumerate(parts, 1)}


def _is_written(file: Path, weights: dict[str, Tensor]) -> bool:
    return file.exists() and sha256_of(file) == hashlib.sha256(save(weights)).hexdigest()
