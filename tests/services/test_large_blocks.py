"""Freed memory goes back to the system: memory_budget.py in a process of its own, whose memory it is."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

# Frees a large block, as a service does before long, and then 100 of them with a small one after each.
_PROGRAM = """
import sys
from pathlib import Path
from nouscoder.http_server.freed_memory import return_large_blocks

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


# Frees 200 MiB of blocks of 16 KB, as gRPC reads them, each with a small one behind it. The control waits for nothing.
_SMALL_BLOCKS = """
import asyncio, sys
from nouscoder.http_server.freed_memory import held_bytes, return_freed_memory

async def main():
    returning = asyncio.create_task(return_freed_memory() if sys.argv[1] == "with" else asyncio.sleep(0))
    await asyncio.sleep(0)
    before, small, large = held_bytes(), [], []
    for _ in range(12_800):
        large.append(bytearray(16 << 10))
        small.append(bytes(600))
    large.clear()
    kept = held_bytes() - before >> 20
    while sys.argv[1] == "with" and held_bytes() - before >> 20 > 60:
        await asyncio.sleep(0.05)
    print(kept, held_bytes() - before >> 20)

asyncio.run(asyncio.wait_for(main(), 30))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this host has no glibc")
def test_small_freed_blocks_go_back_to_the_system_too() -> None:
    for how, most in (("without", 1000), ("with", 60)):
        ended = subprocess.run(
            [sys.executable, "-c", _SMALL_BLOCKS, how], capture_output=True, text=True, timeout=60, check=True
        )
        kept, left = map(int, ended.stdout.split())
        assert kept > 150, "the control has shown nothing"
        assert left <= most
