"""Makes what a run of the demo's problems starts from: problem files and a warm-started policy.

INVARIANT: what is there is kept, and what is made appears whole under its name: called again after it was stopped
anywhere, it ends as if it had never been stopped.

`nouscoder prepare-run` calls it; `nouscoder demo` runs it as a process of its own, `python -m nouscoder.demo.prepare
CONFIG`, which tells its progress as JSON lines on stdout.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from nouscoder.config import Config, load_config
from nouscoder.data.problems import save_problems
from nouscoder.demo.problems import DemoProblem, Split, problems, prompt_of
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import Limits, StdinTests

# Steps done, steps in all, loss in nats a program token.
Tell = Callable[[int, int, float], None]

# A program of the demo needs some milliseconds; an endless one must not hold a sandbox for long.
DEMO_LIMITS = Limits(wall_time_s=2.0, cpu_time_s=1.0, memory_bytes=256 * 1024**2, output_bytes=64 * 1024, processes=8)


def as_problem(demo: DemoProblem) -> Problem:
    """A demo problem in the product's form."""
    return Problem(
        problem_id=demo.problem_id,
        prompt=prompt_of(demo),
        tests=StdinTests(demo.tests),
        limits=DEMO_LIMITS,
        text_is_code=True,
        family=demo.family,
    )


def write_problems(config: Config) -> tuple[DemoProblem, ...]:
    """Write both problem files and answer the training problems."""
    train = problems(Split.TRAIN, config.demo.train_problems, seed=config.run.seed)
    held_out = problems(Split.HELD_OUT, config.demo.held_out_problems, seed=config.run.seed)
    _save_once(config.in_run_folder(config.problems.train), train)
    _save_once(config.in_run_folder(config.problems.held_out), held_out)
    return train


def _save_once(path: Path, demos: Iterable[DemoProblem]) -> None:
    if not path.exists():
        save_problems(path, (as_problem(demo) for demo in demos))


def write_policy(config: Config, train: tuple[DemoProblem, ...], tell: Tell) -> None:
    """Warm-start a policy and put its folder in place whole."""
    import torch

    from nouscoder.demo.policy import build_policy, save_policy
    from nouscoder.demo.warmstart import WarmStartBudget, WarmStartProgress, warm_start

    def on_progress(progress: WarmStartProgress) -> None:
        tell(progress.step, progress.num_steps, progress.loss)

    torch.set_num_threads(config.demo.warm_start_threads)
    policy = build_policy(seed=config.run.seed)
    usual = WarmStartBudget()
    stages = ("excerpt_steps", "clean_steps", "noisy_steps")
    share = config.demo.warm_start_share
    budget = replace(usual, **{stage: max(1, round(share * getattr(usual, stage))) for stage in stages})
    warm_start(policy, train, seed=config.run.seed, budget=budget, on_progress=on_progress)
    folder = config.in_run_folder(config.policy.path)
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    save_policy(policy, part)
    part.replace(folder)


def prepare(config: Config, tell: Tell) -> None:
    """Problems and policy of this configuration, those that are not there yet; `tell` hears of the warm start."""
    wanted = (config.problems.train, config.problems.held_out, config.policy.path)
    if all(config.in_run_folder(path).exists() for path in wanted):
        return
    train = write_problems(config)
    if not config.in_run_folder(config.policy.path).exists():
        write_policy(config, train, tell)


def _say(done: int, total: int, loss: float) -> None:
    sys.stdout.write(json.dumps({"phase": "warm start", "done": done, "total": total, "loss": loss}) + "\n")
    sys.stdout.flush()


def main(config_file: str) -> None:
    """Prepare the run of this configuration."""
    prepare(load_config(Path(config_file)), _say)


if __name__ == "__main__":
    main(sys.argv[1])
