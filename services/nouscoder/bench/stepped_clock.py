"""A wall clock for one process that can be set forwards and back; the machine's clock stays as it is.

A small library (stepped_clock.c) is preloaded into the process. It adds the seconds of a file to the wall clock.

INVARIANT: `step` takes effect at once in every process that was started with `environment`, and monotonic clocks never
step.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from nouscoder.bench.measuring import BenchError

_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-O2", "-std=gnu11", "-shared", "-fPIC")
_COMPILE_LIMIT_S = 120.0


class SteppedClock:
    """Its files are in `folder`. Raises BenchError when this machine has no C compiler."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "step"
        self._step_s = 0
        self.step(0.0)
        library = folder / "stepped_clock.so"
        _compile(library)
        self.environment = {"LD_PRELOAD": str(library), "NOUSCODER_CLOCK_STEP_FILE": str(self._file)}

    def step(self, seconds: float) -> None:
        """Set the clock forwards, or back, by whole seconds."""
        self._step_s += round(seconds)
        # Overwritten in place, because processes have mapped the file: eight bytes are written at once.
        with self._file.open("r+b" if self._file.exists() else "wb", buffering=0) as file:
            file.write(self._step_s.to_bytes(8, "little", signed=True))


def _compile(library: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise BenchError(
            "Redis' clock cannot be set: there is no C compiler (on Debian: apt-get install gcc libc6-dev)"
        )
    command = [compiler, *_FLAGS, "-o", str(library), str(_SOURCE)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_LIMIT_S)
    except subprocess.CalledProcessError as error:
        message = error.stderr.decode("utf8", "replace").strip()[:300]
        raise BenchError(f"Redis' clock cannot be set: {compiler} cannot compile {_SOURCE.name}: {message}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise BenchError(f"Redis' clock cannot be set: {_SOURCE.name} cannot be compiled: {error}") from error
