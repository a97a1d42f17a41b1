"""What this process' kernel answers, and whether that is what a runner of the backend has.

A runner of `gvisor` must run on gVisor's sentry, and one of `userns` as users that are none of its node's.
gVisor's sentry differs from every Linux kernel in facts that no container setting can imitate by mistake:

- The kernel's log begins with gVisor's own first line. Linux refuses the log to a container, or shows the node's.
- /proc is a proc file system (it has `version` and `stat`), but without `interrupts` and `softirqs`. Linux makes both
  without a condition (fs/proc/Makefile), and a runtime that masks a file covers it and cannot remove it.
- At least one old system call does not exist (ENOSYS). Linux has them, and answers EBADF or EINVAL. A seccomp profile
  of a container runtime answers EPERM.

In a pod with `hostUsers: false` the container's users are mapped to others of the node, all above 65535. Otherwise user
0 of the container is user 0 of the node.

A process that candidates have taken over can claim anything. So the agent asks once, when it alone runs in the
container, before it listens. Standard library only; also sent as text to trial pods by the doctor.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform

_ALWAYS_IN_LINUX = ("interrupts", "softirqs")
_IN_BOTH = ("version", "stat")
# Numbers of vmsplice and remap_file_pages by machine.
_OLD_CALLS = {"x86_64": (278, 216), "aarch64": (75, 234)}
_FIRST_LINE = "Starting gVisor..."
_LAST_USER_OF_NODES = 65535
Facts = dict[str, object]
_READ_ALL = 3  # SYSLOG_ACTION_READ_ALL
_LOG_BYTES = 1 << 16


def kernel_facts() -> Facts:
    """`version`, `log` (first line, or the error), `files` of /proc, `calls` (the errors of old system calls), `users`.

    `users` are the lines of /proc/self/uid_map: first user here, first user outside, number of users.
    """
    return {
        "version": _version(),
        "log": _first_log_line(),
        "files": [name for name in _IN_BOTH + _ALWAYS_IN_LINUX if os.path.lexists(f"/proc/{name}")],
        "calls": [_error_of(number) for number in _OLD_CALLS.get(platform.machine(), ())],
        "users": mapped_users(),
    }


def mapped_users() -> list[list[int]]:
    """The users of this process's user namespace: first user here, first user outside, number of users."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        return [[int(number) for number in line.split()] for line in file]


def why_not_gvisor(facts: object) -> str:
    """Empty if only gVisor answers so. Otherwise what contradicts it, and the kernel's version."""
    if not isinstance(facts, dict):
        return "it does not say what its kernel answers (an older image?)"
    files, calls = facts.get("files"), facts.get("calls")
    problems = []
    if not str(facts.get("log")).endswith(_FIRST_LINE):
        problems.append(f"the kernel's log does not begin with gVisor's line ({str(facts.get('log'))[:60]})")
    if files != [*_IN_BOTH]:
        problems.append("/proc has files of Linux" if isinstance(files, list) else "/proc is unknown")
    if not isinstance(calls, list) or "ENOSYS" not in calls:
        problems.append(f"old system calls exist ({calls})"[:80])
    return f"{'; '.join(problems)}; its kernel is {str(facts.get('version'))[:80]}" if problems else ""


def why_not_userns(facts: object) -> str:
    """Empty if no user of the container is one that the node uses. Otherwise what contradicts it."""
    users = facts.get("users") if isinstance(facts, dict) else None
    if not isinstance(users, list) or not users or not all(_is_range(one) for one in users):
        return "it does not say which users it has (an older image?)"
    if any(outside <= _LAST_USER_OF_NODES for _, outside, _ in users):
        return f"its users are those of the node (uid_map {users})"[:120]
    return ""


def _is_range(users: object) -> bool:
    """Inside, outside, and how many: at least one."""
    if not isinstance(users, list) or len(users) != 3 or not all(type(number) is int for number in users):
        return False
    return bool(users[0] >= 0 and users[2] >= 1)


def _version() -> str:
    try:
        with open("/proc/version", encoding="utf8") as file:
            return file.read(200).strip()
    except OSError as error:
        return _name(error.errno)


def _first_log_line() -> str:
    """Raises no error: the name of the error is the answer."""
    library, log = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(_LOG_BYTES)
    num_bytes = library.klogctl(_READ_ALL, log, _LOG_BYTES)
    if num_bytes < 0:
        return _name(ctypes.get_errno())
    return log.raw[:num_bytes].partition(b"\n")[0].decode(errors="replace")[:200]


def _error_of(number: int) -> str:
    """The error of a system call with arguments that are invalid everywhere; "" if it succeeds."""
    library = ctypes.CDLL(None, use_errno=True)
    invalid = ctypes.c_long(-1)
    done = library.syscall(ctypes.c_long(number), invalid, ctypes.c_long(1), ctypes.c_long(1), ctypes.c_long(0))
    return _name(ctypes.get_errno()) if done == -1 else ""


def _name(number: int | None) -> str:
    return errno.errorcode.get(number or 0, str(number))
