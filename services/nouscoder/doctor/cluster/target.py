"""What the doctor asks of a cluster before an install, and the records of its answers."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from nouscoder.doctor.cluster.facts import Cluster

Document = Mapping[str, Any]


class Outcome(enum.Enum):
    """How a dry run ended."""

    ADMITTED = "admitted"
    # Admission or validation said no, or the API server does not know the kind.
    REFUSED = "refused"
    # This account has no right to make the object.
    MAY_NOT = "may not"
    # The API server could not decide: a webhook does not answer, or does not take part in dry runs.
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class DryRun:
    """The answer to a dry run. `document` is the object as the cluster would store it; {} when it was not admitted.

    `exists` means that an object of this name is there, so an install would change it.
    """

    outcome: Outcome
    message: str = ""
    warnings: tuple[str, ...] = ()
    exists: bool = False
    document: Document = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind that the API serves."""

    plural: str
    namespaced: bool


class Target(Cluster, Protocol):
    """A cluster into which a release is to be installed. Nothing here changes it."""

    def kinds(self) -> Mapping[str, Kind]:
        """Every kind that the API serves, by `apiVersion/kind`, such as apps/v1/Deployment."""
        ...

    def has_namespace(self, name: str) -> bool:
        """Whether the namespace exists."""
        ...

    def dry_run(self, document: Document, kind: Kind, namespace: str) -> DryRun:
        """Make or change the object, in a dry run by the server. A Pod is made anew with a name of its own."""
        ...

    def read(self, plural: str, namespace: str, name: str) -> Document | None:
        """An object of the core API (secrets, configmaps, ...); None when there is none."""
        ...

    def quotas(self, namespace: str) -> list[Document]:
        """The ResourceQuotas of a namespace."""
        ...
