"""Tests `return_large_blocks` of memory_budget.py in a process of its own, whose memory it is."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

# Frees a large block, as a service does before long, and then 100 of them with a small one after each.
_PROGRAM = """
import sys
from pathlib import Path
from nouscoder.http_server.memory_budget import return_large_blocks

def held() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if sys.argv[1] == "with":
    assert return_large_blocks()
first = bytearray(30 << 20)
del first
before, small, large = held(), [], []
for _ in range(100):
    large.append(bytearray(2 << 20))
    small.append(bytes(5000))
full = held()
assert full > before + (190 << 20)
last = bytes(5000)
large.clear()
print(held() - before >> 20)
"""


def _held_mib(how: str) -> int:
    ended = subprocess.run([sys.executable, "-c", _PROGRAM, how], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this host has no glibc")
def test_freed_bodies_go_back_to_the_system() -> None:
    assert _held_mib("without") > 150, "the control has shown nothing"
    assert _held_mib("with") < 20
