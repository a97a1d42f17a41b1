"""docs/operating.md lists exactly the values that a run cannot change as refused."""

from __future__ import annotations

import re
from pathlib import Path

from nouscoder.run.folder import FIXED

DOCUMENT = Path(__file__).parents[2] / "docs" / "operating.md"


def test_the_table_of_refused_values_equals_the_code() -> None:
    rows = [row for row in DOCUMENT.read_text(encoding="utf8").splitlines() if re.search(r"\| refused", row)]
    named = [name for row in rows for name in re.findall(r"`([a-z_.]+)`", row.split("|")[1])]
    assert sorted(named) == sorted(FIXED)
