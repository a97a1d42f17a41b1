"""`nouscoder bench objectives`: the demo learns with each objective, and strictly on-policy.

    ROOT/inputs-0     problems, the warm-started policy and its pass@1, for all runs of seed 0
    ROOT/gspo-0       the run of GSPO with seed 0: real services, as `nouscoder demo`
    ROOT/result.json  the figures of all finished runs (objective_figures.py), and plot.svg (objective_plot.py)

All runs of one seed begin with the same policy and have the same problems, learning rate, number of optimizer steps and
number of rollouts in a step. Those that are named after an objective differ in the objective and its advantages only.
`on-policy` is DAPO with one step a batch and one batch in flight, so every token is of the policy that trains on it.

INVARIANT: the state of the bench is that of its run folders. A run whose summary.json is there is not run again, and an
interrupted one continues. A run folder of other settings is refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nouscoder.atomic_files import write_whole
from nouscoder.bench.errors import BenchError
from nouscoder.bench.objective_figures import ObjectiveBench, as_record, figures_of
from nouscoder.bench.objective_plot import plot
from nouscoder.config import Config, load_config
from nouscoder.config.base import keys_of
from nouscoder.config.tree import recipe_path
from nouscoder.demo.run import prepare_and_run
from nouscoder.nearest_name import did_you_mean
from nouscoder.run.folder import RunFolder
from nouscoder.run.loop import run_loop
from nouscoder.run.view import View

OBJECTIVES: dict[str, tuple[str, ...]] = {
    "dapo": ("learner.objective.name=dapo",),
    "gspo": ("learner.objective.name=gspo",),
    "gspo-plus": ("learner.objective.name=gspo", "learner.objective.aggregation=token_mean"),
    "gppo": ("learner.objective.name=gppo",),
    "cispo": ("learner.objective.name=cispo",),
    "reinforce-plus-plus": (
        "learner.objective.name=reinforce_plus_plus",
        "learner.advantage.estimator=batch_token_whitened",
    ),
}
ON_POLICY = "on-policy"
VARIANTS = (*OBJECTIVES, ON_POLICY)

# Each start chooses them anew.
_ADDRESSES = ("grpc", "metrics", "redis_url")


@dataclass(frozen=True, slots=True)
class ObjectivePlan:
    """What to run. `num_batches` counts batches of the demo; on-policy runs have as many steps in smaller batches.

    Each of `num_held_out` problems is sampled `num_samples` times for pass@1. `overrides` are for every run.
    """

    root: Path
    num_seeds: int = 3
    num_batches: int = 40
    variants: tuple[str, ...] = VARIANTS
    num_held_out: int = 400
    num_samples: int = 2
    overrides: tuple[str, ...] = ()

    def config_of_inputs(self, seed: int) -> Config:
        """The run that makes the inputs of a seed and measures its first policy."""
        return self._config(f"inputs-{seed}", seed, ["run.total_batches=0"])

    def config_of_run(self, variant: str, seed: int) -> Config:
        """The run of a variant. Raises BenchError for an unknown one."""
        inputs = self.config_of_inputs(seed).run.folder
        shared = [
            f'problems.train="{inputs / "problems" / "train.jsonl"}"',
            f'problems.held_out="{inputs / "problems" / "held_out.jsonl"}"',
            f'policy.path="{inputs / "policy"}"',
        ]
        return self._config(f"{variant}-{seed}", seed, [*shared, *self._overrides_of(variant)])

    def _overrides_of(self, variant: str) -> tuple[str, ...]:
        batches = f"run.total_batches={self.num_batches}"
        if variant in OBJECTIVES:
            return (batches, *OBJECTIVES[variant])
        if variant != ON_POLICY:
            raise BenchError(f"there is no variant {variant!r}{did_you_mean(variant, VARIANTS)}")
        demo = self._config("demo", 0, [])
        return (
            *OBJECTIVES["dapo"],
            f"run.total_batches={self.num_batches * demo.learner.steps_per_batch}",
            f"broker.batch_size={demo.broker.batch_size // demo.learner.steps_per_batch}",
            "learner.steps_per_batch=1",
            "broker.pipeline_k=1",
            "broker.max_staleness=0",
        )

    def _config(self, name: str, seed: int, changes: Sequence[str]) -> Config:
        own = [
            f'run.root="{self.root.resolve()}"',
            f'run.name="{name}"',
            f"run.seed={seed}",
            f"demo.held_out_problems={self.num_held_out}",
            f"problems.held_out_samples={self.num_samples}",
        ]
        return load_config(recipe_path("demo"), [*own, *self.overrides, *changes])


async def run_missing(plan: ObjectivePlan, view: View) -> None:
    """Run what is not finished, all variants of one seed before the next seed. Raises NousCoderError."""
    for seed in range(plan.num_seeds):
        runs = [(variant, plan.config_of_run(variant, seed)) for variant in plan.variants]
        before = await _prepare(plan.config_of_inputs(seed), view)
        for variant, config in runs:
            view.say(f"{variant}, seed {seed}")
            await _run(config, before, view)
            write_result(plan)


def result_of(plan: ObjectivePlan) -> ObjectiveBench:
    """The figures of the runs that are finished."""
    folders = [
        (variant, plan.config_of_run(variant, seed).run.folder)
        for variant in plan.variants
        for seed in range(plan.num_seeds)
    ]
    return ObjectiveBench(
        tuple(figures_of(folder, variant) for variant, folder in folders if (folder / "summary.json").exists())
    )


def write_result(plan: ObjectivePlan) -> None:
    """Write result.json and plot.svg. Raises StorageError."""
    result = result_of(plan)
    write_whole(plan.root / "result.json", (json.dumps(as_record(result), indent=1) + "\n").encode())
    write_whole(plan.root / "plot.svg", plot(result).encode())


async def _prepare(config: Config, view: View) -> dict[str, Any]:
    """Make the inputs of a seed. Returns the evaluation of its first policy."""
    folder, config = _open(config)
    try:
        if not folder.summary_file.exists():
            await prepare_and_run(folder, config, view, time.monotonic())
        evaluation = folder.read_json("evaluation_before.json")
    finally:
        folder.close()
    assert evaluation is not None, "a finished run has it"
    return evaluation


async def _run(config: Config, before: dict[str, Any], view: View) -> None:
    """Run one variant unless it is finished. `before` is the evaluation of its first policy."""
    folder, config = _open(config)
    try:
        if folder.summary_file.exists():
            return
        folder.write_json("evaluation_before.json", before)
        await run_loop(folder, config, view, time.monotonic())
    finally:
        folder.close()


def _open(config: Config) -> tuple[RunFolder, Config]:
    """A new run folder, or that of an earlier start and its configuration. Raises BenchError for other settings."""
    path = config.run.folder
    if not (path / "config.toml").exists():
        return RunFolder.create(config), config
    folder, recorded = RunFolder.reopen(path)
    for key in keys_of(Config):
        is_setting = key.place is None and key.path[-1] not in _ADDRESSES
        if is_setting and _value(recorded, key.path) != _value(config, key.path):
            folder.close()
            raise BenchError(f"{path} holds a run with another {key.name}: remove it, or choose another --root")
    return folder, recorded


def _value(config: Config, path: Sequence[str]) -> object:
    value: object = config
    for part in path:
        value = getattr(value, part, None)
    return value
