"""How the first process of a slot comes to be, and what is put away after it: the one thing that backends with the
same harness do differently.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Protocol

from nouscoder.verifier.harness import __file__ as _harness_init
from nouscoder.verifier.harness.settings import SlotSettings
from nouscoder.verifier.sandbox.config import SandboxConfig

HARNESS = Path(_harness_init).resolve().parent
ENTRY_NAME = "__main__.py"
# MALLOC_ARENA_MAX keeps threads from reserving 64 MiB of address space each, which RLIMIT_AS would count.
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "2"}


class Launch(Protocol):
    """Used again and again by one slot, one process at a time."""

    def command(self) -> list[str]:
        """The argv of a fresh harness whose stdin and stdout are the slot's stream. Raises OSError."""
        ...

    async def put_away(self, process: asyncio.subprocess.Process) -> None:
        """Kill what `command` started and all below it, and remove what was made for it. Bounded in time."""
        ...

    def explain(self, reason: str) -> str:
        """One sentence on why no slot starts: what is missing and how to get it."""
        ...


class HostLaunch:
    """The interpreter itself, which then makes namespaces of this host's kernel."""

    def __init__(self, config: SandboxConfig, settings: SlotSettings) -> None:
        self._python = interpreter(config)
        self._settings = settings

    def command(self) -> list[str]:
        """The harness by its path."""
        return [*python_command(self._python, HARNESS / ENTRY_NAME), self._settings.to_json()]

    async def put_away(self, process: asyncio.subprocess.Process) -> None:
        """Killing the zygote kills every pid namespace below it."""
        await kill(process)

    def explain(self, reason: str) -> str:
        """See `Launch.explain`."""
        hint = ""
        if any(word in reason for word in ("clone", "unshare", "Operation not permitted")):
            hint = (
                " (this host does not let us make namespaces: run the verifier as root with CAP_SYS_ADMIN, or allow"
                " them with sysctl user.max_user_namespaces=10000 and"
                " kernel.apparmor_restrict_unprivileged_userns=0)"
            )
        elif "/proc" in reason:
            hint = " (the container hides parts of /proc: start it with an unmasked /proc, or use another backend)"
        return f"the local sandbox cannot start: {reason}{hint}"


def interpreter(config: SandboxConfig) -> str:
    """The python of candidates."""
    return config.python or getattr(sys, "_base_executable", "") or sys.executable


def python_command(python: str, entry: Path) -> list[str]:
    """Bare: no user site, no site-packages, no environment, UTF-8."""
    return [python, "-I", "-S", "-X", "utf8", str(entry)]


async def kill(process: asyncio.subprocess.Process, limit_s: float = 30.0) -> None:
    """SIGKILL, and wait. Raises TimeoutError.

    What it still had to say is read and dropped: asyncio tells of a process's end only when its pipes are at theirs,
    and stops reading a pipe whose reader is full.
    """
    if process.returncode is None:
        process.kill()
    async with asyncio.timeout(limit_s):
        if process.stdout is not None:
            await _drop_the_rest(process.stdout)
        await process.wait()


async def _drop_the_rest(stdout: asyncio.StreamReader) -> None:
    while True:
        try:
            if not await stdout.read(1 << 16):
                return
        except RuntimeError:  # a session still reads an answer, which comes whole or never
            await asyncio.sleep(0.01)
