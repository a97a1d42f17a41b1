"""What the kernel below gives to keep candidates apart: the Linux of the host, or gVisor's sentry.

The zygote picks one object by name, once; everybody else asks it and never which one it is. Both end with the same
promise: a candidate is another user than init, without capabilities, alone in fresh namespaces. What init itself does
differently is in init/.
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
    """One for the whole life of a slot."""

    two_users: bool  # init and candidates are different users
    namespaces: int  # made fresh for every submission

    def enter(self) -> None:
        """In the zygote, once: leave everything of the host but the read-only root. Raises OSError."""
        ...

    def admit(self, pid: int) -> None:
        """In the zygote: give the fresh namespaces of `pid` their users."""
        ...


class LinuxIsolation:
    """Namespaces of the host's kernel, a user namespace among them."""

    namespaces = kernel.CLONE_NEWUSER | _NAMESPACES

    def __init__(self, settings: SlotSettings) -> None:
        self._settings = settings
        self.two_users = settings.uid_init is not None

    def enter(self) -> None:
        """Into a mount namespace of the slot's own (and, without the host's root, a user namespace), then the root."""
        if self.two_users:
            os.setgroups([])
            kernel.unshare(kernel.CLONE_NEWNS)
        else:
            uid, gid = os.getuid(), os.getgid()
            kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"0 {uid} 1")
            _write("/proc/self/gid_map", f"0 {gid} 1")
        root.enter_root((sys.base_prefix, *self._settings.site_packages, *self._settings.read_only))

    def admit(self, pid: int) -> None:
        """Write the id maps."""
        two = f"0 {self._settings.uid_init} 1\n1000 {self._settings.uid_candidate} 1"
        lines = two if self.two_users else "0 0 1"
        _write(f"/proc/{pid}/setgroups", "deny")
        _write(f"/proc/{pid}/uid_map", lines)
        _write(f"/proc/{pid}/gid_map", lines)


class GvisorIsolation:
    """Inside a gVisor sandbox, whose root is already the read-only one; the sentry is the wall to the host.

    The sentry has no hidepid (a candidate sees that init is there, not what it holds), no securebits (exec gives a
    candidate nothing: it is not user 0 and cannot become it) and no O_TMPFILE.
    """

    two_users = True
    namespaces = _NAMESPACES

    def __init__(self, settings: SlotSettings) -> None:
        self._init_folder = os.path.dirname(settings.init_library)

    def enter(self) -> None:
        """Take away what the sentry, or the pod, gives every sandbox and candidates must not have, and the harness (it
        is loaded). /dev/shm would otherwise outlive the tests: as with Linux it becomes the test's own /tmp.

        A mount namespace of its own, for others may run here before and after it; /dev they share.
        """
        kernel.unshare(kernel.CLONE_NEWNS)
        for place in (*_NOT_FOR_CANDIDATES, os.path.dirname(os.path.abspath(__file__)), self._init_folder):
            with contextlib.suppress(OSError):
                kernel.unmount(place)
        if not os.path.islink("/dev/shm"):
            with contextlib.suppress(OSError):
                kernel.unmount("/dev/shm")
            os.rmdir("/dev/shm")
            os.symlink("/tmp", "/dev/shm")
        for name in ("ptmx", "tty", "fuse", "net/tun", "termination-log"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"/dev/{name}")

    def admit(self, pid: int) -> None:
        """Nothing: users are the sandbox's own."""


def isolation_of(settings: SlotSettings) -> Isolation:
    """By the name in the settings. Raises ValueError for one that is none."""
    match settings.kernel:
        case "linux":
            return LinuxIsolation(settings)
        case "gvisor":
            return GvisorIsolation(settings)
        case other:
            raise ValueError(f"no kernel is called {other!r}")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
