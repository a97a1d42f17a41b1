"""Files with one number for each problem: base pass rates, priorities."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from nouscoder.data.json_records import read_records
from nouscoder.errors import Unusable


def read_values(path: Path, key: str) -> dict[str, float]:
    """The number `key` of each problem, by id. JSON lines or one array. Raises Unusable for the first bad record."""
    values: dict[str, float] = {}
    for record in read_records(path):
        found = record.value if isinstance(record.value, dict) else {}
        problem_id: Any = found.get("problem_id")
        value: Any = found.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not isinstance(problem_id, str) or not is_number or not 0 <= value < math.inf:
            raise Unusable(f"{path}, record {record.number}: it needs problem_id and {key}, a number of at least 0")
        values[problem_id] = float(value)
    return values
