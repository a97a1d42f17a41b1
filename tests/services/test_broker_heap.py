"""The broker's process uses the memory of freed buffers again instead of asking the kernel for new pages."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Page faults of a process that makes and frees four buffers of 3 MB, twenty times.
_FAULTS = """
import resource
def make_buffers():
    return [bytearray(3_000_000) for _ in range(4)]
make_buffers()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    make_buffers()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
_SETTING = "from nouscoder.broker.process import keep_freed_buffers\nassert keep_freed_buffers()\n"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_freed_buffers_are_used_again_without_page_faults() -> None:
    # Each of the 20 rounds touches about 2,900 pages. Without the setting every round gets new ones.
    assert _num_faults(_SETTING + _FAULTS) < 2_900 < 20_000 < _num_faults(_FAULTS)


def _num_faults(program: str) -> int:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return int(done.stdout)
