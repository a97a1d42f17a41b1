"""The controls: rates of bare process operations on this machine, with which figures are compared."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

from nouscoder.verifier.harness.zygote import MODULES

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


_WARM_FORKS = """
import gc, importlib, os, sys, time
for name in sys.argv[2].split():
    importlib.import_module(name)
program = compile("a, b = map(int, input().split())\\nprint(a + b)\\n", "main.py", "exec")
given, printed = os.memfd_create("in"), os.memfd_create("out")
os.write(given, b"1 2\\n")
report = os.dup(1)
os.dup2(given, 0)
os.dup2(printed, 1)
gc.collect()
gc.freeze()
end, done, begun = float(sys.argv[1]), 0, time.perf_counter()
while time.perf_counter() - begun < end:
    os.lseek(0, 0, 0)
    pid = os.fork()
    if not pid:
        exec(program, {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0 and os.pread(1, 9, 0) == b"3\\n"
    os.ftruncate(1, 0)
    os.lseek(1, 0, 0)
    done += 1
os.write(report, b"%f" % (done / (time.perf_counter() - begun)))
"""


def warm_forks_per_second(seconds: float) -> float:
    """How many times per second an interpreter with a slot's modules can fork a child that runs a test of this bench.

    The child reads and writes memory files. Nothing isolates it: no namespaces, limits, filter, new user or network. It
    is the bound of a grader whose tests are forks of an interpreter.
    """
    command = [BASE_PYTHON, "-IS", "-c", _WARM_FORKS, str(seconds), MODULES]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
