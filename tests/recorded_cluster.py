"""The recorded answers of a cluster that the tests of the doctor share."""

from __future__ import annotations

from dataclasses import dataclass, field

from nouscoder.doctor.cluster.facts import Amount, Node, NotAllowed, StorageClass


@dataclass(kw_only=True)
class RecordedFacts:
    """What a cluster of one node says of itself. `refuses` names the calls that the account may not make."""

    storage: list[StorageClass]
    node_list: list[Node]
    runtime: dict[str, str] = field(default_factory=lambda: {"gvisor": "runsc"})
    refuses: frozenset[str] = frozenset()

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

    def requested(self) -> dict[str, Amount]:
        self.ask("requested")
        return {"node1": Amount(0.1, 1024**3)}
