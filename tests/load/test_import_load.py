"""An import keeps its memory bound, whatever the size of the set. The proof with 10 GB is tests/load/import_load.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.load.import_load import measured_import, write_set


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_an_import_of_200_mb_needs_less_than_a_gibibyte_and_keeps_every_row(tmp_path: Path) -> None:
    """It prints its speed: pytest -s -m soak."""
    num_rows = write_set(tmp_path / "set.jsonl", 200_000_000)
    measured = measured_import(tmp_path / "set.jsonl", tmp_path / "set.parquet", num_rows)
    print(measured.text())
    assert measured.summary["problems"] == num_rows
    assert measured.summary["rejected"] == {}
    assert measured.max_rss_bytes < 2**30
