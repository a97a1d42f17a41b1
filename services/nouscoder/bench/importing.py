"""`nouscoder bench import`: how fast `nouscoder data import` is on each core, its memory, and its control.

The rows are made while they are read, through a pipe, so that a set of any size takes no space but that of its tests.
The speed is JSON lines divided by all CPU seconds of the command, its start included. The control
(bench/import_control.py) gets the beginning of the same rows. Nothing is deleted before the last figure: an ext4
without a journal searches past each inode that was freed in the last minutes, and a new file costs ten times as much.
With --folder on a tmpfs (/dev/shm) other programs' files do not matter either.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nouscoder.bench.commands import measured_command
from nouscoder.bench.import_control import STAGES
from nouscoder.bench.import_rows import rows

MEGABYTE = 10**6
_CONTROL_BYTES = 200 * MEGABYTE
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
    importing = ["nouscoder", "data", "import", layout, "/dev/stdin", "--out", str(out), "--json"]
    fed = measured_command(importing, rows(layout, num_bytes))
    stored = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    bare = ["nouscoder.bench.import_control", layout, str(folder / "control")]
    control = measured_command(bare, rows(layout, min(num_bytes, _CONTROL_BYTES)))
    return ImportFigures(
        layout=layout,
        num_rows=fed.num_lines,
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
