"""`nouscoder self-play`: rounds of proposing problems and of training on those that were accepted.

    runs/NAME-self-play/config.toml      the configuration, as the self-play was begun
    runs/NAME-self-play/01-propose/      proposals, runs, judgements, the proposer's steps
      accepted.jsonl                     the problems that were accepted in this round
      pool.json                          the pool with which this round trains, and what left it before
      problems.jsonl                     the problems of the pool, and seed problems
    runs/NAME-self-play/01-train/        an ordinary run on seed problems and the pool
    runs/NAME-self-play/policies/01/     the policy after round 1, with which the next one begins
    runs/NAME-self-play/self_play.json   the result of each round

INVARIANT: the state of a self-play is its files, and each step makes its own once, whole. So one that was killed at any
point goes on with `resume` and does no step twice. The files of a round follow from those of the rounds before and from
its accepted proposals.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from rich.console import Console

from nouscoder.atomic_files import write_whole
from nouscoder.config import Config, ConfigError
from nouscoder.config.run import PlanSection
from nouscoder.config.tree import NOTHING_GIVEN, Given
from nouscoder.data.problem_index import ProblemIndex, open_index
from nouscoder.data.problem_parquet import load_problems
from nouscoder.data.problems import save_problems
from nouscoder.domain.curriculum import ProblemStatistics
from nouscoder.domain.problem import Problem
from nouscoder.domain.proposal_pool import PooledProblem, PoolRules, next_pool
from nouscoder.learner.state.curriculum_copy import FILE as CURRICULUM
from nouscoder.learner.state.curriculum_copy import read_copy
from nouscoder.policy_folder.compose import compose_policy
from nouscoder.policy_folder.prompt_file import trained_prompt
from nouscoder.run.evaluation import weights_folder
from nouscoder.run.folder import RunFolder, newest_version
from nouscoder.run.loop import interruptible, run_loop
from nouscoder.run.preflight import checked, with_policy_folder
from nouscoder.run.resume import note_given, reopened
from nouscoder.run.services import deployment
from nouscoder.run.view import View, open_view
from nouscoder.self_play.proposing import METRICS, graded_proposals, propose, train_proposer
from nouscoder.self_play.round import ACCEPTED, JUDGED, Known

# The parts of a round: each is a run in a folder inside that of the self-play.

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
    return _read(part_folder(config, number, PROPOSE) / POOL)


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


# The result of a self-play: self_play.json, and the same in words. It is made of the files of the finished rounds.

RESULT = "self_play.json"


def result_of(config: Config, rounds: int, policy: Path) -> dict[str, Any]:
    """The record after `rounds` rounds. `policy` is the folder of the policy after them."""
    records = [_round_summary(config, number) for number in range(1, rounds + 1)]
    proposals, accepted = (sum(one.get(name, 0) for one in records) for name in ("proposals", "accepted"))
    return {
        "name": config.run.name,
        "seed": config.run.seed,
        "policy": str(policy),
        "proposals": proposals,
        "accepted": accepted,
        "accepted_share": accepted / proposals if proposals else None,
        "rejected": dict(sum((Counter(one.get("rejected", {})) for one in records), Counter()).most_common()),
        "steps": sum(one["steps"] for one in records),
        "proposer_steps": sum(one.get("proposer_steps", 0) for one in records),
        # The first training begins after the first steps of the proposer, so this is not the first policy's.
        "first_training_before": records[0]["before"],
        "after": records[-1]["after"],
        "rounds": records,
    }


def _round_summary(config: Config, number: int) -> dict[str, Any]:
    training = part_folder(config, number, TRAIN)
    summary = _read(training / "summary.json")
    record: dict[str, Any] = {"round": number}
    if config.self_play.proposals:
        record |= _proposed(config, number)
    return record | {
        "steps": summary["steps"],
        "before": _evaluation(training / "evaluation_before.json"),
        "after": _evaluation(training / "evaluation_after.json"),
    }


def _proposed(config: Config, number: int) -> dict[str, Any]:
    judgements, pool = judgements_in(config, number), pool_record(config, number)
    rates = [one["pass_rate"] for one in judgements if one["reason"] is None]
    steps = part_folder(config, number, PROPOSE) / METRICS
    return {
        "proposals": len(judgements),
        "accepted": len(rates),
        "rejected": dict(Counter(one["reason"] for one in judgements if one["reason"] is not None).most_common()),
        "reward": mean(one["reward"] for one in judgements),
        "accepted_pass_rate": mean(rates) if rates else None,
        "proposer_steps": len(steps.read_text(encoding="utf8").splitlines()) if steps.exists() else 0,
        "pool": len(pool["pool"]),
        "retired": dict(Counter(pool["retired"].values())),
    }


def sentence(result: dict[str, Any]) -> str:
    """The result in words: a line for each round, the reasons of rejections, and the policy."""
    lines = [_line(one) for one in result["rounds"]]
    if result["proposals"]:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in result["rejected"].items())
        share = result["accepted_share"]
        lines.append(f"accepted {result['accepted']} of {result['proposals']} proposals ({share:.3f}); {reasons}")
    lines.append(f"{result['steps']} steps and {result['proposer_steps']} of the proposer; {result['policy']}")
    return "\n".join(lines)


def _line(one: dict[str, Any]) -> str:
    proposed = ""
    if "proposals" in one:
        retired = ", ".join(f"{count} {reason}" for reason, count in one["retired"].items())
        proposed = (
            f"accepted {one['accepted']} of {one['proposals']}, reward {one['reward']:.3f}, pool {one['pool']}"
            + (f" (retired: {retired})" if retired else "")
            + "; "
        )
    return f"round {one['round']}: {proposed}pass@1 {_pass_at_1(one['before'])} -> {_pass_at_1(one['after'])}"


def _pass_at_1(record: dict[str, Any]) -> str:
    error = record["standard_error"]
    return f"{record['pass_at_1']:.3f}" + ("" if error is None else f" +- {error:.3f}")


def _evaluation(file: Path) -> dict[str, Any]:
    record = _read(file)
    return {name: record[name] for name in ("pass_at_1", "standard_error", "num_problems", "num_rollouts")}


def _read(file: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf8"))
    return record


_SUFFIX = "-self-play"


async def self_play(config: Config, *, resume: bool, as_json: bool, given: Given = NOTHING_GIVEN) -> int:
    """Run it and print the result. Returns 0, or 130 after Ctrl-C or SIGTERM."""
    results: list[dict[str, Any]] = []

    async def work() -> None:
        with open_view(Console(stderr=as_json), deployment(config).line_every_s) as view:
            results.append(await run_rounds(config, view, resume=resume, given=given))

    if code := await interruptible(work()):
        return code
    (result,) = results
    print(json.dumps(result, indent=1) if as_json else sentence(result))  # noqa: T201
    return 0


async def run_rounds(config: Config, view: View, *, resume: bool, given: Given = NOTHING_GIVEN) -> dict[str, Any]:
    """Run every round that is not finished. Returns self_play.json. Raises NousCoderError with one sentence."""
    folder, config = await _open(config, resume=resume, given=given)
    try:
        policy = config.policy.path
        for number in range(1, config.self_play.rounds + 1):
            policy = await _round(config, number, policy, view)
            result = await asyncio.to_thread(result_of, config, number, policy)
            folder.write_json(RESULT, result)
            view.say(sentence(result))
        return result
    finally:
        folder.close()


def self_play_config(config: Config) -> Config:
    """The configuration of the whole self-play: absolute inputs, and a name of its own. Raises ConfigError."""
    faults = [fault for is_wrong, fault in _faults(config) if is_wrong]
    if faults:
        raise ConfigError("\n".join(faults))
    placed = config.with_inputs_of(config)
    run = placed.run.model_copy(update={"name": f"{config.run.name}{_SUFFIX}", "pages": ""})
    return placed.model_copy(update={"run": run, "plan": PlanSection()})


def _faults(config: Config) -> list[tuple[bool, str]]:
    """What self-play cannot do: (whether it is so, the sentence)."""
    self_play, generation = config.self_play, config.generation
    size, batches = config.broker.group_size, config.run.total_batches
    groups = self_play.proposals // size
    return [
        (config.run.services != "local", 'self-play starts its services itself: set run.services to "local"'),
        (bool(config.plan.stages), "self-play has rounds of its own, and this configuration is a plan"),
        ("/" in config.run.name, "run.name of a self-play is without a slash"),
        (bool(config.problems.held_out_share), "self-play needs a file problems.held_out, and no held_out_share"),
        (
            generation.environment.kind != "single_turn",
            "self-play proposes and solves in one turn: set generation.environment.kind to single_turn",
        ),
        (
            config.broker.curriculum.name != "epochs",
            'the problems of self-play change with each round: set broker.curriculum.name to "epochs"',
        ),
        (
            not batches or batches % self_play.rounds != 0,
            f"run.total_batches {batches} is no multiple of self_play.rounds {self_play.rounds}",
        ),
        (
            self_play.proposals % size != 0,
            f"self_play.proposals {self_play.proposals} is no multiple of broker.group_size {size}",
        ),
        (
            0 < groups < self_play.proposer_steps,
            f"self_play.proposer_steps {self_play.proposer_steps} is more than the {groups} groups of proposals",
        ),
        (
            self_play.max_new_tokens >= generation.max_tokens_total,
            f"self_play.max_new_tokens {self_play.max_new_tokens} must be less than generation.max_tokens_total"
            f" {generation.max_tokens_total}, which counts the prompt too",
        ),
    ]


async def _open(config: Config, *, resume: bool, given: Given) -> tuple[RunFolder, Config]:
    """A new folder, or with `resume` the earlier one and its recorded configuration. Raises RunChanged."""
    wanted = self_play_config(await asyncio.to_thread(with_policy_folder, config))
    if resume:
        return reopened(wanted.run.folder, given, "self-play")
    RunFolder.refuse_existing(wanted.run.folder)
    folder = RunFolder.create(await checked(wanted))
    note_given(folder, given)
    return folder, wanted


async def _round(config: Config, number: int, policy: Path, view: View) -> Path:
    """Run a round, or what is left of it. Returns the policy after it."""
    after = config.run.folder / "policies" / f"{number:02d}"
    if after.exists():
        return after
    inputs = {"policy": policy}
    if config.self_play.proposals:
        proposing = part_config(config, number, PROPOSE, 0, policy=policy)
        view.say(f"round {number} of {config.self_play.rounds}: proposing")
        inputs = await _propose(config, number, proposing, view)
    training = part_config(config, number, TRAIN, config.run.total_batches // config.self_play.rounds, **inputs)
    view.say(f"round {number} of {config.self_play.rounds}: training")
    if not (training.run.folder / "summary.json").exists():
        begun = (training.run.folder / "config.toml").exists()
        opened = await deployment(training).open_folder(training, begun, NOTHING_GIVEN)
        folder, recorded = opened.folder, opened.config
        try:
            await run_loop(folder, recorded, view, time.monotonic())
        finally:
            folder.close()
    weights = weights_folder(training, newest_version(training))
    first = training.in_run_folder(training.policy.path)
    await asyncio.to_thread(
        compose_policy, after, first, weights, prompt=trained_prompt(training), trained=training.run.folder, link=True
    )
    return after


async def _propose(config: Config, number: int, proposing: Config, view: View) -> dict[str, Path]:
    """Propose, train the proposer, and choose the problems. Returns the inputs of the training."""
    begun = (proposing.run.folder / "config.toml").exists()
    opened = await deployment(proposing).open_folder(proposing, begun, NOTHING_GIVEN)
    folder, proposing = opened.folder, opened.config
    try:
        if not (folder.path / JUDGED).exists():
            with closing(await asyncio.to_thread(_known, config, number)) as known:
                await propose(folder, proposing, number, known, view)
        return await asyncio.to_thread(_after_proposing, config, number, proposing)
    finally:
        folder.close()


def _known(config: Config, number: int) -> Known:
    accepted = accepted_before(config, number)
    pool = [one.problem_id for one in pool_of(config, number - 1)]
    return Known(config, open_index(config), accepted, pool, config.self_play.near_duplicate)


def _after_proposing(config: Config, number: int, proposing: Config) -> dict[str, Path]:
    folder, policy = proposing.run.folder, proposing.policy.path
    if config.self_play.proposer_steps:
        policy = folder / "policy"
        if not policy.exists():
            train_proposer(proposing, graded_proposals(folder), policy)
    advance_pool(config, number)
    with closing(open_index(config)) as index:
        write_problems(config, number, index)
    return {"policy": policy, "train": folder / PROBLEMS}
