"""How a backend starts the harness of a slot. This is the only difference between backends with the same harness."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Protocol

from nouscoder.verifier.harness import __file__ as _harness_init
from nouscoder.verifier.harness.settings import SlotSettings
from nouscoder.verifier.sandbox.config import SandboxConfig
from nouscoder.verifier.sandbox.link import Link, ProcessLink
from nouscoder.verifier.sandbox.peers import DialogueEnd

HARNESS = Path(_harness_init).resolve().parent
ENTRY_NAME = "__main__.py"


class Launch(Protocol):
    """Starts harnesses for one slot, one at a time."""

    async def open(self) -> Link:
        """Start a fresh harness, which sends HELLO. Raises OSError or SandboxUnavailable. Bounded in time."""
        ...

    def explain(self, reason: str) -> str:
        """One sentence that says why no slot starts, what is missing and how to get it."""
        ...

    async def lacked_memory(self) -> bool:
        """Whether what the last harness ran on has ended for lack of memory. Waits some seconds for the news."""
        ...


class HostLaunch:
    """Starts the interpreter on this host. The harness then makes namespaces of the host's kernel."""

    def __init__(self, config: SandboxConfig, settings: SlotSettings, peer: DialogueEnd | None) -> None:
        self._python = interpreter(config)
        self._settings = settings
        self._peer = peer

    async def open(self) -> Link:
        """Start the harness by its path. Killing the zygote kills every pid namespace below it."""
        peer = self._peer.descriptor() if self._peer is not None else None
        settings = self._settings if peer is None else self._settings._replace(peer=peer)
        command = [*python_command(self._python, HARNESS / ENTRY_NAME), settings.to_json()]
        return await ProcessLink.start(command, peer=peer)

    async def lacked_memory(self) -> bool:
        """See `Launch`. The group of the slot knows (sandbox/cgroup.py)."""
        return False

    def explain(self, reason: str) -> str:
        """See `Launch.explain`."""
        hint = ""
        if any(word in reason for word in ("clone", "unshare", "Operation not permitted")):
            hint = (
                " (this host does not allow namespaces: run the verifier as root with CAP_SYS_ADMIN, or allow"
                " them with sysctl user.max_user_namespaces=10000 and"
                " kernel.apparmor_restrict_unprivileged_userns=0)"
            )
        elif "/proc" in reason:
            hint = " (the container hides parts of /proc: start it with an unmasked /proc, or use another backend)"
        return f"the local sandbox cannot start: {reason}{hint}"


def interpreter(config: SandboxConfig) -> str:
    """The Python interpreter of candidates."""
    return config.python or getattr(sys, "_base_executable", "") or sys.executable


def python_command(python: str, entry: Path) -> list[str]:
    """The command of an isolated interpreter: no user site, no site-packages, no environment, UTF-8."""
    return [python, "-I", "-S", "-X", "utf8", str(entry)]
