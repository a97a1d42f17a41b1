"""The isolation of candidates on the kernel below: the host's Linux, or gVisor's sentry.

The zygote chooses one object by name, once. No other code depends on which one it is. Both give the same result: a
candidate has another user than init, no capabilities, its own fresh namespaces, and a read-only root with the system's
libraries and the interpreter. The differences in init are in init/.

INVARIANT: after `enter_root` the only reachable paths of the host are the read-only binds of the configuration. In
gVisor nothing else of the container can be reached: no file of the harness or of the kubelet.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from pathlib import Path
from typing import NamedTuple, Protocol

from . import kernel
from .frames import SlotSettings

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
# Folders that task packages name. Links into /tmp, the only place that a run may write to.
TASK_FOLDERS = ("app", "logs", "solution", "tests", "workspace")
_OLD = "/old"
_SEALED = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID
_NAMESPACES = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS


class Isolation(Protocol):
    """One object for the whole life of a slot."""

    two_users: bool  # init and candidates are different users
    copies_image: bool  # candidates get their memory at once (init_library.py): the kernel copies slowly at writes
    namespaces: int  # made fresh for every submission
    id_map: bytes | None  # of their users (user_namespaces(7)); None without a user namespace
    has_large_pages: bool  # the kernel may have large pages, which make forks cheaper
    last_pid: int  # a descriptor of the file that sets the next process id; -1 for none

    def enter(self) -> None:
        """Leave the host's file system for the read-only root. Called once in the zygote. Raises OSError."""
        ...


class LinuxIsolation:
    """Namespaces of the host's kernel, including a user namespace. init/init.c makes those of the network."""

    namespaces = kernel.CLONE_NEWUSER | kernel.CLONE_NEWCGROUP | _NAMESPACES & ~kernel.CLONE_NEWNET
    copies_image = False
    has_large_pages = True

    def __init__(self, settings: SlotSettings) -> None:
        self._settings = settings
        self.two_users = settings.uid_init is not None
        two = f"0 {settings.uid_init} 1\n1000 {settings.uid_candidate} 1"
        self.id_map: bytes | None = (two if self.two_users else "0 0 1").encode()
        self.last_pid = -1
        with contextlib.suppress(OSError):  # read-only in most containers; each init then opens that of its own /proc
            self.last_pid = kernel.move_up(os.open("/proc/sys/kernel/ns_last_pid", os.O_WRONLY | os.O_CLOEXEC))

    def enter(self) -> None:
        """Enter a mount namespace of the slot (and, if the service is not root, a user namespace), then the root."""
        if self.two_users:
            os.setgroups([])
            kernel.unshare(kernel.CLONE_NEWNS)
        else:
            uid, gid = os.getuid(), os.getgid()
            kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"0 {uid} 1")
            _write("/proc/self/gid_map", f"0 {gid} 1")
        kernel.unshare(kernel.CLONE_NEWNET)  # shared by sandboxes until a program makes a socket (init/init.c)
        kernel.bring_loopback_up()
        kernel.show_command("python3", "main.py")  # the real one has paths of the host
        enter_root((sys.base_prefix, *self._settings.site_packages, *self._settings.read_only))


class GvisorIsolation:
    """Isolation inside a gVisor sandbox. The sentry separates it from the host.

    The sentry has no hidepid (a candidate can see that init exists, but not its contents), no securebits (exec gives a
    candidate no privileges, because it cannot become user 0) and no O_TMPFILE.
    """

    two_users = True
    copies_image = True
    namespaces = _NAMESPACES
    id_map: bytes | None = None
    has_large_pages = False
    last_pid = -1

    def __init__(self, settings: SlotSettings) -> None:
        self._settings = settings

    def enter(self) -> None:
        """Enter a mount namespace of the slot, because other slots may run here before and after it, then the root.

        Without SYS_ADMIN, as in the chart's pods, it gets that right in a user namespace of its own.
        """
        if not kernel.has_capability(kernel.CAP_SYS_ADMIN):
            _enter_user_namespace()
        # Where the slot is the whole container, the sentry would end it with the last mount of its first root.
        kernel.move_up(os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC))
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.show_command("python3", "main.py")  # the real one has the settings
        enter_root_in_gvisor((sys.base_prefix, *self._settings.site_packages, *self._settings.read_only))


def _enter_user_namespace() -> None:
    """Move to a user namespace with the same two users, in which this process has every capability. A child writes the
    maps, because only a process outside may map more than one user. Raises OSError.
    """
    moved, go = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(OSError):
            os.close(go)
            if os.read(moved, 1):
                for name in ("uid_map", "gid_map"):
                    _write(f"/proc/{parent}/{name}", "0 0 1\n1000 1000 1")
                status = 0
        os._exit(status)
    os.close(moved)
    kernel.unshare(kernel.CLONE_NEWUSER)
    os.write(go, b"1")
    os.close(go)
    if os.waitpid(child, 0)[1]:
        raise OSError("the users of a user namespace cannot be mapped: add SYS_ADMIN, or SETUID, SETGID and SETFCAP")


