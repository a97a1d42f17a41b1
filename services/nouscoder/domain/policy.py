"""A published policy: its version, the files with its weights, and their encoding and transport."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum

_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Encoding(StrEnum):
    """The contents of the shards. FULL: every tensor of the policy."""

    FULL = "full"


class Transport(StrEnum):
    """How a sampler gets the shards. FOLDER: it reads `folder`. LEARNER: it fetches each shard from the learner."""

    FOLDER = "folder"
    LEARNER = "learner"


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file. Raises ValueError when the name is not a plain file name or the digest is malformed."""

    name: str
    sha256: str
    num_bytes: int

    def __post_init__(self) -> None:
        if not _SHARD_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name[:100]!r} is not the name of a safetensors file")
        if not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"{self.name}: a SHA-256 has 64 hexadecimal digits")


@dataclass(frozen=True, slots=True)
class PolicyManifest:
    """One published set of weights, after `step` optimizer steps. The first version is 0; each set adds 1.

    `folder` is the folder of the shards on the disk of their writer. `base_version` is the version that an encoding
    needs; FULL has none. Raises ValueError on construction when there is no shard or a name occurs twice.
    """

    policy_version: int
    step: int
    folder: str
    shards: tuple[Shard, ...]
    transport: Transport = Transport.FOLDER
    encoding: Encoding = Encoding.FULL
    base_version: int | None = None

    def __post_init__(self) -> None:
        if not self.shards:
            raise ValueError(f"the manifest of policy version {self.policy_version} names no shard")
        if len({shard.name for shard in self.shards}) != len(self.shards):
            raise ValueError(f"the manifest of policy version {self.policy_version} names a shard twice")
        if self.encoding is Encoding.FULL and self.base_version is not None:
            raise ValueError(f"policy version {self.policy_version} is encoded in full, so it has no base version")

    @property
    def num_bytes(self) -> int:
        """The total size of the shards."""
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def digest(self) -> str:
        """Identifies the weights, hexadecimal: equal for equal shards, encoding and base, in any folder."""
        lines = [f"{self.encoding} {self.base_version}"]
        lines += [f"{shard.sha256} {shard.num_bytes} {shard.name}" for shard in self.shards]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()
