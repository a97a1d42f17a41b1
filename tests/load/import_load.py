"""The import of a large problem set: its speed for each core and its memory.

    python tests/load/import_load.py 10 FOLDER     makes 10 GB of JSON lines in FOLDER and imports them

The set has TACO's layout and about its sizes: 100 kB a row, most of it tests with lists of numbers. Each row has tests
of its own, so that every set of tests is stored.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

GIGABYTE = 10**9
_NUM_TEXTS = 400
_TESTS_OF_A_ROW = 20
_SOLUTION = "import sys\n\n\ndef solve(values):\n    return sum(values)\n\n\nprint(solve(map(int, sys.stdin)))\n"


@dataclass(frozen=True, slots=True)
class Measured:
    """An import. `cpu_s` is that of its process and of the processes that it started."""

    num_rows: int
    num_bytes: int
    wall_s: float
    cpu_s: float
    max_rss_bytes: int
    summary: dict[str, object]

    def text(self) -> str:
        """The figures for people."""
        return (
            f"{self.num_rows} rows, {self.num_bytes / 1e6:.0f} MB of JSON lines: {self.wall_s:.1f} s,"
            f" CPU {self.cpu_s:.1f} s, {self.num_bytes / 1e6 / self.cpu_s:.0f} MB a second and core,"
            f" most memory {self.max_rss_bytes / 2**20:.0f} MiB"
        )


def write_set(path: Path, num_bytes: int) -> int:
    """Write a set of at least so many bytes. Returns its number of rows."""
    draw = random.Random(0)
    texts = [_numbers(draw, round(draw.lognormvariate(5.7, 1.4))) for _ in range(_NUM_TEXTS)]
    written = num_rows = 0
    with path.open("wb", buffering=2**20) as file:
        while written < num_bytes:
            inputs = [f"{num_rows} {number}\n{draw.choice(texts)}" for number in range(_TESTS_OF_A_ROW)]
            outputs = [f"{draw.randrange(10**9)}\n" for _ in inputs]
            row = {
                "question": f"Problem {num_rows}. " + "Print the sum of all numbers of the input. " * 40,
                "solutions": json.dumps([_SOLUTION] * 4),
                "starter_code": "",
                "input_output": json.dumps({"inputs": inputs, "outputs": outputs}),
                "difficulty": "EASY",
                "source": "synthetic",
            }
            written += file.write(json.dumps(row).encode() + b"\n")
            num_rows += 1
    return num_rows


def measured_import(path: Path, out: Path, num_rows: int) -> Measured:
    """Import the set as a process of its own. Raises CalledProcessError."""
    command = [sys.executable, "-m", "nouscoder", "data", "import", "taco", str(path), "--out", str(out), "--json"]
    begun_s = monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        told = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Measured(
        num_rows=num_rows,
        num_bytes=path.stat().st_size,
        wall_s=monotonic() - begun_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        max_rss_bytes=usage.ru_maxrss * 1024,
        summary=json.loads(told),
    )


def _numbers(draw: random.Random, count: int) -> str:
    return "\n".join(str(draw.randrange(10 ** draw.randint(1, 9))) for _ in range(count)) + "\n"


def main() -> None:
    """Make a set and import it."""
    gigabytes, folder = float(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    num_rows = write_set(folder / "set.jsonl", round(gigabytes * GIGABYTE))
    print(measured_import(folder / "set.jsonl", folder / "set.parquet", num_rows).text())


if __name__ == "__main__":
    main()
