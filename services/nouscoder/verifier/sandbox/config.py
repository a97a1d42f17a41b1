"""The settings of a sandbox: backend, number of slots, limits, pool of runners."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from nouscoder.verifier.sandbox.modal_config import ModalConfig


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The runner pods of backend gvisor. Raises ValueError naming the first invalid field."""

    managed: bool = True  # the gateway makes the pods; otherwise it finds them by the name of their service
    template: str = ""  # managed: file with the pod as JSON
    service: str = ""  # not managed: name of the headless service
    port: int = 7070
    key_file: str = ""  # the shared key by which gateway and runners authenticate each other
    spares: int = 1  # managed: ready runners in addition to the slots
    least: int | None = None  # managed: slots that keep a runner while nothing waits; None: all
    idle_s: float = 120.0  # seconds of lower demand before runners are ended
    accept_unproven_kernel: bool = False  # lend runners whose kernel is not shown to be gVisor's
    start_s: float = 240.0  # time limit for the first runner

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.spares < 0:
            raise ValueError(f"pool_spares must not be negative, not {self.spares}")
        if self.least is not None and self.least < 0:
            raise ValueError(f"pool_min must not be negative, not {self.least}")
        if not self.idle_s > 0:
            raise ValueError(f"pool_idle_s must be positive, not {self.idle_s!r}")
        if not self.start_s > 0:
            raise ValueError(f"pool_start_s must be positive, not {self.start_s!r}")


@dataclass(frozen=True, slots=True)
class SpillOverConfig:
    """The backend for submissions that have waited too long for the first one. Raises ValueError."""

    backend: str = ""  # empty: none
    slots: int = 1
    after_s: float = 2.0

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.slots < 1 or not self.after_s >= 0:
            raise ValueError("spill_over.slots must be positive, and spill_over.after_s not negative")


@dataclass(frozen=True, slots=True)
class SandboxConfig:
    """The backend and its settings. Raises ValueError naming the first invalid field."""

    backend: str = "local"
    slots: int = 0  # submissions at once; 0 means the number of cores that this process may use
    python: str = ""  # interpreter of candidates; "" means the base interpreter of this process, without its packages
    site_packages: tuple[Path, ...] = ()  # extra read-only import folders for candidates
    preload: tuple[str, ...] = field(default=())  # modules of those folders to import before any candidate runs
    tmp_bytes: int = 256 * 1024**2  # size of a candidate's /tmp
    start_limit_s: float = 30.0  # time limit for the first answer of a slot
    compile_time_s: float = 30.0  # CPU and wall time of a compiler that has a CPU; Python has 10 s
    grace_s: float = 10.0  # time after a test's wall limit until the slot counts as lost
    runsc: str = ""  # gVisor's program; "" searches PATH and the target of deploy/build-runsc
    max_sessions: int = 500  # submissions after which a gVisor sandbox is replaced
    pool: PoolConfig = PoolConfig()
    modal: ModalConfig = ModalConfig()
    spill_over: SpillOverConfig = SpillOverConfig()
    tool_slots: int = 0  # further slots, for tool sessions
    compile_cache_bytes: int = 256 * 1024**2  # backend local: compiled programs on the disk; 0: none

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.max_sessions < 1:
            raise ValueError(f"max_sessions must be positive, not {self.max_sessions}")
        if self.slots < 0:
            raise ValueError(f"slots must not be negative, not {self.slots}")
        if self.compile_cache_bytes < 0:
            raise ValueError(f"compile_cache_bytes must not be negative, not {self.compile_cache_bytes}")
        if self.tool_slots < 0:
            raise ValueError(f"tool_slots must not be negative, not {self.tool_slots}")
        for name in ("tmp_bytes", "start_limit_s", "compile_time_s", "grace_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)!r}")
        if self.spill_over.backend == self.backend:
            raise ValueError(f"spill_over.backend must be another backend than {self.backend}")
        for folder in self.site_packages:
            if not folder.is_dir():
                raise ValueError(f"site_packages: {folder} is not a folder")
