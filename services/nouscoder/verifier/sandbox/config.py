"""Which isolation to open, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The runner pods of backend gvisor. Raises ValueError naming the first field that makes no sense."""

    managed: bool = True  # the gateway makes them; else they are found by the name of their service
    template: str = ""  # managed: file with the pod, as JSON
    service: str = ""  # not managed: name of the headless service
    port: int = 7070
    key_file: str = ""  # what gateway and runners know each other by
    spares: int = 1  # managed: runners beyond the slots, proven and waiting
    start_s: float = 240.0  # until the first runner is there

    def __post_init__(self) -> None:
        """See the class."""
        if self.spares < 0:
            raise ValueError(f"pool_spares must not be negative, not {self.spares}")
        if not self.start_s > 0:
            raise ValueError(f"pool_start_s must be positive, not {self.start_s!r}")


@dataclass(frozen=True, slots=True)
class SandboxConfig:
    """Choice of backend and its size. Raises ValueError naming the first field that makes no sense."""

    backend: str = "local"
    slots: int = 0  # submissions at once; 0 takes the number of cores this process may use
    python: str = ""  # interpreter of candidates; empty takes this one's base interpreter, without its packages
    site_packages: tuple[Path, ...] = ()  # extra read-only import folders for candidates
    preload: tuple[str, ...] = field(default=())  # modules of those folders to import once, before any candidate
    tmp_bytes: int = 256 * 1024**2  # size of a candidate's /tmp
    start_limit_s: float = 30.0  # until a slot answers
    compile_time_s: float = 30.0  # CPU and wall time of a compiler, once a submission; python has 10 s
    grace_s: float = 10.0  # beyond a test's wall limit, until the slot itself counts as lost
    runsc: str = ""  # gVisor's program; empty looks on PATH and where deploy/build-runsc puts it
    max_sessions: int = 500  # submissions that one gVisor sandbox serves before a fresh one takes its place
    pool: PoolConfig = PoolConfig()

    def __post_init__(self) -> None:
        """See the class."""
        if self.max_sessions < 1:
            raise ValueError(f"max_sessions must be positive, not {self.max_sessions}")
        if self.slots < 0:
            raise ValueError(f"slots must not be negative, not {self.slots}")
        for name in ("tmp_bytes", "start_limit_s", "compile_time_s", "grace_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)!r}")
        for folder in self.site_packages:
            if not folder.is_dir():
                raise ValueError(f"site_packages: {folder} is not a folder")
