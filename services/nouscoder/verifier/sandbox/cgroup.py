"""Control groups of the slots, version 1 or 2, and one for work that must keep nobody waiting.

Those of the slots bound the total memory and number of processes of a slot, count its CPU time, and give each slot the
same share of the CPUs, however many processes it has.

INVARIANT: a group that `Groups` made exists until its own `remove`, and no longer after it. Groups of a service that
was killed are removed when the next one starts.

If this process may not make groups, there are none, and only the harness (sampling and rlimits) bounds a run. A group
also finds what the harness cannot measure: shared mappings, the buffers of sockets, and the CPU time of processes that
nobody waited for. Moving a process to a group is slow, so a group is that of a slot, not of a run: what the slot itself
holds is measured before the first run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_PREFIX = "nouscoder-"
_numbers = itertools.count()  # of the sandboxes of this process, which share no group
_REMOVE_LIMIT_S = 2.0
_V1_FILES = {
    "memory": ("memory.limit_in_bytes", "memory.oom_control"),
    "pids": ("pids.max", ""),
    "cpuacct": ("", ""),
    "cpu": ("", ""),  # every group has the same shares by default
}
# The memory that the kernel cannot take back, so without the cache of files on disks. The unit is bytes.
_V1_HELD = re.compile(rb"^(?:total_rss|total_shmem) (\d+)$", re.MULTILINE)
_V2_HELD = re.compile(rb"^(?:anon|shmem|kernel|sock) (\d+)$", re.MULTILINE)
_V2_CPU_US = re.compile(rb"^usage_usec (\d+)$", re.MULTILINE)
_V2_FILES = {"memory": ("memory.max", "memory.events"), "pids": ("pids.max", "")}


@dataclass(frozen=True, slots=True)
class Controller:
    """One resource: the parent folder of the groups, the file of the limit, and the file that counts kills."""

    name: str
    folder: Path
    limit_file: str
    events_file: str


class SlotGroup:
    """The group of one slot, in every controller found."""

    def __init__(self, controllers: tuple[Controller, ...], name: str) -> None:
        self._folders = {c.name: c.folder / name for c in controllers}
        self._controllers = controllers
        self._set: dict[str, int] = {}
        self._limit_files: dict[str, int] = {}
        for folder in set(self._folders.values()):
            folder.mkdir(exist_ok=True)
        events = [self._folders[c.name] / c.events_file for c in controllers if c.events_file]
        self._events = os.open(events[0], os.O_RDONLY | os.O_CLOEXEC) if events else -1
        found = list(self._folders.values())
        self._cpu_v1, self._cpu_v2 = _opened(found, "cpuacct.usage"), _opened(found, "cpu.stat")
        self._memory, self._kernel_v1 = _opened(found, "memory.stat"), _opened(found, "memory.kmem.usage_in_bytes")

    @property
    def procs_files(self) -> tuple[str, ...]:
        """The files to which the harness writes 0 before its first fork, so that it and all its processes are here.

        The service could do that only after it has started the harness, which on a busy machine has forked by then.
        """
        return tuple(sorted({str(folder / "cgroup.procs") for folder in self._folders.values()}))

    def limit(self, **limits: int) -> None:
        """Set changed limits by controller (memory in bytes, pids). A limit that the kernel refuses is not changed."""
        for controller in self._controllers:
            wanted = limits.get(controller.name)
            if wanted is None or self._set.get(controller.name) == wanted:
                continue
            with contextlib.suppress(OSError):
                os.pwrite(self._limit_file(controller), str(wanted).encode(), 0)
                self._set[controller.name] = wanted

    def _limit_file(self, controller: Controller) -> int:
        """A descriptor that stays open, because limits change with every submission. Raises OSError."""
        found = self._limit_files.get(controller.name)
        if found is None:
            path = self._folders[controller.name] / controller.limit_file
            found = self._limit_files[controller.name] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
        return found

    def widen(self, **limits: int) -> None:
        """Set only the limits that are higher than the current ones."""
        self.limit(**{name: value for name, value in limits.items() if value > self._set.get(name, 0)})

    def num_killed(self) -> int:
        """The number of processes in this group that the kernel has killed for lack of memory."""
        if self._events < 0:
            return 0
        words = os.pread(self._events, 4096, 0).split()
        return int(words[words.index(b"oom_kill") + 1])

    def cpu_s(self) -> float:
        """The CPU time that all processes of this group have used; 0 when it is not counted."""
        if self._cpu_v1 >= 0:
            return 1e-9 * int(os.pread(self._cpu_v1, 4096, 0))
        return 1e-6 * _sum_of(self._cpu_v2, _V2_CPU_US)

    def held_bytes(self) -> int:
        """The memory of this group that the kernel cannot take back; 0 when it is not counted."""
        if self._kernel_v1 >= 0:
            return _sum_of(self._memory, _V1_HELD) + int(os.pread(self._kernel_v1, 4096, 0))
        return _sum_of(self._memory, _V2_HELD)

    def remove(self) -> None:
        """Remove the group. Waits up to 2 s for its processes to end. Never raises."""
        for fd in (self._events, self._cpu_v1, self._cpu_v2, self._memory, self._kernel_v1):
            if fd >= 0:
                os.close(fd)
        while self._limit_files:
            os.close(self._limit_files.popitem()[1])
        self._events = self._cpu_v1 = self._cpu_v2 = self._memory = self._kernel_v1 = -1
        _remove(*set(self._folders.values()))


def _opened(folders: list[Path], name: str) -> int:
    """A descriptor of the file of that name in one of the folders; -1 if there is none."""
    found = next((folder / name for folder in folders if (folder / name).is_file()), None)
    return -1 if found is None else os.open(found, os.O_RDONLY | os.O_CLOEXEC)


def _sum_of(fd: int, values: re.Pattern[bytes]) -> int:
    """The sum of these values of a file with a name and a number in each line. 0 without a file."""
    return 0 if fd < 0 else sum(map(int, values.findall(os.pread(fd, 1 << 14, 0))))


UNGROUPED = SlotGroup((), "")


@dataclass(frozen=True, slots=True)
class IdleGroup:
    """A group whose processes use a CPU only while nobody else does, and give it up at once (cpu.idle).

    A process moves to it by writing its pid to the file `procs`, and back to the service's own group by `own`.
    """

    folder: Path
    procs: str
    own: str

    def remove(self) -> None:
        """Remove the group. Waits up to 2 s for its processes to end. Never raises."""
        _remove(self.folder)


class Groups:
    """Makes the slots' groups. `names` are the usable controllers."""

    def __init__(self, root: Path = ROOT, own: str | None = None) -> None:
        """`own` is the text of /proc/self/cgroup."""
        with contextlib.suppress(OSError):
            own = Path("/proc/self/cgroup").read_text() if own is None else own
        found = _version_1(root, own or "") or _version_2(root, own or "")
        self._controllers = tuple(c for c in found if _usable(c.folder))
        self.names = tuple(c.name for c in self._controllers)
        self._prefix = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        for controller in self._controllers:
            # Remove the groups of services that have ended.
            for group in controller.folder.glob(f"{_PREFIX}*-*"):
                pid = group.name.removeprefix(_PREFIX).partition("-")[0]
                if pid.isdigit() and not Path(f"/proc/{pid}").exists():
                    _removed(group)

    def make(self, index: int) -> SlotGroup:
        """The group of slot `index`."""
        return SlotGroup(self._controllers, f"{self._prefix}.{index}")

    def make_idle(self) -> IdleGroup | None:
        """A group for work that must keep nobody waiting. None where the kernel or its rights offer none."""
        for parent in sorted({c.folder for c in self._controllers if c.name in ("cpu", "memory")}):
            folder = parent / f"{self._prefix}.idle"
            home = next(at for at in (parent / f"{_PREFIX}service", parent) if at.is_dir())
            try:
                folder.mkdir()
                with open(folder / "cpu.idle", "r+") as file:  # not there in the folder of version 1's memory
                    file.write("1")
            except OSError:
                _removed(folder)
            else:
                return IdleGroup(folder, str(folder / "cgroup.procs"), str(home / "cgroup.procs"))
        return None


