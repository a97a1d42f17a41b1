"""Records of the facts about a cluster, and the protocol of what reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nouscoder.errors import NousCoderError


class ClusterError(NousCoderError):
    """The cluster did not answer, or not as expected. The message names the request."""


class NotAllowed(ClusterError):
    """RBAC does not allow the account this request, so the fact is unknown."""


@dataclass(frozen=True, slots=True)
class StorageClass:
    """One storage class. `access_modes` are those of its existing volumes, because the API reports no others."""

    name: str
    provisioner: str
    is_default: bool
    access_modes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Amount:
    """CPU in cores and memory in bytes."""

    cpu_cores: float
    memory_bytes: int

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.cpu_cores + other.cpu_cores, self.memory_bytes + other.memory_bytes)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.cpu_cores - other.cpu_cores, self.memory_bytes - other.memory_bytes)

    def holds(self, other: Amount) -> bool:
        """Whether `other` fits into this amount."""
        return other.cpu_cores <= self.cpu_cores + 1e-9 and other.memory_bytes <= self.memory_bytes


@dataclass(frozen=True, slots=True)
class Node:
    """One node. `open` is False for nodes that are unschedulable, not ready, or tainted NoSchedule or NoExecute."""

    name: str
    allocatable: Amount
    num_gpus: int
    open: bool


class Cluster(Protocol):
    """Reads a cluster. Each call takes at most some seconds and raises NotAllowed or ClusterError."""

    def version(self) -> str:
        """The version of the API server, such as v1.34.4."""
        ...

    def runtime_classes(self) -> dict[str, str]:
        """The handler of each RuntimeClass, by its name."""
        ...

    def storage_classes(self) -> list[StorageClass]:
        """All storage classes."""
        ...

    def nodes(self) -> list[Node]:
        """All nodes."""
        ...

    def requested(self) -> dict[str, Amount]:
        """The total requests of pods that have not ended, by node."""
        ...

    def has_resource(self, name: str) -> bool:
        """Whether the API has the resource `plural.group` in the preferred version of its group."""
        ...
