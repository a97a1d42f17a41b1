"""The end of every other process of a runner's container."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

END_LIMIT_S = 5.0


def kill_all() -> None:
    """Kill every other process and wait for their end. Exits, which ends the container, when they do not end."""
    end = time.monotonic() + END_LIMIT_S
    while time.monotonic() < end:
        if os.getpid() == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        reap()
        if not _other_processes():
            return
        time.sleep(0.01)
    log("processes of a submission do not end: the container exits")
    os._exit(1)


def reap() -> None:
    """Wait for ended children. Orphans are children of process 1, which is this process."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _other_processes() -> list[str]:
    """The pids of the other processes of this container; none if it has no separate pid namespace."""
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and pid != "1"] if os.getpid() == 1 else []


def log(text: str) -> None:
    """Write a line to the log of the container."""
    sys.stderr.write(f"runner: {text}\n")
    sys.stderr.flush()
