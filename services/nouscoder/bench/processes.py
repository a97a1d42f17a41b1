"""CPU time and memory of a process and its descendants, from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds of a process and of its descendants (ended ones too), and the memory that they hold in total."""

    own_cpu_s: float
    children_cpu_s: float
    memory_bytes: int


def usage_of(pid: int, own_module: str = "") -> Usage:
    """The current usage. Processes that end while they are read count as ended before.

    With `own_module`, descendants that run that module count as the process itself.
    """
    below = descendants(pid)
    alike = [child for child in below if own_module and runs_module(child, own_module)]
    own = sum(_cpu_s(one, reaped=False) for one in (pid, *alike))
    return Usage(
        own_cpu_s=own,
        children_cpu_s=sum(_cpu_s(one, reaped=True) for one in (pid, *below)) - own,
        memory_bytes=sum(_proportional_bytes(one) for one in (pid, *below)),
    )


def stolen_s() -> float:
    """CPU seconds on all cores that the hypervisor gave to other machines since the start."""
    with Path("/proc/stat").open() as stat:
        fields = stat.readline().split()
    return int(fields[8]) / _TICKS


def peak_resident_bytes(pid: int) -> int:
    """The peak resident memory of a running process."""
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def descendants(pid: int) -> list[int]:
    """Every running descendant of `pid`."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        children = _children(waiting.pop())
        found += children
        waiting += children
    return found


def runs_module(pid: int, module: str) -> bool:
    """Whether a process was started as `python -m MODULE`, or has the name of the module as another argument."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return module.encode() in words


def _children(pid: int) -> list[int]:
    children: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += [int(child) for child in (task / "children").read_text().split()]
    except OSError:
        return children
    return children


def _cpu_s(pid: int, *, reaped: bool) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return sum(int(value) for value in fields[11 : 15 if reaped else 13]) / _TICKS


def _proportional_bytes(pid: int) -> int:
    """Memory where a page shared by n processes counts 1/n, so that the sum over a tree is its real memory."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0
