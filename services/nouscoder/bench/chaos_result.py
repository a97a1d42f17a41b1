"""What became of a run under chaos, and which promises it broke."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Trained:
    """What the learner trained, by its own books.

    `steps` are the lines of metrics.jsonl. `in_order`: they are 1, 2, 3 ... without a gap. `longest_gap_s`: between a
    step and the next one. `rollouts` are those of committed batches; `rollouts_twice` are in two saved batches.
    """

    steps: int
    in_order: bool
    longest_gap_s: float
    rollouts: int
    rollouts_twice: int


@dataclass(frozen=True, slots=True)
class ChaosResult:
    """What became of the run.

    `chaos_s`: seconds from the first step to the end of the last fault. `faults`: how often each one came. `num_pairs`
    times two came at the same moment, and `num_forgettings` times Redis lost acknowledged writes. `rollouts_committed`
    and `rollouts_lost` are the broker's counts. The ledger of `num_unbalanced` of `num_statuses` did not balance.
    `ended`: the run made further steps after the last fault, and its learner ended.
    """

    seed: int
    chaos_s: float
    num_cores: int
    load_average: float
    faults: dict[str, int]
    num_pairs: int
    num_forgettings: int
    trained: Trained
    rollouts_committed: int
    rollouts_lost: int
    num_statuses: int
    num_unbalanced: int
    ended: bool

    @property
    def complaints(self) -> list[str]:
        """Every promise that the run broke."""
        trained = self.trained
        complaints = []
        if trained.rollouts_twice:
            complaints.append(f"{trained.rollouts_twice} rollouts were trained on twice")
        if not trained.in_order:
            complaints.append("a step is missing, or came twice")
        if self.rollouts_committed != trained.rollouts:
            counts = f"the broker counts {self.rollouts_committed} trained rollouts, the learner {trained.rollouts}"
            complaints.append(counts)
        if self.num_unbalanced:
            complaints.append(f"{self.num_unbalanced} of {self.num_statuses} statuses do not balance")
        if not self.ended:
            complaints.append("the run did not end")
        return complaints


def as_text(result: ChaosResult) -> str:
    """The figures as readable lines."""
    faults = [f"{number} x {name}" for name, number in result.faults.items()]
    trained = result.trained
    return "\n".join(
        [
            f"seed {result.seed}, {result.chaos_s:.0f} s on {result.num_cores} cores,"
            f" load {result.load_average:.1f} at the start",
            f"{sum(result.faults.values())} faults, {result.num_pairs} times two at once: {', '.join(faults)}",
            f"{trained.steps} steps, each once and in order: {'yes' if trained.in_order else 'no'}; the longest gap"
            f" between two: {trained.longest_gap_s:.1f} s",
            f"{trained.rollouts} rollouts trained, {trained.rollouts_twice} of them twice by the learner's books",
            f"Redis forgot writes {result.num_forgettings} times; {result.rollouts_lost} rollouts are counted as lost",
            f"{result.num_statuses} statuses, {result.num_unbalanced} unbalanced; the run ended:"
            f" {'yes' if result.ended else 'no'}",
            *(f"BROKEN: {complaint}" for complaint in result.complaints),
        ]
    )


def as_record(result: ChaosResult) -> dict[str, Any]:
    """The figures as a record for scripts."""
    return {**asdict(result), "complaints": result.complaints}
