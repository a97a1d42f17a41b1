"""An import keeps its memory bound and every row, whatever the size of the set.

`nouscoder bench import --layout taco --megabytes 10000` is the proof with 10 GB.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nouscoder.bench.importing import MEGABYTE, as_text, bench_import


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_an_import_of_a_gigabyte_needs_less_than_a_gibibyte_and_keeps_every_row(tmp_path: Path) -> None:
    """It prints its speed and that of bare libraries: pytest -s -m soak."""
    (taken,) = bench_import(["taco"], 1000 * MEGABYTE, tmp_path)
    print(as_text([taken]))
    assert taken.problems == taken.num_rows
    assert taken.rejected == 0
    assert taken.peak_bytes < 2**30
