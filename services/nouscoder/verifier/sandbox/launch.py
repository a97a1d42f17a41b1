"""How the harness of a slot comes to be: the one thing that backends with the same harness do differently."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Protocol

from nouscoder.verifier.harness import __file__ as _harness_init
from nouscoder.verifier.harness.settings import SlotSettings
from nouscoder.verifier.sandbox.config import SandboxConfig
from nouscoder.verifier.sandbox.link import Link, ProcessLink

HARNESS = Path(_harness_init).resolve().parent
ENTRY_NAME = "__main__.py"


class Launch(Protocol):
    """Used again and again by one slot, one link at a time."""

    async def open(self) -> Link:
        """A fresh harness, which says HELLO. Raises OSError or SandboxUnavailable. Bounded in time."""
        ...

    def explain(self, reason: str) -> str:
        """One sentence on why no slot starts: what is missing and how to get it."""
        ...


class HostLaunch:
    """The interpreter itself, which then makes namespaces of this host's kernel."""

    def __init__(self, config: SandboxConfig, settings: SlotSettings) -> None:
        self._python = interpreter(config)
        self._settings = settings

    async def open(self) -> Link:
        """The harness by its path; killing the zygote kills every pid namespace below it."""
        return await ProcessLink.start([*python_command(self._python, HARNESS / ENTRY_NAME), self._settings.to_json()])

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
