"""What each gateway process gets of the service's slots and bounds. Pure.

INVARIANT: the shares of a bound never add up to more than the bound, and the shares of the slots add up to all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nouscoder.config import ConfigError, VerifierSection

_LEAST_CACHE_BYTES = 1024**2


@dataclass(frozen=True, slots=True)
class Place:
    """Process `index` of `number`. `folder` holds what the processes of a service share."""

    index: int
    number: int
    folder: Path

    @property
    def metrics(self) -> Path:
        """The socket of this process's own metrics."""
        return self.folder / f"metrics-{self.index}"

    @property
    def merged_metrics(self) -> Path:
        """The socket of the metrics of all processes together."""
        return self.folder / "metrics"


def slots_of(index: int, number: int, num_slots: int) -> int:
    """The slots of process `index`. Raises ConfigError when there are fewer slots than processes."""
    if num_slots < number:
        raise ConfigError(
            f"verifier.processes: {number} processes need as many slots, and verifier.sandbox.slots gives {num_slots}"
        )
    return num_slots // number + (index < num_slots % number)


def section_of(section: VerifierSection, place: Place, num_slots: int, grpc: str) -> VerifierSection:
    """The configuration of one process. It listens on the service's address `grpc` and on no other."""
    number = place.number
    sandbox = {
        "slots": slots_of(place.index, number, num_slots),
        "compile_cache_bytes": section.sandbox.compile_cache_bytes // number,
    }
    tests = {"cache_bytes": max(_LEAST_CACHE_BYTES, section.tests.cache_bytes // number)}
    of_process = {
        "processes": 1,
        "grpc": grpc,
        "http": "",
        "metrics": "",
        "health": "",
        "grpc_health": "",
        "max_queue": section.max_queue // number,
        "max_bodies_bytes": section.max_bodies_bytes // number,
        "cache_entries": section.cache_entries // number,
        "sandbox": section.sandbox.model_copy(update=sandbox),
        "tests": section.tests.model_copy(update=tests),
    }
    return section.model_copy(update=of_process)