def _version_1(root: Path, own: str) -> list[Controller]:
    """Version 1: one hierarchy per controller, at the path of this process's own group."""
    found = []
    for line in own.splitlines():
        _, names, path = line.split(":", 2)
        for name in set(names.split(",")) & _V1_FILES.keys():
            mounted = next((m for m in (root / name, root / names) if m.is_dir()), None)
            if mounted is not None:
                at = mounted / path.lstrip("/")
                found.append(Controller(name, at if at.is_dir() else mounted, *_V1_FILES[name]))
    return found


def _version_2(root: Path, own: str) -> list[Controller]:
    """Version 2: this process's own group, if it is delegated and the process can move to a child group.

    The move is needed because a group that contains processes cannot have limited children.
    """
    path = next((line[3:] for line in own.splitlines() if line.startswith("0::")), None)
    if path is None or not (root / "cgroup.controllers").is_file():
        return []
    at = root / path.lstrip("/")
    at = at if at.is_dir() else root
    if at.name == f"{_PREFIX}service":  # a process of this service has made it, and this one was started there
        at = at.parent
    with contextlib.suppress(OSError):
        if not {"memory", "pids"} <= set((at / "cgroup.subtree_control").read_text().split()):
            leaf = at / f"{_PREFIX}service"
            leaf.mkdir(exist_ok=True)
            (leaf / "cgroup.procs").write_text(str(os.getpid()))
            with contextlib.suppress(OSError):
                (at / "cgroup.subtree_control").write_text("+cpu")
            (at / "cgroup.subtree_control").write_text("+memory +pids")
        return [Controller(name, at, *files) for name, files in _V2_FILES.items()]
    return []


def _usable(folder: Path) -> bool:
    probe = folder / f"{_PREFIX}{os.getpid()}-probe"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def _remove(*folders: Path) -> None:
    end = time.monotonic() + _REMOVE_LIMIT_S
    for folder in folders:
        while not _removed(folder) and time.monotonic() < end:
            time.sleep(0.005)


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
