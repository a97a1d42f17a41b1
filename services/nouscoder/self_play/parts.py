"""The parts of a round: each is a run in a folder inside that of the self-play."""

from __future__ import annotations

from pathlib import Path

from nouscoder.config import Config

PROPOSE, TRAIN = "propose", "train"


def part_folder(config: Config, number: int, part: str) -> Path:
    """The folder of a part of round `number`, which counts from 1. `config` is that of the self-play."""
    return config.run.folder / f"{number:02d}-{part}"


def part_config(config: Config, number: int, part: str, total_batches: int, **inputs: Path) -> Config:
    """The configuration of a part of a round, in a folder inside that of the self-play. Each round has its seed.

    `inputs`: `policy`, and `train` when it is not the seed file.
    """
    name = f"{config.run.name}/{part_folder(config, number, part).name}"
    seed = config.run.seed * 100 + number
    run = config.run.model_copy(update={"name": name, "seed": seed, "total_batches": total_batches})
    policy = config.policy.model_copy(update={"path": inputs["policy"]})
    problems = config.problems
    if "train" in inputs:
        problems = problems.model_copy(update={"train": inputs["train"], "index": "", "tests": ""})
    return config.model_copy(update={"run": run, "policy": policy, "problems": problems})
