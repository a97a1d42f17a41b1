"""A process of an engine ends with the service that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

# Starts a child in the way of vLLM, and tells its process id. The child would sleep for minutes.
SERVICE = """
import multiprocessing, os, sys, time
from nouscoder.generation.engines.vllm_start import end_with_parent

def child(file):
    end_with_parent()
    end_with_parent()
    with open(file + ".part", "w") as out:
        out.write(str(os.getpid()))
    os.rename(file + ".part", file)
    time.sleep(250)

if __name__ == "__main__":
    end_with_parent()  # does nothing in the service itself
    multiprocessing.get_context("spawn").Process(target=child, args=(sys.argv[1],), daemon=True).start()
    time.sleep(250)
"""
LIMIT_S = 120.0


def test_a_killed_service_leaves_no_engine_process(tmp_path: Path) -> None:
    script, pid_file = tmp_path / "service.py", tmp_path / "pid"
    script.write_text(SERVICE)
    service = subprocess.Popen([sys.executable, str(script), str(pid_file)])
    deadline_s = time.monotonic() + LIMIT_S
    try:
        while not pid_file.exists():
            assert service.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        child = int(pid_file.read_text())
        assert is_running(child)
        os.kill(service.pid, signal.SIGKILL)
        service.wait()
        while is_running(child):
            assert time.monotonic() < deadline_s, "the child outlives the service"
            time.sleep(0.05)
    finally:
        service.kill()


def is_running(pid: int) -> bool:
    """A process that has ended and waits for its new parent does not run."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
