"""Records of the facts about a cluster, and the protocol of what reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    """CPU in cores, memory in bytes, and devices: the number by extended resource, such as nvidia.com/gpu."""

    cpu_cores: float
    memory_bytes: int
    devices: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: Amount) -> Amount:
        return self._with(other, 1)

    def __sub__(self, other: Amount) -> Amount:
        return self._with(other, -1)

    def _with(self, other: Amount, sign: int) -> Amount:
        names = {**self.devices, **other.devices}
        devices = {name: self.devices.get(name, 0) + sign * other.devices.get(name, 0) for name in names}
        return Amount(self.cpu_cores + sign * other.cpu_cores, self.memory_bytes + sign * other.memory_bytes, devices)

    def at_least(self, other: Amount) -> Amount:
        """The larger of both, resource by resource."""
        names = {**self.devices, **other.devices}
        devices = {name: max(self.devices.get(name, 0), other.devices.get(name, 0)) for name in names}
        return Amount(max(self.cpu_cores, other.cpu_cores), max(self.memory_bytes, other.memory_bytes), devices)

    def lacks(self, other: Amount) -> list[str]:
        """The resources of which this amount has less than `other`."""
        short = ["cpu"] if other.cpu_cores > self.cpu_cores + 1e-9 else []
        short += ["memory"] if other.memory_bytes > self.memory_bytes else []
        return short + [name for name, number in other.devices.items() if number > self.devices.get(name, 0)]

    def holds(self, other: Amount) -> bool:
        """Whether `other` fits into this amount."""
        return not self.lacks(other)

    def __str__(self) -> str:
        devices = "".join(f", {number} {name}" for name, number in sorted(self.devices.items()) if number)
        return f"{self.cpu_cores:.2f} cores, {self.memory_bytes / 1024**3:.2f} GiB{devices}"


@dataclass(frozen=True, slots=True)
class Taint:
    """A taint that keeps pods from a node (NoSchedule, NoExecute)."""

    key: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True)
class Node:
    """One node. `open` is False for nodes that are unschedulable or not ready."""

    name: str
    allocatable: Amount
    open: bool
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()


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
