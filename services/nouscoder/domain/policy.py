"""A published policy: its version, the files with its weights, their transport, and what they change."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum

_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\.(safetensors|delta)")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Transport(StrEnum):
    """How a sampler gets the shards. FOLDER: it reads `folder`. LEARNER: it fetches each shard from the learner."""

    FOLDER = "folder"
    LEARNER = "learner"


class WeightTransfer(StrEnum):
    """How the workers of a vllm engine get the weights.

    FILES: they read the shards. GLOO, NCCL, IPC: the learner sends the bytes of the shards from its memory: over TCP
    between CPUs, over NCCL between GPUs, or on one machine through memory that both map, that of a GPU when they have
    the same one. The shards remain the way out when that fails.
    """

    FILES = "files"
    GLOO = "gloo"
    NCCL = "nccl"
    IPC = "ipc"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the `num_ranks` processes of a transfer meet. Rank 0 is the learner, which has a store there.

    It sends the shards of a policy, or with `changes` only the files of its delta.
    """

    host: str
    port: int
    num_ranks: int
    transfer: WeightTransfer
    changes: bool = False


@dataclass(frozen=True, slots=True)
class Shard:
    """A safetensors file, or a delta of one. Raises ValueError for a name or a digest that none of them has."""

    name: str
    sha256: str
    num_bytes: int

    def __post_init__(self) -> None:
        if not _SHARD_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name[:100]!r} is not the name of a safetensors file or a delta")
        if not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"{self.name}: a SHA-256 has 64 hexadecimal digits")


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """A file of the first policy's folder, as the learner has it."""

    name: str
    sha256: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PolicyDelta:
    """What changes the weights of version `base_version`, of digest `base_digest`, into those of its successor.

    `files` has one delta for each shard, in their order.
    """

    base_version: int
    base_digest: str
    files: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class PolicyManifest:
    """One published set of weights, after `step` optimizer steps. The first version is 0; each set adds 1.

    `folder` is the folder of the shards on the disk of their writer. The shards hold every tensor. With `delta` they
    can also be made from those of an earlier version. With `base`, which is the first policy, the only shard is instead
    an adapter (policy_folder/policy_tensors.py) of the weights of `base`.

    `weights` and `tokenizer` say with which policy its maker works (policy_folder/identity.py): `weights` is the digest
    of the tensors of version 0, "" for later versions, and `tokenizer` those of the tokenizer's files. Generation
    compares them with its own; what is empty is not compared.

    Raises ValueError on construction when there is no shard, a name occurs twice, the delta has another number of
    files, or an adapter has several shards, a delta, or a base that is itself an adapter.
    """

    policy_version: int
    step: int
    folder: str
    shards: tuple[Shard, ...]
    transport: Transport = Transport.FOLDER
    delta: PolicyDelta | None = None
    base: PolicyManifest | None = None
    weights: str = ""
    tokenizer: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.shards:
            raise ValueError(f"the manifest of policy version {self.policy_version} names no shard")
        if len({shard.name for shard in self.shards}) != len(self.shards):
            raise ValueError(f"the manifest of policy version {self.policy_version} names a shard twice")
        if self.delta is not None and len(self.delta.files) != len(self.shards):
            raise ValueError(f"the delta of policy version {self.policy_version} has not one file for each shard")
        if self.base is not None and (len(self.shards) != 1 or self.delta is not None or self.base.base is not None):
            raise ValueError(f"policy version {self.policy_version} must be one adapter of whole weights")

    @property
    def num_bytes(self) -> int:
        """The total size of the shards, without the base of an adapter."""
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def digest(self) -> str:
        """Identifies the weights, hexadecimal: equal for equal shards and base, in any folder, with any delta."""
        lines = [f"{shard.sha256} {shard.num_bytes} {shard.name}" for shard in self.shards]
        lines += [] if self.base is None else [f"adapter of {self.base.digest}"]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()
