"""The settings of backend modal: what a container is, what it costs, and what all containers may cost."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

_MIB_A_GIB = 1024
_LONGEST_LIFE_S = 86_400.0  # of a Modal sandbox


class ContainerFor(StrEnum):
    """What one container serves before another one takes its place."""

    POOL = "pool"  # any submissions, `max_sessions` of them
    PROBLEM = "problem"  # submissions of one problem_id, one after the other
    SUBMISSION = "submission"  # one submission with all its tests
    TEST = "test"  # one test: each run of a program is in a container of its own


@dataclass(frozen=True, slots=True)
class ModalConfig:
    """The containers of backend modal. Raises ValueError naming the first invalid field."""

    app: str = "nouscoder-grading"
    image: str = ""  # reference of the pushed sandbox image
    dockerfile: str = ""  # without `image`: the Dockerfile that Modal builds; its context is the working directory
    registry_secret: str = ""  # name of a Modal Secret with the credentials of the image's registry
    runtime: str = "gvisor"  # or vm
    container_for: ContainerFor = ContainerFor.POOL
    cores: float = 1.0  # physical cores; requested, and at the same time the limit
    memory_mib: int = 2048
    regions: tuple[str, ...] = ()
    lifetime_s: float = 3600.0
    idle_s: float = 600.0  # Modal ends a container that has had no connection for so long
    start_s: float = 120.0  # from the request until the agent answers
    max_containers: int = 16
    creations_per_minute: int = 60
    dollars_per_minute: float = 0.1
    dollars: float = 10.0  # in one life of the service
    dollars_per_core_s: float = 0.00003942
    dollars_per_gib_s: float = 0.00000672

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for name in (
            "cores",
            "memory_mib",
            "lifetime_s",
            "idle_s",
            "start_s",
            "max_containers",
            "creations_per_minute",
            "dollars_per_minute",
            "dollars",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"modal.{name} must be positive, not {getattr(self, name)!r}")
        if self.lifetime_s > _LONGEST_LIFE_S:
            raise ValueError(f"modal.lifetime_s must be at most {_LONGEST_LIFE_S:.0f}, not {self.lifetime_s!r}")
        if not (self.dollars_per_core_s >= 0 and self.dollars_per_gib_s >= 0):
            raise ValueError("modal.dollars_per_core_s and dollars_per_gib_s must not be negative")
        if self.runtime not in ("gvisor", "vm"):
            raise ValueError(f"modal.runtime must be gvisor or vm, not {self.runtime!r}")

    @property
    def dollars_a_second(self) -> float:
        """The most that one container can cost a second, because its request is also its limit."""
        return self.cores * self.dollars_per_core_s + self.memory_mib / _MIB_A_GIB * self.dollars_per_gib_s
