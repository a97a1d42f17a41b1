"""A command of this project as a process of its own, with its time, CPU time and memory."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from nouscoder.bench.errors import BenchError

_PIPE_BYTES = 2**20
_LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class CommandFigures:
    """What a command cost and what it `told` as JSON on its standard output.

    `cpu_s` is that of the command and of all processes that it started; `peak_bytes` is the largest resident memory of
    one of them. `num_lines` and `num_bytes` are what it was given on its standard input.
    """

    told: Any
    wall_s: float
    cpu_s: float
    peak_bytes: int
    num_lines: int
    num_bytes: int


def measured_command(module: Sequence[str], lines: Iterable[bytes] = ()) -> CommandFigures:
    """Run a module with these words and this standard input. Raises BenchError when it fails, or after an hour."""
    begun_s = monotonic()
    with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as complaints:
        command = [sys.executable, "-m", *module]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=told, stderr=complaints)
        watchdog = threading.Timer(_LIMIT_S, process.kill)
        watchdog.start()
        try:
            num_lines, num_bytes = _write(process, lines)
        finally:
            _, status, usage = os.wait4(process.pid, 0)
            watchdog.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        told.seek(0)
        complaints.seek(0)
        if process.returncode:
            why = complaints.read().decode(errors="replace")[-2000:]
            raise BenchError(f"{' '.join(module)} ended with {process.returncode}: {why}")
        return CommandFigures(
            told=json.load(told),
            wall_s=monotonic() - begun_s,
            cpu_s=usage.ru_utime + usage.ru_stime,
            peak_bytes=usage.ru_maxrss * 1024,
            num_lines=num_lines,
            num_bytes=num_bytes,
        )


def _write(process: subprocess.Popen[bytes], lines: Iterable[bytes]) -> tuple[int, int]:
    """Returns the number of lines and bytes. A process that ends before stops the writing."""
    assert process.stdin is not None
    num_lines = num_bytes = 0
    try:
        with process.stdin as pipe:
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            for line in lines:
                num_bytes += pipe.write(line)
                num_lines += 1
    except BrokenPipeError:
        pass  # its exit code says why
    return num_lines, num_bytes
