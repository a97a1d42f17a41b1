"""The recorded answers of a cluster that the tests of the doctor share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from nouscoder.doctor.cluster.client import Amount, Cluster, Document, Node, NotAllowed, StorageClass

GIB = 1024**3


def amount(cores: float, memory_bytes: float, devices: Mapping[str, int] | None = None) -> Amount:
    return Amount({"cpu": round(1000 * cores), "memory": int(memory_bytes), **(devices or {})})


@dataclass(kw_only=True)
class RecordedCluster(Cluster):
    """What a cluster of one node says of itself. `refuses` names the calls that the account may not make."""

    storage: list[StorageClass] = field(
        default_factory=lambda: [StorageClass("local-path", "rancher.io/local-path", True)]
    )
    node_list: list[Node] = field(default_factory=lambda: [Node("node1", amount(8, 64 * GIB), True)])
    runtime: dict[str, str] = field(default_factory=lambda: {"gvisor": "runsc"})
    refuses: frozenset[str] = frozenset()
    answers: Callable[[Document], Document] = lambda pod: pod
    tried: list[Document] = field(default_factory=list)
    there: dict[str, Document] = field(default_factory=dict)  # stored objects, by name
    lists: dict[str, list[Document]] = field(default_factory=dict)  # what `objects` answers, by the kind in the path

    def ask(self, what: str) -> None:
        """Raise NotAllowed when the account may not make this call."""
        if what in self.refuses:
            raise NotAllowed(f"this account may not {what}")

    def version(self) -> str:
        self.ask("version")
        return "v1.34.4"

    def runtime_classes(self) -> dict[str, str]:
        self.ask("runtime_classes")
        return self.runtime

    def storage_classes(self) -> list[StorageClass]:
        self.ask("storage_classes")
        return self.storage

    def nodes(self) -> list[Node]:
        self.ask("nodes")
        return self.node_list

    def requested(self, besides: str) -> dict[str, Amount]:
        self.ask("requested")
        assert besides
        return {"node1": amount(0.1, GIB)}

    def objects(self, path: str, **selector: str) -> list[Document]:
        return self.lists[path.rpartition("/")[2]]

    def stored(self, document: Document) -> Document | None:
        return self.there.get(document["metadata"]["name"])

    def dry_run(self, pod: Document, namespace: str) -> Document:
        self.ask("dry_run")
        self.tried.append(pod)
        return self.answers(pod)
