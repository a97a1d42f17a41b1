"""What a sandbox could leave behind on the host of the tests: mounts, cgroups, System V objects, files, descriptors.

Other tests of the same process give things back at any time, so only what is new counts as left behind.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.host_mounts import host_mounts

_FOLDERS = ("/", "/tmp", "/dev/shm", "/var/tmp", "/run")
_FIRST_CANDIDATE_USER = 1_000_000_000


@dataclass(frozen=True, slots=True)
class HostState:
    """State of the host that no submission may add to."""

    mounts: Counter[str]
    cgroups: frozenset[str]  # of this process's sandboxes
    objects: Counter[str]  # System V shared memory, semaphores, message queues
    strange_files: frozenset[str]  # files of users that only sandboxes use
    descriptors: tuple[str, ...]  # what each open descriptor of this process refers to

    @staticmethod
    def now() -> HostState:
        """The current state."""
        own = f"nouscoder-{os.getpid()}-"
        cgroups = frozenset(folder for folder, _, _ in os.walk("/sys/fs/cgroup") if own in folder)
        objects: Counter[str] = Counter()
        for kind in ("shm", "sem", "msg"):
            objects[kind] = len(Path(f"/proc/sysvipc/{kind}").read_text().split("\n"))
        return HostState(Counter(host_mounts()), cgroups, objects, _strange_files(), _descriptors())

    def left_since(self, before: HostState) -> list[str]:
        """What is here and was not there before."""
        left = [f"mount {line}" for line in (self.mounts - before.mounts).elements()]
        left += [f"cgroup {folder}" for folder in sorted(self.cgroups - before.cgroups)]
        left += [f"System V object: {kind}" for kind in (self.objects - before.objects).elements()]
        left += [f"file {path}" for path in sorted(self.strange_files - before.strange_files)]
        if (more := len(self.descriptors) - len(before.descriptors)) > 0:
            new = Counter(self.descriptors) - Counter(before.descriptors)
            left.append(f"{more} more open descriptors; new: {sorted(new.elements())}")
        return left


def _strange_files() -> frozenset[str]:
    found = set()
    for folder in _FOLDERS:
        for entry in os.scandir(folder) if os.path.isdir(folder) else ():
            try:
                if entry.stat(follow_symlinks=False).st_uid >= _FIRST_CANDIDATE_USER:
                    found.add(entry.path)
            except FileNotFoundError:
                continue
    return frozenset(found)


def _descriptors() -> tuple[str, ...]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # the one that lists the folder
            continue
    return tuple(sorted(found))
