"""What the machine itself can do: the controls that figures are held against."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

BASE_PYTHON = getattr(sys, "_base_executable", sys.executable)


def rate(action: Callable[[], object], seconds: float) -> float:
    """How often `action` can be done one after the other, a second, over about `seconds` seconds."""
    num_done, begun = 0, time.perf_counter()
    while (spent_s := time.perf_counter() - begun) < seconds:
        action()
        num_done += 1
    return num_done / spent_s


def bare_spawn() -> None:
    """A fresh interpreter that does nothing, as every grader that starts `python` a test must pay."""
    subprocess.run([BASE_PYTHON, "-IS", "-c", "pass"], check=True)


def fork_and_wait() -> None:
    """A child that ends at once."""
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
