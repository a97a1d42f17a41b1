"""The interface of a sink, and the scalars of a record of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol


class Sink(Protocol):
    """Where the records of a run go. One process uses it, and calls `open` first. Every call may raise anything."""

    def open(self) -> int:
        """Connect, and return the last step whose whole record the sink has; 0 when it has none."""
        ...

    def write(self, step: int, time_s: float, scalars: Mapping[str, float]) -> None:
        """Take one record. `time_s` is when the learner wrote it, in seconds since 1970."""
        ...

    def flush(self) -> None:
        """Make the records that were written durable, as far as the tool allows."""
        ...

    def close(self) -> None:
        """Flush and disconnect."""
        ...


def scalars_of(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers of a record by name. A number of an inner record is named `outer/inner`, a flag is 0 or 1."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found |= scalars_of(value, f"{prefix}{name}/")
        elif isinstance(value, (bool, int, float)) and math.isfinite(value):
            found[f"{prefix}{name}"] = float(value)
    return found
