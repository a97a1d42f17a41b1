"""The figures of a finished run: summary.json, and the last lines on the screen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nouscoder.config import Config
from nouscoder.domain.plan import Evaluated
from nouscoder.domain.run_status import Ledger


@dataclass(frozen=True, slots=True)
class RunSummary:
    """summary.json. `learning_seconds` counts from the start of the command; a resumed run adds its earlier time."""

    name: str
    seed: int
    steps: int
    pass_at_1_before: float
    pass_at_1_after: float
    learning_seconds: float
    ledger: Ledger
    balanced: bool


def summarize(
    config: Config, before: Evaluated, after: Evaluated, learning_seconds: float, ledger: Ledger
) -> RunSummary:
    """The summary of a run with these evaluations of its first and last policy."""
    return RunSummary(
        name=config.run.name,
        seed=config.run.seed,
        steps=after.policy_version * config.learner.steps_per_batch,
        pass_at_1_before=before.pass_at_1,
        pass_at_1_after=after.pass_at_1,
        learning_seconds=round(learning_seconds, 1),
        ledger=ledger,
        balanced=ledger.balanced,
    )


def closing_lines(summary: RunSummary, report: Path) -> list[str]:
    """The last lines on the screen after the run."""
    gain = summary.pass_at_1_after - summary.pass_at_1_before
    return [
        f"pass@1 on held-out problems: {summary.pass_at_1_before:.3f} before, {summary.pass_at_1_after:.3f} after"
        f" {summary.steps} steps ({gain:+.3f})",
        f"ledger {'balanced' if summary.balanced else 'NOT BALANCED'}; {summary.learning_seconds:.0f} s in all",
        f"report: {report}",
    ]
