"""Reads the records that were added to a metrics.jsonl since the last look. The learner may be writing a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class MetricsTail:
    """The place in one file. After a restarted learner has removed lines, the whole file is read again."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0

    def new_records(self) -> list[dict[str, Any]]:
        """The whole lines that were added, without those that a crash has torn: the learner repairs them."""
        try:
            with self._file.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [record for text in whole.splitlines() if isinstance(record := _parsed(text), dict)]


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
