"""The isolation of candidates on the kernel below: the host's Linux, or gVisor's sentry.

The zygote chooses one object by name, once. No other code depends on which one it is. Both give the same result: a
candidate has another user than init, no capabilities, and its own fresh namespaces. The differences in init are in
init/.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Protocol

from . import kernel, root
from .settings import SlotSettings

_NAMESPACES = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS

_OF_A_POD = ("/dev/mqueue", "/dev/termination-log", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf")
_NOT_FOR_CANDIDATES = ("/sys", "/dev/pts", *_OF_A_POD)


class Isolation(Protocol):
    """One object for the whole life of a slot."""

    two_users: bool  # init and candidates are different users
    copies_image: bool  # candidates get their memory at once (image.py), because the kernel copies slowly at writes
    namespaces: int  # made fresh for every submission
    id_map: bytes | None  # of their users (user_namespaces(7)); None without a user namespace
    has_large_pages: bool  # the kernel may have large pages, which make forks cheaper

    def enter(self) -> None:
        """Leave the host's file system for the read-only root. Called once in the zygote. Raises OSError."""
        ...


class LinuxIsolation:
    """Namespaces of the host's kernel, including a user namespace. init/network.c makes those of the network."""

    namespaces = kernel.CLONE_NEWUSER | kernel.CLONE_NEWCGROUP | _NAMESPACES & ~kernel.CLONE_NEWNET
    copies_image = False
    has_large_pages = True

    def __init__(self, settings: SlotSettings) -> None:
        self._settings = settings
        self.two_users = settings.uid_init is not None
        two = f"0 {settings.uid_init} 1\n1000 {settings.uid_candidate} 1"
        self.id_map: bytes | None = (two if self.two_users else "0 0 1").encode()

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
        kernel.unshare(kernel.CLONE_NEWNET)  # shared by sandboxes until a program makes a socket (init/network.c)
        kernel.bring_loopback_up()
        kernel.show_command("python3", "main.py")  # the real one has paths of the host
        root.enter_root((sys.base_prefix, *self._settings.site_packages, *self._settings.read_only))


class GvisorIsolation:
    """Isolation inside a gVisor sandbox, whose root is already read-only. The sentry separates it from the host.

    The sentry has no hidepid (a candidate can see that init exists, but not its contents), no securebits (exec gives a
    candidate no privileges, because it cannot become user 0) and no O_TMPFILE.
    """

    two_users = True
    copies_image = True
    namespaces = _NAMESPACES
    id_map: bytes | None = None
    has_large_pages = False

    def __init__(self, settings: SlotSettings) -> None:
        self._init_folder = os.path.dirname(settings.init_library)

    def enter(self) -> None:
        """Remove mounts and devices that the sentry or the pod provides and candidates must not have, and hide the
        folders of the harness, which is already loaded. /dev/shm would outlive a test, so it becomes a link to the
        test's /tmp.

        The slot has its own mount namespace, because other slots may run here before and after it. They share /dev.
        Without SYS_ADMIN it gets that right in a user namespace of its own.
        """
        if not kernel.has_capability(kernel.CAP_SYS_ADMIN):
            _enter_user_namespace()
        kernel.unshare(kernel.CLONE_NEWNS)
        for place in _NOT_FOR_CANDIDATES:
            with contextlib.suppress(OSError):
                kernel.unmount(place)
        for place in (os.path.dirname(os.path.abspath(__file__)), self._init_folder):
            _hide(place)
        if not os.path.islink("/dev/shm"):
            with contextlib.suppress(OSError):
                kernel.unmount("/dev/shm")
            os.rmdir("/dev/shm")
            os.symlink("/tmp", "/dev/shm")
        for name in ("ptmx", "tty", "fuse", "net/tun", "termination-log"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"/dev/{name}")


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


def _hide(folder: str) -> None:
    """Show an empty folder in its place. Without its mount, gVisor's root would show the same files once more."""
    with contextlib.suppress(OSError):
        kernel.mount("none", folder, "tmpfs", kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
