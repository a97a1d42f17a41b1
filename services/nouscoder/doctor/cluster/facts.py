"""What is known of a cluster, as plain records, and what anything that reads a cluster must offer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nouscoder.errors import NousCoderError


class ClusterError(NousCoderError):
    """The cluster did not answer, or not as expected; the message says what was asked."""


class NotAllowed(ClusterError):
    """The account may not ask that (RBAC): nothing is said of what there is."""


@dataclass(frozen=True, slots=True)
class StorageClass:
    """`access_modes`: those of volumes that the class has made so far, for the API tells no others."""

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
        """`other` fits into this."""
        return other.cpu_cores <= self.cpu_cores + 1e-9 and other.memory_bytes <= self.memory_bytes


@dataclass(frozen=True, slots=True)
class Node:
    """`open` is False where new pods do not go: unschedulable, not ready, or tainted NoSchedule or NoExecute."""

    name: str
    allocatable: Amount
    num_gpus: int
    open: bool


class Cluster(Protocol):
    """Reads a cluster. Each call ends within seconds; raises NotAllowed, or ClusterError."""

    def version(self) -> str:
        """Of the API server, such as v1.34.4."""
        ...

    def runtime_classes(self) -> dict[str, str]:
        """Handlers by the names of RuntimeClasses."""
        ...

    def storage_classes(self) -> list[StorageClass]:
        """All of them."""
        ...

    def nodes(self) -> list[Node]:
        """All of them."""
        ...

    def requested(self) -> dict[str, Amount]:
        """What pods that have not ended ask for, by node."""
        ...

    def has_crd(self, name: str) -> bool:
        """Whether there is a CustomResourceDefinition `plural.group`."""
        ...
