"""An import keeps its memory bound and every row, whatever the size of the set."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


def rows(num_bytes: int) -> Iterator[bytes]:
    """Different lines as large as those of TACO: 130 kB, most of it lists of numbers in 20 tests."""
    draw = random.Random(0)
    texts = ["\n".join(str(draw.randrange(10**6)) for _ in range(size)) for size in range(100, 1800, 17)]
    made = number = 0
    while made < num_bytes:
        inputs = [f"{number} {test}\n{draw.choice(texts)}\n" for test in range(20)]
        tests = json.dumps({"inputs": inputs, "outputs": [f"{test}\n" for test in range(20)]})
        row = {"question": "Add them up. " * 40, "solutions": json.dumps(["print(1)"]), "input_output": tests}
        line = json.dumps({**row, "starter_code": "", "difficulty": "EASY"}).encode() + b"\n"
        yield line
        made += len(line)
        number += 1


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_an_import_of_a_gigabyte_needs_less_than_a_gibibyte_and_keeps_every_row(tmp_path: Path) -> None:
    out = tmp_path / "set.parquet"
    command = [sys.executable, "-m", "nouscoder", "data", "import", "taco", "/dev/stdin", "--out", str(out), "--json"]
    num_rows = 0
    with (tmp_path / "told").open("w+b") as told:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=told)
        assert process.stdin is not None
        with process.stdin as pipe:
            for line in rows(int(os.environ.get("NOUSCODER_IMPORT_BYTES", "1000000000"))):
                pipe.write(line)
                num_rows += 1
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        told.seek(0)
        imported = json.load(told)
    print(f"{num_rows} rows, CPU {usage.ru_utime + usage.ru_stime:.1f} s, most memory {usage.ru_maxrss >> 10} MiB")
    assert imported["problems"] == num_rows
    assert sum(imported["rejected"].values()) == 0
    assert usage.ru_maxrss * 1024 < 2**30
