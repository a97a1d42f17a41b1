"""The read-only root of a slot's candidates: the system's libraries and the interpreter, and nothing else.

INVARIANT: after `enter_root` the only reachable paths of the host are the read-only binds of the configuration.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import NamedTuple

from . import kernel

PROGRAM_FOLDER = "/program"  # where a submission's compiled program is mounted
STAGING = "/tmp"  # where the root is built
SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives")
COPIED = ("/etc/ld.so.cache", "/etc/localtime")
_DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9)}
WRITTEN = {
    "etc/passwd": "root:x:0:0::/:/usr/sbin/nologin\ncandidate:x:1000:1000::/tmp:/bin/sh\n",
    "etc/group": "root:x:0:\ncandidate:x:1000:\n",
    "etc/hosts": "127.0.0.1 localhost\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


class Parts(NamedTuple):
    """What the root takes over from the one before. Opened before the staging mount can hide it."""

    folders: dict[str, int]  # descriptors by path, bound through /proc/self/fd
    links: dict[str, str]  # targets of links such as /bin
    copies: dict[str, bytes]

    @staticmethod
    def open(read_only: tuple[str, ...]) -> Parts:
        """`read_only` are the folders beside the system's, including the interpreter's prefix. Raises OSError."""
        wanted = (*SYSTEM_PATHS, *settings_of_runtimes(), *outside_system(read_only))
        return Parts(
            {p: os.open(p, os.O_PATH) for p in wanted if os.path.isdir(p) and not os.path.islink(p)},
            {p: os.readlink(p) for p in SYSTEM_PATHS if os.path.islink(p)},
            {p: Path(p).read_bytes() for p in COPIED if os.path.isfile(p)},
        )


def enter_root(read_only: tuple[str, ...]) -> None:
    """Build the root in this process's own mount namespace and make it `/`. Raises OSError naming the failed step.

    `read_only`: see `Parts.open`.
    """
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    parts = Parts.open(read_only)
    crossed = _with_mounts_below(list(parts.folders))
    staging = STAGING
    mount_staging()
    os.mkdir(f"{staging}/dev")
    empty = os.open(f"{staging}/dev", os.O_PATH)  # stays empty below the mount of /dev
    for path, fd in parts.folders.items():
        target = staging + path
        os.makedirs(target, mode=0o755, exist_ok=True)
        _show(fd, target, empty if path not in crossed else None)
        kernel.seal_mount(target)
        os.close(fd)
    os.close(empty)
    fill(parts)
    os.chdir(staging)
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")
    kernel.seal_mount("/dev", devices=True)
    _seal_root()


def _show(fd: int, target: str, empty: int | None) -> None:
    """Show the folder `fd` at `target`, as an overlay with the folder `empty`, or as a bind.

    The files of an overlay have inodes of their own, so that a lock on one does not hold for the host, and the list of
    mounts does not name the host's folder. Where the kernel has no overlay, or not over this file system, it is a bind.
    `empty` must not be removed: the overlay's own folder would list nothing.
    """
    folder = f"/proc/self/fd/{fd}"
    if empty is not None:
        with contextlib.suppress(OSError):
            kernel.mount("overlay", target, "overlay", kernel.MS_RDONLY, f"lowerdir={folder}:/proc/self/fd/{empty}")
            return
    kernel.mount(folder, target, "", kernel.MS_BIND | kernel.MS_REC)


def _with_mounts_below(paths: list[str]) -> set[str]:
    """Those of the paths below which something else is mounted, which an overlay would not show."""
    with open("/proc/self/mountinfo", encoding="utf8", errors="surrogateescape") as mounts:
        places = [line.split()[4] for line in mounts]
    return {path for path in paths if any(place.startswith(path + "/") for place in places)}


def outside_system(paths: tuple[str, ...]) -> list[str]:
    """The paths that are not inside the system's folders."""
    real = dict.fromkeys(os.path.realpath(p) for p in paths)
    return [p for p in real if not any(p == s or p.startswith(s + "/") for s in SYSTEM_PATHS)]


def settings_of_runtimes() -> list[str]:
    """The folders of /etc that a language runtime reads (Debian's Java keeps its security settings there)."""
    names = ("java", "mono", "R")
    return [entry.path for entry in os.scandir("/etc") if entry.name.startswith(names) and entry.is_dir()]


def mount_staging() -> None:
    """Mount the file system that becomes the root."""
    kernel.mount("tmpfs", STAGING, "tmpfs", kernel.MS_NOSUID, "size=16m,nr_inodes=4096,mode=755")


def fill(parts: Parts) -> None:
    """Make everything of the root at `STAGING` but the folders of `parts`."""
    root = Path(STAGING)
    for path, target in parts.links.items():
        (root / path.lstrip("/")).symlink_to(target)
    for folder in ("etc", "proc", "tmp", "dev", PROGRAM_FOLDER[1:]):
        (root / folder).mkdir(exist_ok=True)
    for name, text in WRITTEN.items():
        (root / name).write_text(text)
    for name, content in parts.copies.items():
        (root / name.lstrip("/")).write_bytes(content)
    _make_devices(f"{STAGING}/dev")
    _bind_proc(f"{STAGING}/proc")


def _make_devices(folder: str) -> None:
    """Make a small /dev: device nodes if the service is root, else binds of the host's devices."""
    host = {name: os.open(f"/dev/{name}", os.O_PATH) for name in _DEVICES}
    kernel.mount("tmpfs", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NOEXEC, "size=64k,nr_inodes=64,mode=755")
    for name, (major, minor) in _DEVICES.items():
        path = f"{folder}/{name}"
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
            os.chmod(path, 0o666)
            os.close(os.open(path, os.O_RDONLY))
        except OSError:
            if os.path.exists(path):
                os.unlink(path)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
            kernel.mount(f"/proc/self/fd/{host[name]}", path, "", kernel.MS_BIND)
        os.close(host[name])
    for name, target in (("stdin", "0"), ("stdout", "1"), ("stderr", "2")):
        os.symlink(f"/proc/self/fd/{target}", f"{folder}/{name}")
    os.symlink("/proc/self/fd", f"{folder}/fd")
    os.symlink("/tmp", f"{folder}/shm")  # POSIX semaphores work and disappear with /tmp


def _bind_proc(folder: str) -> None:
    """Bind /proc. The kernel lets a user namespace mount its own proc only if a complete one is visible.

    A sandbox mounts its own proc over this one.
    """
    kernel.mount("/proc", folder, "", kernel.MS_BIND | kernel.MS_REC)


def _seal_root() -> None:
    """Make the root tmpfs read-only. The mounts below are already sealed, and /proc must stay complete (see above)."""
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("none", "/", "", flags)
