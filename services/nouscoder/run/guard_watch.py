"""The guards' warnings, from the lines of a run's metrics.jsonl.

The guards (domain/guards.py) judge the batches in metrics.jsonl.

INVARIANT: a batch with a mismatch above run.guards.mismatch_stop that is trained while a GuardWatch looks makes `look`
raise SamplerMismatch. Batches that were there before do not, so a run can be resumed with what mends it.

INVARIANT: a guard's warning is returned once. It is returned again only after a batch for which the guard is silent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nouscoder.config import GuardsSection
from nouscoder.domain.guards import BatchFigures, Guard, Thresholds, mismatch_sentence, warnings
from nouscoder.run.learning_signal import SamplerMismatch
from nouscoder.run.sinks.follower import MetricsTail


class GuardWatch:
    """Reads the new lines of one run's metrics.jsonl at each look."""

    def __init__(self, run: Path, settings: GuardsSection) -> None:
        self._tail = MetricsTail(run / "metrics.jsonl")
        self._thresholds = settings.record(Thresholds)
        self._batches: dict[int, BatchFigures] = {}
        self._said: set[Guard] = set()
        self._read()

    def look(self) -> list[str]:
        """The warnings that are new, each with the name of its guard. Raises SamplerMismatch."""
        new = self._read()
        limit = self._thresholds.mismatch_stop
        worst = max((figures.mismatch or 0.0 for figures in new), default=0.0)
        if limit and worst > limit:
            raise SamplerMismatch(
                f"the run ended: {mismatch_sentence(worst, limit)}. Mend it and resume, or set run.guards.mismatch_stop"
            )
        found = self._warnings()
        said = [f"warning: {guard}: {sentence}" for guard, sentence in found.items() if guard not in self._said]
        self._said = set(found)
        return said

    @property
    def standing(self) -> list[str]:
        """All warnings of the batches up to now."""
        self._read()
        return [f"warning: {guard}: {sentence}" for guard, sentence in self._warnings().items()]

    def _read(self) -> list[BatchFigures]:
        """The figures of the batches that have new lines."""
        records = [record for record in self._tail.new_records() if "batch_id" in record]
        for record in records:
            known = self._batches.get(record["batch_id"])
            self._batches[record["batch_id"]] = _figures(record, known)
        return [self._batches[number] for number in dict.fromkeys(record["batch_id"] for record in records)]

    def _warnings(self) -> dict[Guard, str]:
        return warnings([*self._batches.values()], self._thresholds)


def _figures(line: dict[str, Any], earlier: BatchFigures | None) -> BatchFigures:
    """Those of a step's line. A step may have no fresh rollout: then the figure is that of an `earlier` step."""
    return BatchFigures(
        entropy=line.get("entropy"),
        length=line.get("response_length"),
        repetition_share=line.get("repetition_share"),
        hard_coding_share=line.get("hard_coding_share"),
        same_programs=line.get("same_programs"),
        model_reward_correlation=line.get("model_reward_correlation"),
        mismatch=line.get("mismatch_fresh_abs_mean", None if earlier is None else earlier.mismatch),
    )
