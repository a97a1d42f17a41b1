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
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from nouscoder.config import Config, ConfigError
from nouscoder.config.run import PlanSection
from nouscoder.config.tree import NOTHING_GIVEN, Given
from nouscoder.data.problem_index import open_index
from nouscoder.errors import for_terminal
from nouscoder.policy_folder.compose import compose_policy
from nouscoder.policy_folder.prompt_file import trained_prompt
from nouscoder.run.deployment import deployment
from nouscoder.run.evaluation_files import weights_folder
from nouscoder.run.folder import RunFolder, newest_version
from nouscoder.run.loop import interruptible, run_loop
from nouscoder.run.preflight import checked, with_policy_folder
from nouscoder.run.resume import note_given, reopened
from nouscoder.run.view import View, open_view
from nouscoder.self_play.known import Known
from nouscoder.self_play.parts import (
    PROBLEMS,
    PROPOSE,
    TRAIN,
    accepted_before,
    advance_pool,
    part_config,
    pool_of,
    write_problems,
)
from nouscoder.self_play.proposer import graded_proposals, train_proposer
from nouscoder.self_play.proposing import propose
from nouscoder.self_play.result import RESULT, result_of, sentence
from nouscoder.self_play.round import JUDGED

_SUFFIX = "-self-play"


async def self_play(config: Config, *, resume: bool, as_json: bool, given: Given = NOTHING_GIVEN) -> int:
    """Run it and print the result. Returns 0, or 130 after Ctrl-C or SIGTERM."""

    async def work() -> None:
        with open_view(Console(stderr=as_json), deployment(config).line_every_s) as view:
            result = await run_rounds(config, view, resume=resume, given=given)
        print(for_terminal(json.dumps(result, indent=1) if as_json else sentence(result)))  # noqa: T201

    return await interruptible(work())


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
