"""The parts of a round: each is a run in a folder inside that of the self-play."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

from nouscoder.atomic_files import write_whole
from nouscoder.config import Config
from nouscoder.data.problem_index import ProblemIndex
from nouscoder.data.problem_parquet import load_problems
from nouscoder.data.problems import save_problems
from nouscoder.domain.curriculum import ProblemStatistics
from nouscoder.domain.problem import Problem
from nouscoder.domain.proposal_pool import PooledProblem, PoolRules, next_pool
from nouscoder.learner.state.curriculum_copy import FILE as CURRICULUM
from nouscoder.learner.state.curriculum_copy import read_copy
from nouscoder.self_play.round import ACCEPTED, JUDGED

PROPOSE, TRAIN = "propose", "train"


def part_folder(config: Config, number: int, part: str) -> Path:
    """The folder of a part of round `number`, which counts from 1. `config` is that of the self-play."""
    return config.run.folder / f"{number:02d}-{part}"


def part_config(config: Config, number: int, part: str, total_batches: int, **inputs: Path) -> Config:
    """A part's configuration, with a seed for each round. `inputs`: `policy`, and `train` if not the seed file."""
    name = f"{config.run.name}/{part_folder(config, number, part).name}"
    seed = config.run.seed * 100 + number
    run = config.run.model_copy(update={"name": name, "seed": seed, "total_batches": total_batches})
    policy = config.policy.model_copy(update={"path": inputs["policy"]})
    problems = config.problems
    if "train" in inputs:
        problems = problems.model_copy(update={"train": inputs["train"], "index": "", "tests": ""})
    return config.model_copy(update={"run": run, "policy": policy, "problems": problems})


POOL, PROBLEMS = "pool.json", "problems.jsonl"


def accepted_in(config: Config, number: int) -> list[Problem]:
    """The accepted problems of a round."""
    file = part_folder(config, number, PROPOSE) / ACCEPTED
    return load_problems(file) if file.stat().st_size else []


def accepted_before(config: Config, number: int) -> list[Problem]:
    """Those of all rounds before this one."""
    return [problem for earlier in range(1, number) for problem in accepted_in(config, earlier)]


def judgements_in(config: Config, number: int) -> list[dict[str, Any]]:
    """The records of judged.jsonl of a round."""
    file = part_folder(config, number, PROPOSE) / JUDGED
    return [json.loads(line) for line in file.read_text(encoding="utf8").splitlines()]


def pool_record(config: Config, number: int) -> dict[str, Any]:
    """pool.json of a round."""
    return read_json(part_folder(config, number, PROPOSE) / POOL)


def pool_of(config: Config, number: int) -> tuple[PooledProblem, ...]:
    """The pool with which a round trains; before the first round it is empty."""
    return tuple(PooledProblem(**one) for one in pool_record(config, number)["pool"]) if number else ()


def advance_pool(config: Config, number: int) -> None:
    """Write the pool of a round once: that of the round before, without what was retired, and the newly accepted."""
    file = part_folder(config, number, PROPOSE) / POOL
    if file.exists():
        return
    rates = {one["problem_id"]: one["pass_rate"] for one in judgements_in(config, number) if one["problem_id"]}
    accepted = [PooledProblem(name, rate) for name, rate in rates.items()]
    settings = config.self_play
    rules = settings.record(PoolRules, size=settings.pool_size)
    change = next_pool(pool_of(config, number - 1), _trained(config, number - 1), accepted, rules)
    record = {"pool": [asdict(one) for one in change.pool], "retired": dict(change.retired)}
    write_whole(file, (json.dumps(record, indent=1) + "\n").encode())


def write_problems(config: Config, number: int, index: ProblemIndex) -> None:
    """Write the problems of a round's training once: the pool, and as many seed problems as its share leaves room for.

    Without a pool they are all seed problems. The seed problems are chosen anew in each round.
    """
    file = part_folder(config, number, PROPOSE) / PROBLEMS
    if file.exists():
        return
    in_pool = {one.problem_id for one in pool_of(config, number)}
    pooled = [one for one in accepted_before(config, number + 1) if one.problem_id in in_pool]
    share, seeds = config.self_play.pool_share, [*index.problem_ids]
    if pooled:
        count = min(len(seeds), round(len(pooled) * (1 - share) / share))
        seeds = Random(f"{config.run.seed}/self-play/{number}/seeds").sample(seeds, count)
    save_problems(file, _with_seeds(pooled, seeds, index))


def _with_seeds(pooled: list[Problem], seeds: list[str], index: ProblemIndex) -> Iterator[Problem]:
    yield from pooled
    for name in seeds:
        problem = index.problem(name)
        with index.tests.opened(problem.tests_digest) as tests:
            yield problem.with_tests(tests)


def _trained(config: Config, number: int) -> dict[str, ProblemStatistics]:
    """What the training of a round found of each problem; nothing before the first."""
    copy: Path = part_folder(config, number, TRAIN) / CURRICULUM
    state = read_copy(copy) if number else None
    return {} if state is None else {one.problem_id: one for one in state.problems}


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf8"))
    return record
