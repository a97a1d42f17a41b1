"""Applies the guards (domain/guards.py) to the batches in metrics.jsonl, and returns their warnings.

INVARIANT: a guard's warning is returned once. It is returned again only after a batch for which the guard is silent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nouscoder.config import GuardsSection
from nouscoder.domain.guards import BatchFigures, Guard, Thresholds, warnings
from nouscoder.run.metrics_tail import MetricsTail


class GuardWatch:
    """Reads the new lines of one run's metrics.jsonl at each look."""

    def __init__(self, run: Path, settings: GuardsSection) -> None:
        self._tail = MetricsTail(run / "metrics.jsonl")
        self._thresholds = settings.record(Thresholds)
        self._batches: dict[int, BatchFigures] = {}
        self._said: set[Guard] = set()

    def look(self) -> list[str]:
        """The warnings that are new, each with the name of its guard."""
        records = self._tail.new_records()
        if not records:
            return []
        self._batches |= {record["batch_id"]: _figures(record) for record in records if "batch_id" in record}
        found = warnings([*self._batches.values()], self._thresholds)
        new = [f"warning: {guard}: {sentence}" for guard, sentence in found.items() if guard not in self._said]
        self._said = set(found)
        return new


def _figures(line: dict[str, Any]) -> BatchFigures:
    return BatchFigures(
        entropy=line.get("entropy"),
        length=line.get("response_length"),
        repetition_share=line.get("repetition_share"),
        hard_coding_share=line.get("hard_coding_share"),
        same_programs=line.get("same_programs"),
        model_reward_correlation=line.get("model_reward_correlation"),
    )
