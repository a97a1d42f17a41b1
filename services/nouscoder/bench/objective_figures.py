"""The figures of `nouscoder bench objectives`, read from run folders, and their tables."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run. Standard errors of pass@1 are those over the held-out problems.

    staleness_mean: policy versions by which the oldest token of a rollout was behind, mean over the batches.
    seconds_per_step: wall time between the end of the first batch and that of the last one, by the steps between them.
    """

    variant: str
    seed: int
    steps: int
    pass_at_1_before: float
    standard_error_before: float
    pass_at_1_after: float
    standard_error_after: float
    staleness_mean: float
    seconds_per_step: float

    @property
    def gain(self) -> float:
        """The rise of pass@1."""
        return self.pass_at_1_after - self.pass_at_1_before


@dataclass(frozen=True, slots=True)
class ObjectiveBench:
    """The runs, those of one variant one after another."""

    runs: tuple[RunFigures, ...]

    def of(self, variant: str) -> tuple[RunFigures, ...]:
        """The runs of a variant."""
        return tuple(run for run in self.runs if run.variant == variant)

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants that have runs."""
        return tuple(dict.fromkeys(run.variant for run in self.runs))


@dataclass(frozen=True, slots=True)
class Difference:
    """Two variants with the same seeds: pass@1 after the first minus the second, and its standard error over seeds.

    speed_up: seconds per step of the second by those of the first, mean over seeds.
    """

    num_seeds: int
    pass_at_1: float
    standard_error: float | None
    speed_up: float


def figures_of(folder: Path, variant: str) -> RunFigures:
    """The figures of a finished run."""
    summary, before, after = (
        json.loads((folder / name).read_text(encoding="utf8"))
        for name in ("summary.json", "evaluation_before.json", "evaluation_after.json")
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf8").splitlines()]
    later = [line for line in lines if line["batch_id"] != lines[0]["batch_id"]]
    started = max(line["time"] for line in lines if line["batch_id"] == lines[0]["batch_id"])
    return RunFigures(
        variant=variant,
        seed=summary["seed"],
        steps=summary["steps"],
        pass_at_1_before=before["pass_at_1"],
        standard_error_before=before["standard_error"],
        pass_at_1_after=after["pass_at_1"],
        standard_error_after=after["standard_error"],
        staleness_mean=fmean(line["staleness_mean"] for line in lines),
        seconds_per_step=(later[-1]["time"] - started) / len(later),
    )


def difference(bench: ObjectiveBench, first: str, second: str) -> Difference | None:
    """Compare two variants on the seeds that both have. None when there is no such seed."""
    seconds = {run.seed: run for run in bench.of(second)}
    pairs = [(run, seconds[run.seed]) for run in bench.of(first) if run.seed in seconds]
    if not pairs:
        return None
    changes = [one.pass_at_1_after - other.pass_at_1_after for one, other in pairs]
    speed_up = fmean(other.seconds_per_step / one.seconds_per_step for one, other in pairs)
    return Difference(len(pairs), fmean(changes), standard_error(changes), speed_up)


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean of `values`: s / sqrt(n). None for fewer than two."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def as_record(bench: ObjectiveBench) -> dict[str, Any]:
    """For JSON."""
    pipelined = difference(bench, "dapo", "on-policy")
    return {"runs": [asdict(run) for run in bench.runs], "dapo_minus_on_policy": pipelined and asdict(pipelined)}


def as_text(bench: ObjectiveBench) -> str:
    """A Markdown table of all variants, and the comparison with on-policy training if its runs are there."""
    seeds = sorted({run.seed for run in bench.runs})
    heads = ["", *(f"seed {seed}" for seed in seeds), "mean gain", "staleness", "s per step"]
    rows = [heads, ["---"] * len(heads), *(_row(name, bench.of(name), seeds) for name in bench.variants)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    pipelined = difference(bench, "dapo", "on-policy")
    if pipelined is not None:
        lines += ["", _sentence(pipelined)]
    return "\n".join(lines)


def _row(name: str, runs: Sequence[RunFigures], seeds: Sequence[int]) -> list[str]:
    by_seed = {run.seed: f"{run.pass_at_1_before:.3f} to {run.pass_at_1_after:.3f}" for run in runs}
    return [
        name,
        *(by_seed.get(seed, "") for seed in seeds),
        _with_error("+.3f", fmean(run.gain for run in runs), standard_error([run.gain for run in runs])),
        f"{fmean(run.staleness_mean for run in runs):.2f}",
        f"{fmean(run.seconds_per_step for run in runs):.2f}",
    ]


def _sentence(pipelined: Difference) -> str:
    points = _with_error("+.1f", 100 * pipelined.pass_at_1, _times(100, pipelined.standard_error))
    return f"dapo minus on-policy: {points} points of pass@1, {pipelined.speed_up:.2f} times its steps per second"


def _with_error(form: str, value: float, error: float | None) -> str:
    return f"{value:{form}}" if error is None else f"{value:{form}} +- {error:{form[1:]}}"


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value
