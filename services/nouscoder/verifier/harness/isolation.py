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

from . import gvisor_root, kernel, root
from .settings import SlotSettings

_NAMESPACES = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS


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
    """Isolation inside a gVisor sandbox. The sentry separates it from the host.

    The sentry has no hidepid (a candidate can see that init exists, but not its contents), no securebits (exec gives a
    candidate no privileges, because it cannot become user 0) and no O_TMPFILE.
    """

    two_users = True
    copies_image = True
    namespaces = _NAMESPACES
    id_map: bytes | None = None
    has_large_pages = False

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
        gvisor_root.enter_root((sys.base_prefix, *self._settings.site_packages, *self._settings.read_only))


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
