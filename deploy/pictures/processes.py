"""Processes and ports of this machine."""

from __future__ import annotations

import socket
import subprocess

_STOP_LIMIT_S = 30.0


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process: by SIGTERM, and by SIGKILL if that takes too long."""
    process.terminate()
    try:
        process.wait(_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_STOP_LIMIT_S)
