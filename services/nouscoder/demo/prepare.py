"""Makes the inputs of a run on the demo's problems: problem files and a warm-started policy.

INVARIANT: existing files are kept, and new ones appear complete under their final name. A repeated call after an
interruption at any point has the same result as one uninterrupted call.

`nouscoder prepare-run` calls `prepare`. `nouscoder demo` runs a process, `python -m nouscoder.demo.prepare CONFIG`,
which writes its progress as JSON lines to stdout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from nouscoder.config import Config, load_config
from nouscoder.data.problems import save_problems
from nouscoder.demo.problems import DemoProblem, Split, problems, prompt_of
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import Limits, StdinTests

# Called with the steps done, the total number of steps, and the loss in nats per program token.
OnProgress = Callable[[int, int, float], None]

# A right program of the demo needs a few milliseconds. An endless one must not occupy a sandbox for long.
DEMO_LIMITS = Limits(wall_time_s=2.0, cpu_time_s=1.0, memory_bytes=256 * 1024**2, output_bytes=64 * 1024, processes=8)


def as_problem(demo: DemoProblem) -> Problem:
    """A demo problem as a domain record."""
    return Problem(
        problem_id=demo.problem_id,
        prompt=prompt_of(demo),
        tests=StdinTests(demo.tests),
        limits=DEMO_LIMITS,
        text_is_code=True,
        family=demo.family,
    )


def write_problems(config: Config) -> tuple[DemoProblem, ...]:
    """Write both problem files. Returns the training problems."""
    train = problems(Split.TRAIN, config.demo.train_problems, seed=config.run.seed)
    held_out = problems(Split.HELD_OUT, config.demo.held_out_problems, seed=config.run.seed)
    _save_once(config.in_run_folder(config.problems.train), train)
    _save_once(config.in_run_folder(config.problems.held_out), held_out)
    return train


def _save_once(path: Path, demos: Iterable[DemoProblem]) -> None:
    if not path.exists():
        save_problems(path, (as_problem(demo) for demo in demos))


def write_policy(config: Config, train: tuple[DemoProblem, ...], on_progress: OnProgress) -> None:
    """Warm-start a policy. Its folder appears complete under its final name."""
    from nouscoder.demo.warmstart import WarmStartBudget, warm_start

    usual = WarmStartBudget()
    stages = ("excerpt_steps", "clean_steps", "noisy_steps")
    share = config.demo.warm_start_share
    steps = {stage: max(1, round(share * getattr(usual, stage))) for stage in stages}
    positions = max(usual.positions, config.generation.max_tokens_total)
    budget = replace(usual, **steps, proposal_share=config.demo.proposal_share, positions=positions)
    warm_start(
        config.in_run_folder(config.policy.path),
        train,
        seed=config.run.seed,
        budget=budget,
        threads=config.demo.warm_start_threads,
        on_progress=on_progress,
    )


def prepare(config: Config, on_progress: OnProgress) -> None:
    """Make the missing problem files and policy of this configuration. `on_progress` is called by the warm start."""
    wanted = (config.problems.train, config.problems.held_out, config.policy.path)
    if all(config.in_run_folder(path).exists() for path in wanted):
        return
    train = write_problems(config)
    if not config.in_run_folder(config.policy.path).exists():
        write_policy(config, train, on_progress)


def _print_progress(done: int, total: int, loss: float) -> None:
    sys.stdout.write(json.dumps({"phase": "warm start", "done": done, "total": total, "loss": loss}) + "\n")
    sys.stdout.flush()


def main(config_file: str) -> None:
    """Prepare the run of this configuration."""
    prepare(load_config(Path(config_file)), _print_progress)


if __name__ == "__main__":
    main(sys.argv[1])
