"""What every bench needs: its error, and the CPU time and memory of a process and its descendants."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from nouscoder.errors import NousCoderError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class BenchError(NousCoderError):
    """The bench could not run, or an answer under load was wrong. The message says which."""


def as_record(result: DataclassInstance) -> dict[str, Any]:
    """The figures for scripts: the fields of a result, and the properties of its class."""
    properties = [name for name, value in vars(type(result)).items() if isinstance(value, property)]
    return {**asdict(result), **{name: getattr(result, name) for name in properties}}


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds of a process and of its descendants (ended ones too), and the memory that they hold in total.

    A page of memory that n processes share counts 1/n for each.
    """

    own_cpu_s: float
    children_cpu_s: float
    memory_bytes: int


def usage_of(pid: int, own_module: str = "") -> Usage:
    """The current usage. Processes that end while they are read count as ended before.

    With `own_module`, descendants that run that module count as the process itself.
    """
    own_s = all_s = 0.0
    memory_bytes = 0
    for process in _tree(pid):
        try:
            times, command = process.cpu_times(), process.cmdline()
            memory_bytes += process.memory_full_info().pss
        except psutil.Error:
            continue
        spent_s = times.user + times.system
        all_s += spent_s + times.children_user + times.children_system
        if process.pid == pid or (own_module and own_module in command):
            own_s += spent_s
    return Usage(own_s, all_s - own_s, memory_bytes)


def descendants(pid: int) -> list[int]:
    """Every running descendant of `pid`."""
    return [process.pid for process in _tree(pid)[1:]]


def stolen_s() -> float:
    """CPU seconds on all cores that the hypervisor gave to other machines since the start."""
    return float(psutil.cpu_times().steal)


def peak_resident_bytes(pid: int) -> int:
    """The peak resident memory of a running process."""
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def _tree(pid: int) -> list[psutil.Process]:
    """The process and its descendants; nothing when it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def free_addresses(count: int) -> list[str]:
    """Addresses on this machine on which no process listened just before."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{free.getsockname()[1]}" for free in sockets]
