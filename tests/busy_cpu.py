"""A sandbox on one CPU that it shares with endless processes, which a test can end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable

import pytest

from nouscoder.config import SandboxSection
from nouscoder.verifier.sandbox import Sandbox, SandboxUnavailable, open_sandbox

# It ends with the process that started it, also when that is killed.
HOG = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


@contextlib.asynccontextmanager
async def on_a_busy_cpu(config: SandboxSection, num_hogs: int) -> AsyncIterator[tuple[Sandbox, Callable[[], None]]]:
    """A started sandbox, and what ends the hogs. Each hog has a session of its own. Skips where it cannot start."""
    cpus = os.sched_getaffinity(0)
    try:
        made = open_sandbox(config)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    hogs: list[subprocess.Popen[bytes]] = []

    def end_hogs() -> None:
        for hog in hogs:
            hog.kill()
            hog.wait()
        hogs.clear()

    os.sched_setaffinity(0, {min(cpus)})  # inherited by what starts now
    try:
        await made.start()
        for _ in range(num_hogs):
            hogs.append(subprocess.Popen([sys.executable, "-c", HOG], start_new_session=True))
        os.sched_setaffinity(0, cpus)
        yield made, end_hogs
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    finally:
        os.sched_setaffinity(0, cpus)
        end_hogs()
        await made.close()
