"""The candidate's seccomp filter: an allow-list in classic BPF, built without a library.

Refused calls fail with EPERM, so that programs that probe for calls continue. clone3 fails with ENOSYS, so that glibc
falls back to clone, whose flags the filter checks. Calls of another architecture (i386, x32) kill the process.
"""

from __future__ import annotations

import errno
import platform
import struct

from . import syscalls

_LD_ABS, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO, _NOTIFY = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
_NUMBER, _ARCH, _ARG0_LOW, _ARG1_LOW, _ARG2_LOW = 0, 4, 16, 24, 32
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE3 = 435
_NAMESPACE_FLAGS = 0x7E020080  # every CLONE_NEW* flag
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6. A namespace does not isolate others, such as vsock
_PROTOCOLS = (0, 6, 17)  # the family's default, TCP and UDP; not MPTCP and UDP-Lite, which no program needs
_PRIO_PROCESS = 0
_SHARED_FILE_COMMANDS = (1024, 1026)  # F_SETLEASE and F_NOTIFY, which act on what others do with a file

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def _refuse(number: int) -> Instruction:
    return (_RET, 0, 0, _ERRNO | number)


def _ranges(numbers: set[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def _search(ranges: list[tuple[int, int]]) -> list[Instruction]:
    """Binary search over the allowed ranges: about 12 instructions per call instead of 80."""
    if not ranges:
        return [_refuse(errno.EPERM)]
    if len(ranges) == 1:
        first, last = ranges[0]
        return [(_JGE, 0, 2, first), (_JGE, 1, 0, last + 1), (_RET, 0, 0, _ALLOW), _refuse(errno.EPERM)]
    middle = len(ranges) // 2
    low, high = _search(ranges[:middle]), _search(ranges[middle:])
    if len(low) > 255:
        raise ValueError("the filter needs a longer jump than BPF supports")
    return [(_JGE, len(low), 0, ranges[middle][0]), *low, *high]


def build_filter(*, notifies: bool = False) -> bytes:
    """The filter for this machine. With `notifies`, init is told before a socket is made.

    Raises OSError when there is no table for its architecture.
    """
    machine = platform.machine()
    if machine not in _AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no seccomp table for {machine}")
    table = syscalls.X86_64 if machine == "x86_64" else syscalls.AARCH64
    checked: list[tuple[tuple[str, ...], list[Instruction]]] = [
        (("clone",), _clone()),
        (("socket", "socketpair"), _sockets(notifies)),
        (("fcntl",), _fcntl()),
        (("unshare",), _unshare()),
        (("setpriority",), _priority()),
        (("prlimit64", "sched_setaffinity", "sched_setparam", "sched_setscheduler"), _not_of_init()),
    ]
    plain = set(table.values()) - {table[name] for names, _ in checked for name in names}
    program: list[Instruction] = [
        (_LD_ABS, 0, 0, _ARCH),
        (_JEQ, 1, 0, _AUDIT_ARCH[machine]),
        (_RET, 0, 0, _KILL),
        (_LD_ABS, 0, 0, _NUMBER),
        *_when((_CLONE3,), [_refuse(errno.ENOSYS)]),
    ]
    for names, block in checked:
        program += _when(tuple(table[name] for name in names), block)
    program += _search(_ranges(plain))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _when(values: tuple[int, ...], block: list[Instruction]) -> list[Instruction]:
    """Run `block`, each path of which returns, when what was loaded is one of the values."""
    *others, last = values
    jumps: list[Instruction] = [(_JEQ, len(others) - i, 0, value) for i, value in enumerate(others)]
    return [*jumps, (_JEQ, 0, len(block), last), *block]


def _clone() -> list[Instruction]:
    """No new namespace."""
    return [(_LD_ABS, 0, 0, _ARG0_LOW), (_JSET, 0, 1, _NAMESPACE_FLAGS), _refuse(errno.EPERM), (_RET, 0, 0, _ALLOW)]


def _sockets(notifies: bool) -> list[Instruction]:
    """Known families and protocols. With `notifies`, init hears of each socket."""
    is_protocol: list[Instruction] = [(_LD_ABS, 0, 0, _ARG2_LOW)]
    is_protocol += [(_JEQ, len(_PROTOCOLS) - i, 0, protocol) for i, protocol in enumerate(_PROTOCOLS)]
    is_protocol += [_refuse(errno.EPROTONOSUPPORT), (_RET, 0, 0, _NOTIFY if notifies else _ALLOW)]
    return [(_LD_ABS, 0, 0, _ARG0_LOW), *_when(_FAMILIES, is_protocol), _refuse(errno.EAFNOSUPPORT)]


def _fcntl() -> list[Instruction]:
    """No command that acts on what others do with a file."""
    refused = _when(_SHARED_FILE_COMMANDS, [_refuse(errno.EPERM)])
    return [(_LD_ABS, 0, 0, _ARG1_LOW), *refused, (_RET, 0, 0, _ALLOW)]


def _unshare() -> list[Instruction]:
    """Only a new network namespace: init makes one before a run that needs it. Candidates have no right to."""
    return [(_LD_ABS, 0, 0, _ARG0_LOW), *_when((_NEW_NETWORK,), [(_RET, 0, 0, _ALLOW)]), _refuse(errno.EPERM)]


def _priority() -> list[Instruction]:
    """Only of one process, and not of process 1, from which the next run would inherit it. gVisor asks for no right."""
    of_others = [(_LD_ABS, 0, 0, _ARG0_LOW), (_JEQ, 1, 0, _PRIO_PROCESS), _refuse(errno.EPERM)]
    return [*of_others, (_LD_ABS, 0, 0, _ARG1_LOW), *_when((1,), [_refuse(errno.EPERM)]), (_RET, 0, 0, _ALLOW)]


def _not_of_init() -> list[Instruction]:
    """Not on process 1. Without root, candidates have the user of init, and could change its limits."""
    return [(_LD_ABS, 0, 0, _ARG0_LOW), *_when((1,), [_refuse(errno.EPERM)]), (_RET, 0, 0, _ALLOW)]