def isolation_of(settings: SlotSettings) -> Isolation:
    """The isolation named in the settings. Raises ValueError for an unknown name."""
    match settings.kernel:
        case "linux":
            return LinuxIsolation(settings)
        case "gvisor":
            return GvisorIsolation(settings)
        case other:
            raise ValueError(f"unknown kernel {other!r}")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


class RootParts(NamedTuple):
    """What the root takes over from the one before. Opened before the staging mount can hide it."""

    folders: dict[str, int]  # descriptors by path, bound through /proc/self/fd
    links: dict[str, str]  # targets of links such as /bin
    copies: dict[str, bytes]

    @staticmethod
    def open(read_only: tuple[str, ...]) -> RootParts:
        """`read_only` are the folders beside the system's, including the interpreter's prefix. Raises OSError."""
        wanted = (*SYSTEM_PATHS, *settings_of_runtimes(), *outside_system(read_only))
        return RootParts(
            {p: os.open(p, os.O_PATH) for p in wanted if os.path.isdir(p) and not os.path.islink(p)},
            {p: os.readlink(p) for p in SYSTEM_PATHS if os.path.islink(p)},
            {p: Path(p).read_bytes() for p in COPIED if os.path.isfile(p)},
        )


def enter_root(read_only: tuple[str, ...]) -> None:
    """Build the root in this process's own mount namespace and make it `/`. Raises OSError naming the failed step.

    `read_only`: see `RootParts.open`.
    """
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    parts = RootParts.open(read_only)
    # Below these something else is mounted, which an overlay would not show.
    with open("/proc/self/mountinfo", encoding="utf8", errors="surrogateescape") as mounts:
        places = [line.split()[4] for line in mounts]
    crossed = {path for path in parts.folders if any(place.startswith(path + "/") for place in places)}
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
    # The mounts below are already sealed, and /proc must stay complete (see above).
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("none", "/", "", flags)


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


def outside_system(paths: tuple[str, ...]) -> list[str]:
    """The paths that are not inside the system's folders."""
    real = dict.fromkeys(os.path.realpath(p) for p in paths)
    return [p for p in real if not any(p == s or p.startswith(s + "/") for s in SYSTEM_PATHS)]


def settings_of_runtimes() -> list[str]:
    """The folders of /etc that a language runtime reads: Java's security settings, PHP's extensions such as ctype."""
    names = ("java*", "mono*", "R*", "php/*/cli", "php/*/mods-available")
    return [str(path) for name in names for path in Path("/etc").glob(name) if path.is_dir()]


def mount_staging() -> None:
    """Mount the file system that becomes the root."""
    kernel.mount("tmpfs", STAGING, "tmpfs", kernel.MS_NOSUID, "size=16m,nr_inodes=4096,mode=755")


def fill(parts: RootParts) -> None:
    """Make everything of the root at `STAGING` but the folders of `parts`."""
    root = Path(STAGING)
    for path, target in parts.links.items():
        (root / path.lstrip("/")).symlink_to(target)
    for folder in ("etc", "proc", "tmp", "dev", PROGRAM_FOLDER[1:]):
        (root / folder).mkdir(exist_ok=True)
    for folder in TASK_FOLDERS:
        with contextlib.suppress(FileExistsError):  # a read-only folder of the configuration is below it
            (root / folder).symlink_to(f"/tmp/{folder}")
    for name, text in WRITTEN.items():
        (root / name).write_text(text)
    for name, content in parts.copies.items():
        (root / name.lstrip("/")).write_bytes(content)
    _make_devices(f"{STAGING}/dev")
    # The kernel lets a user namespace mount its own proc only if a complete one is visible. A sandbox mounts its own
    # over this one.
    kernel.mount("/proc", f"{STAGING}/proc", "", kernel.MS_BIND | kernel.MS_REC)


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


def enter_root_in_gvisor(read_only: tuple[str, ...]) -> None:
    """The same as `enter_root`, made with the calls that the sentry has. Raises OSError naming the failed step.

    The sentry has no mount_setattr. In a user namespace it lets nobody unmount what the container had mounted before,
    such as /sys and /etc/resolv.conf; they go with the whole old root.
    """
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    parts = RootParts.open(read_only)
    mount_staging()
    for path, fd in parts.folders.items():
        target = STAGING + path
        os.makedirs(target, mode=0o755, exist_ok=True)
        kernel.mount(f"/proc/self/fd/{fd}", target, "", kernel.MS_BIND | kernel.MS_REC)
        kernel.mount("none", target, "", _SEALED | kernel.MS_NODEV)
        os.close(fd)
    fill(parts)
    os.mkdir(STAGING + _OLD)
    kernel.pivot_root(STAGING, STAGING + _OLD)
    os.chdir("/")
    kernel.unmount(_OLD)
    os.rmdir(_OLD)
    for place in ("/dev", "/"):
        kernel.mount("none", place, "", _SEALED)
