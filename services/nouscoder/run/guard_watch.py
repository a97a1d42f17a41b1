"""Applies the guards (domain/guards.py) to the batches in metrics.jsonl, and returns their warnings.

INVARIANT: a guard's warning is returned once. It is returned again only after a batch for which the guard is silent.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nouscoder.config import GuardsSection
from nouscoder.domain.guards import BatchFigures, Guard, Thresholds, warnings


class GuardWatch:
    """Reads the new lines of one run's metrics.jsonl at each look."""

    def __init__(self, run: Path, settings: GuardsSection) -> None:
        self._file = run / "metrics.jsonl"
        self._thresholds = Thresholds(
            settings.entropy_floor,
            settings.repetition_share,
            settings.length_drift,
            settings.hard_coding_share,
            settings.same_programs,
        )
        self._offset = 0
        self._batches: dict[int, BatchFigures] = {}
        self._said: set[Guard] = set()

    def look(self) -> list[str]:
        """The warnings that are new, each with the name of its guard."""
        if not self._read():
            return []
        found = warnings([*self._batches.values()], self._thresholds)
        new = [f"warning: {guard}: {sentence}" for guard, sentence in found.items() if guard not in self._said]
        self._said = set(found)
        return new

    def _read(self) -> bool:
        """Take the lines that were added. Returns whether there were any. The learner may be writing a line."""
        try:
            with self._file.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._offset:  # a restarted learner removed lines, which it writes again
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return False
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for text in whole.splitlines():
            try:
                line = json.loads(text)
                self._batches[line["batch_id"]] = _figures(line)
            except (ValueError, KeyError, TypeError):  # torn by a crash; the learner repairs it at its start
                continue
        return bool(whole)


def _figures(line: dict[str, Any]) -> BatchFigures:
    return BatchFigures(
        entropy=line.get("entropy"),
        length=line.get("response_length"),
        repetition_share=line.get("repetition_share"),
        hard_coding_share=line.get("hard_coding_share"),
        same_programs=line.get("same_programs"),
    )
