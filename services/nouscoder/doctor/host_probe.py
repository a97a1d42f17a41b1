"""Tests which namespaces and filters this kernel allows. Each test runs in its own process, which then exits."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

from nouscoder.verifier.harness import kernel, seccomp

_NAMESPACES = {
    "user": kernel.CLONE_NEWUSER,
    "pid": kernel.CLONE_NEWPID,
    "mount": kernel.CLONE_NEWNS,
    "net": kernel.CLONE_NEWNET,
    "ipc": kernel.CLONE_NEWIPC,
    "uts": kernel.CLONE_NEWUTS,
}


@dataclass(frozen=True, slots=True)
class Probe:
    """The results. `refused` has the reason for each refused namespace; `seccomp_refused` is "" if a filter works."""

    namespaces: tuple[str, ...]
    refused: dict[str, str]
    seccomp_refused: str


def probe_host() -> Probe:
    """Run all tests. Without root, the other namespaces are made inside a user namespace."""
    base = 0 if os.geteuid() == 0 else kernel.CLONE_NEWUSER
    reasons = {name: _tried(functools.partial(kernel.unshare, base | flags)) for name, flags in _NAMESPACES.items()}
    made = tuple(name for name, reason in reasons.items() if not reason)
    return Probe(made, {name: reason for name, reason in reasons.items() if reason}, _tried(_install_filter))


def _install_filter() -> None:
    program = kernel.make_filter(seccomp.build_filter())
    kernel.forbid_new_privileges()
    kernel.install_filter(program)


def _tried(act: Callable[[], None]) -> str:
    """Run `act` in a child process. Returns why it failed, or ""."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            act()
        except OSError as error:
            os.write(into, str(error.strerror).encode())
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as reasons:
        reason = reasons.read()
    os.waitpid(pid, 0)
    return reason.decode()
