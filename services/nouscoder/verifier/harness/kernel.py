"""The Linux calls that the standard library of Python 3.11 lacks, as thin ctypes wrappers that raise OSError."""

from __future__ import annotations

import ctypes
import os
import platform
import signal

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38

# PyDLL keeps the interpreter lock: these calls are short, and a fork must not see it released.
_libc = ctypes.PyDLL(None, use_errno=True)
_fflush = _libc.fflush  # looked up before a program can take away what looking up needs
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_SYS_CLONE, _SYS_PIVOT_ROOT, _SYS_MOUNT_SETATTR = {
    "x86_64": (56, 155, 442),
    "aarch64": (220, 41, 442),
}.get(platform.machine(), (-1, -1, -1))

# Made once: a fresh fork pays a copied page for whatever it touches.
_CLONE_NUMBER, _SIGCHLD, _NO_STACK_OR_IDS = ctypes.c_long(_SYS_CLONE), int(signal.SIGCHLD), [ctypes.c_long(0)] * 4


def _check(returned: int, what: str) -> int:
    if returned < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return returned


def fork_into(namespaces: int) -> int:
    """Fork into new namespaces (CLONE_NEW* flags); the child is pid 1 of a new pid namespace.

    Neither glibc nor the interpreter is told of this fork, so the child must not call abort() or create threads;
    processes that it forks are whole again. The interpreter's own hooks would copy a hundred pages (0.4 ms): they
    take the locks of other threads, and there is one thread, which holds the interpreter lock before and after and
    keeps its identity. What is left of them for a program to notice is in `candidate.after_fork`.
    """
    pid = _syscall(_CLONE_NUMBER, ctypes.c_long(namespaces | _SIGCHLD), *_NO_STACK_OR_IDS)
    if pid < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"clone: {os.strerror(number)}")
    return pid  # type: ignore[no-any-return]


def unshare(namespaces: int) -> None:
    """Leave the given namespaces for new ones."""
    _check(_libc.unshare(namespaces), "unshare")


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    """Mount `source` at `target`; raises OSError naming both."""
    returned = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(returned, f"mount {kind or source} on {target}")


def unmount(target: str) -> None:
    """Detach what is mounted at `target` at once."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    """Swap the root of the mount namespace."""
    _check(_syscall(ctypes.c_long(_SYS_PIVOT_ROOT), new.encode(), old.encode()), "pivot_root")


def seal_mount(target: str, *, devices: bool = False) -> None:
    """Make a mount and all below it read-only and without set-uid; without device nodes unless `devices`."""
    attributes = _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | (0 if devices else _MOUNT_ATTR_NODEV)
    argument = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    returned = _syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_long(_AT_FDCWD),
        target.encode(),
        ctypes.c_ulong(_AT_RECURSIVE),
        argument,
        ctypes.c_size_t(ctypes.sizeof(argument)),
    )
    _check(int(returned), f"mount_setattr {target}")


def _prctl(option: int, value: int, pointer: object = None) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), pointer, ctypes.c_ulong(0), ctypes.c_ulong(0)), f"prctl {option}")


def forbid_new_privileges() -> None:
    """No exec can gain privileges from now on."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


class _SockFprog(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def make_filter(instructions: bytes) -> _SockFprog:
    """Wrap classic BPF (8 bytes an instruction) for `install_filter`."""
    return _SockFprog(len(instructions) // 8, instructions)


def install_filter(program: _SockFprog) -> None:
    """Put this process and all it starts under a seccomp filter, for good."""
    _prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program))


def default_thread_stack(num_bytes: int) -> None:
    """Stack size of new threads, which glibc would otherwise take from RLIMIT_STACK at start."""
    attributes = ctypes.create_string_buffer(64)
    if _libc.pthread_getattr_default_np(attributes) == 0:
        _libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(num_bytes))
        _libc.pthread_setattr_default_np(attributes)


def flush_c_streams() -> None:
    """Write out what C code of this process left in stdio buffers."""
    _fflush(None)
