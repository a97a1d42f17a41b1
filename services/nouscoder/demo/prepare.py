"""Makes what the demo starts from: problem files and a warm-started policy. Its own process: it is the one that trains.

Called as `python -m nouscoder.demo.prepare CONFIG`; tells its progress as JSON lines on stdout. What is there is kept,
so a second call goes on where the first was stopped.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from nouscoder.config import Config, load_config
from nouscoder.data.problems import save_problems
from nouscoder.demo.problems import DemoProblem, Split, problems, prompt_of
from nouscoder.problem import Problem
from nouscoder.submission import Limits, StdinTests

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


def write_policy(config: Config, train: tuple[DemoProblem, ...]) -> None:
    """Warm-start a policy and put its folder in place whole."""
    import torch

    from nouscoder.demo.policy import build_policy, save_policy
    from nouscoder.demo.warmstart import WarmStartBudget, WarmStartProgress, warm_start

    def tell(progress: WarmStartProgress) -> None:
        _say({"phase": "warm start", "done": progress.step, "total": progress.num_steps, "loss": progress.loss})

    torch.set_num_threads(config.demo.warm_start_threads)
    policy = build_policy(seed=config.run.seed)
    usual = WarmStartBudget()
    stages = ("excerpt_steps", "clean_steps", "noisy_steps")
    share = config.demo.warm_start_share
    budget = replace(usual, **{stage: max(1, round(share * getattr(usual, stage))) for stage in stages})
    warm_start(policy, train, seed=config.run.seed, budget=budget, on_progress=tell)
    folder = config.in_run_folder(config.policy.path)
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    save_policy(policy, part)
    part.replace(folder)


def _say(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main(config_file: str) -> None:
    """Prepare the run of this configuration."""
    config = load_config(Path(config_file))
    train = write_problems(config)
    if not config.in_run_folder(config.policy.path).exists():
        write_policy(config, train)


if __name__ == "__main__":
    main(sys.argv[1])
