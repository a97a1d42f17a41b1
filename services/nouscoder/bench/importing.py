"""`nouscoder bench import`: how fast `nouscoder data import` is on each core, its memory, and its control.

The rows are made while they are read, through a pipe, so that a set of any size takes no space but that of its tests.
The speed is JSON lines divided by all CPU seconds of the command, its start included. The control
(bench/import_control.py) gets the beginning of the same rows. Nothing is deleted before the last figure: an ext4
without a journal searches past each inode that was freed in the last minutes, and a new file costs ten times as much.
With --folder on a tmpfs (/dev/shm) other programs' files do not matter either.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from nouscoder.bench.errors import BenchError
from nouscoder.bench.import_control import STAGES
from nouscoder.bench.import_rows import rows

MEGABYTE = 10**6
_CONTROL_BYTES = 200 * MEGABYTE
_PIPE_BYTES = 2**20
_LIMIT_S = 3600.0
_LEAST_SHARE = 0.005  # of a stage that is shown


@dataclass(frozen=True, slots=True)
class ImportFigures:
    """One import. `control` has the CPU seconds of each stage for the first `control_bytes` of the rows.

    `cpu_s` is that of the command and of all processes that it started; `peak_bytes` is its largest resident memory.
    """

    layout: str
    num_rows: int
    num_bytes: int
    problems: int
    rejected: int
    stored_bytes: int
    wall_s: float
    cpu_s: float
    peak_bytes: int
    control_bytes: int
    control: dict[str, float]

    @property
    def speed(self) -> float:
        """MB of JSON lines for each second of CPU."""
        return self.num_bytes / MEGABYTE / self.cpu_s

    @property
    def control_speed(self) -> float:
        """The same of the control."""
        return self.control_bytes / MEGABYTE / sum(self.control.values())


@dataclass(frozen=True, slots=True)
class _Fed:
    """A command that read rows."""

    num_rows: int
    num_bytes: int
    told: Any
    wall_s: float
    cpu_s: float
    peak_bytes: int


def bench_import(layouts: Sequence[str], num_bytes: int, folder: Path | None = None) -> list[ImportFigures]:
    """Import a set of `num_bytes` in each layout. `folder` holds the tests meanwhile. Raises BenchError."""
    place = Path(tempfile.mkdtemp(prefix="nouscoder-bench-", dir=folder))
    try:
        return [_figures(layout, num_bytes, place / layout) for layout in dict.fromkeys(layouts)]
    finally:
        shutil.rmtree(place, ignore_errors=True)


def as_record(figures: Sequence[ImportFigures]) -> list[dict[str, Any]]:
    """For --json."""
    return [
        asdict(one) | {"mb_per_core_second": one.speed, "control_mb_per_core_second": one.control_speed}
        for one in figures
    ]


def as_text(figures: Sequence[ImportFigures]) -> str:
    """For people."""
    return "\n".join(_text(one) for one in figures)


def _text(one: ImportFigures) -> str:
    total = sum(one.control.values())
    by_stage = ", ".join(
        f"{stage} {one.control_bytes / MEGABYTE / seconds:.0f}"
        for stage, seconds in one.control.items()
        if seconds > _LEAST_SHARE * total
    )
    return (
        f"{one.layout}: {one.num_rows} rows, {one.num_bytes / MEGABYTE:.0f} MB of JSON lines in {one.wall_s:.1f} s,"
        f" CPU {one.cpu_s:.1f} s: {one.speed:.0f} MB/s a core; most memory {one.peak_bytes / 2**20:.0f} MiB\n"
        f"  {one.problems} problems, {one.rejected} rejected, {one.stored_bytes / MEGABYTE:.0f} MB stored\n"
        f"  control: bare libraries on the first {one.control_bytes / MEGABYTE:.0f} MB: {one.control_speed:.0f} MB/s;"
        f" by stage {by_stage}; the import is at {one.speed / one.control_speed:.0%}"
    )


def _figures(layout: str, num_bytes: int, folder: Path) -> ImportFigures:
    (folder / "control").mkdir(parents=True)
    out = folder / "set.parquet"
    fed = _feed(["nouscoder", "data", "import", layout, "/dev/stdin", "--out", str(out), "--json"], layout, num_bytes)
    stored = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    command = ["nouscoder.bench.import_control", layout, str(folder / "control")]
    control = _feed(command, layout, min(num_bytes, _CONTROL_BYTES))
    return ImportFigures(
        layout=layout,
        num_rows=fed.num_rows,
        num_bytes=fed.num_bytes,
        problems=fed.told["problems"],
        rejected=sum(fed.told["rejected"].values()),
        stored_bytes=stored,
        wall_s=fed.wall_s,
        cpu_s=fed.cpu_s,
        peak_bytes=fed.peak_bytes,
        control_bytes=control.num_bytes,
        control={stage: control.told[stage] for stage in STAGES},
    )


def _feed(module: list[str], layout: str, num_bytes: int) -> _Fed:
    """Run a module of this project with the rows on its standard input. It tells its result as JSON."""
    begun_s = monotonic()
    with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            [sys.executable, "-m", *module], stdin=subprocess.PIPE, stdout=told, stderr=complaints
        )
        watchdog = threading.Timer(_LIMIT_S, process.kill)
        watchdog.start()
        try:
            num_rows, written = _write(process, rows(layout, num_bytes))
        finally:
            _, status, usage = os.wait4(process.pid, 0)
            watchdog.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        told.seek(0)
        complaints.seek(0)
        if process.returncode:
            raise BenchError(
                f"{' '.join(module)} ended with {process.returncode}: {complaints.read().decode()[-2000:]}"
            )
        return _Fed(
            num_rows,
            written,
            json.load(told),
            monotonic() - begun_s,
            usage.ru_utime + usage.ru_stime,
            usage.ru_maxrss * 1024,
        )


def _write(process: subprocess.Popen[bytes], lines: Iterable[bytes]) -> tuple[int, int]:
    """Returns the number of lines and bytes. A process that ends before stops the writing."""
    assert process.stdin is not None
    num_rows = written = 0
    try:
        with process.stdin as pipe:
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            for line in lines:
                written += pipe.write(line)
                num_rows += 1
    except BrokenPipeError:
        pass  # its exit code says why
    return num_rows, written
