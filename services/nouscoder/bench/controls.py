"""The controls: rates of bare process operations on this machine, with which figures are compared."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

BASE_PYTHON = getattr(sys, "_base_executable", sys.executable)


def rate(action: Callable[[], object], seconds: float) -> float:
    """How many times per second `action` runs in sequence, measured over about `seconds` seconds."""
    num_done, begun = 0, time.perf_counter()
    while (spent_s := time.perf_counter() - begun) < seconds:
        action()
        num_done += 1
    return num_done / spent_s


def bare_spawn() -> None:
    """Start an interpreter that does nothing: the minimum cost of a grader that starts `python` for each test."""
    subprocess.run([BASE_PYTHON, "-IS", "-c", "pass"], check=True)


_FORKS = """
import os, sys, time
end, done, begun = float(sys.argv[1]), 0, time.perf_counter()
while time.perf_counter() - begun < end:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    done += 1
print(done / (time.perf_counter() - begun))
"""


def forks_per_second(seconds: float) -> float:
    """How many times per second a bare interpreter can fork a child that exits at once, and wait for it.

    Measured in a separate process, because a fork copies the page tables of its parent, and those here are large.
    """
    command = [BASE_PYTHON, "-IS", "-c", _FORKS, str(seconds)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
