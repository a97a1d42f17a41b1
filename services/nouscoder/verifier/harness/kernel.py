"""ctypes wrappers of the Linux calls that the standard library of Python 3.11 lacks. They raise OSError."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

CAP_SYS_ADMIN = 21
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

_AF_UNIX, _SOCK_DGRAM, _SIOCSIFFLAGS, _IFF_UP = 1, 2, 0x8914, 1
_M_TRIM_THRESHOLD = -1
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_FIRST_OWN_FD = 64

# PyDLL keeps the interpreter lock. The calls are short, and a fork must not happen while the lock is released.
_libc = ctypes.PyDLL(None, use_errno=True)
_fflush = _libc.fflush  # looked up now, because a program can break the lookup later
_syscall = _libc.syscall
_pwrite = _libc.pwrite
_pwrite.restype = ctypes.c_ssize_t
_syscall.restype = ctypes.c_long
_SYS_PIVOT_ROOT, _SYS_MOUNT_SETATTR = {
    "x86_64": (155, 442),
    "aarch64": (41, 442),
}.get(platform.machine(), (-1, -1))


def _check(returned: int, what: str) -> int:
    if returned < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return returned


def unshare(namespaces: int) -> None:
    """Move this process to new namespaces of these kinds."""
    _check(_libc.unshare(namespaces), "unshare")


def has_capability(number: int) -> bool:
    """Whether this process has the capability (CAP_*) in effect."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        effective = next(line.split()[1] for line in status if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> number & 1)


def bring_loopback_up() -> None:
    """Bring the loopback device of this network namespace up. If the kernel refuses, it stays down."""
    request = struct.pack("=16sH22x", b"lo", _IFF_UP)
    fd = _libc.socket(_AF_UNIX, _SOCK_DGRAM, 0)
    if fd >= 0:
        _libc.ioctl(fd, ctypes.c_ulong(_SIOCSIFFLAGS), request)
        os.close(fd)


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    """Mount `source` at `target`. Raises OSError that names the mount."""
    returned = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(returned, f"mount {kind or source} on {target}")


def unmount(target: str) -> None:
    """Detach the mount at `target` immediately."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    """Change the root of the mount namespace."""
    _check(_syscall(ctypes.c_long(_SYS_PIVOT_ROOT), new.encode(), old.encode()), "pivot_root")


def seal_mount(target: str, *, devices: bool = False) -> None:
    """Make a mount and all mounts below it read-only and nosuid, and nodev unless `devices`."""
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
    """Prevent every later exec from gaining privileges."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


class _SockFprog(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def make_filter(instructions: bytes) -> _SockFprog:
    """Wrap classic BPF (8 bytes per instruction) for `install_filter`."""
    return _SockFprog(len(instructions) // 8, instructions)


def install_filter(program: _SockFprog) -> None:
    """Install a seccomp filter for this process and its children. It cannot be removed."""
    _prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program))


def default_thread_stack(num_bytes: int) -> None:
    """Set the stack size of new threads. By default glibc uses RLIMIT_STACK at process start."""
    attributes = ctypes.create_string_buffer(64)
    if _libc.pthread_getattr_default_np(attributes) == 0:
        _libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(num_bytes))
        _libc.pthread_setattr_default_np(attributes)


def move_up(fd: int) -> int:
    """Move a descriptor to a number that no file of a run gets. -1 stays."""
    if fd < 0:
        return fd
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN_FD)
    os.close(fd)
    return moved


def fix_heap_end() -> None:
    """Return the free end of the C heap to the kernel. Later frees do not shrink the heap. Raises OSError."""
    _libc.malloc_trim(ctypes.c_size_t(0))
    if not _libc.mallopt(_M_TRIM_THRESHOLD, -1):
        raise OSError("mallopt: the C heap cannot be kept from shrinking")


def write_memory(fd: int, address: int, num_bytes: int, offset: int) -> int:
    """Write memory of this process to a file at `offset`. Returns `num_bytes`."""
    done = 0
    while done < num_bytes:
        pointer = ctypes.c_void_p(address + done)
        done += _check(_pwrite(fd, pointer, ctypes.c_size_t(num_bytes - done), ctypes.c_int64(offset + done)), "pwrite")
    return num_bytes


def show_command(*words: str) -> None:
    """Let /proc/self/cmdline of this process and its forks show these words, if they are shorter than the real ones."""
    with open("/proc/self/cmdline", "rb") as file:
        real = file.read()
    start = ctypes.c_void_p.in_dll(_libc, "program_invocation_name").value or 0  # the kernel's copy of the first word
    text = b"".join(word.encode() + b"\0" for word in words)
    if start and len(real) >= len(text) and ctypes.string_at(start, len(real)) == real:
        ctypes.memset(start, 0, len(real))
        ctypes.memmove(start, text, len(text))


def flush_c_streams() -> None:
    """Flush the stdio buffers of C code in this process."""
    _fflush(None)
