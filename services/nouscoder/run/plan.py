"""Runs the stages of a plan, one after the other: each is an ordinary run in a folder inside the plan's folder.

    runs/PLAN/config.toml     the plan, as it was begun
    runs/PLAN/01-NAME/        the run of the first stage
    runs/PLAN/02-NAME/policy  the policy that the second stage begins with, chosen from those of the first
    runs/PLAN/plan.json       the state and the result of each stage
    runs/PLAN/generation.toml the stage that the generation process serves (services.py)

INVARIANT: the state of a plan is the state of its stages' run folders. A stage whose summary.json is there is not run
again, one whose config.toml is there continues, and the policy of a new stage is complete before its config.toml is.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from itertools import takewhile
from typing import Any

from rich.console import Console

from nouscoder.config import Config, StageSection
from nouscoder.config.tree import NOTHING_GIVEN, Given, load_config
from nouscoder.domain.plan import NextStage, StageHistory, best_of, next_stage
from nouscoder.errors import NousCoderError
from nouscoder.policy_folder.compose import compose_policy, with_yarn
from nouscoder.policy_folder.prompt_file import trained_prompt
from nouscoder.run.console.feed import Feed
from nouscoder.run.deployment import OpenedRun, deployment
from nouscoder.run.evaluation_files import recorded_evaluations, weights_folder
from nouscoder.run.folder import RunChanged, RunFolder, attach_patiently
from nouscoder.run.give_back import give_back
from nouscoder.run.held_out import leak_lines
from nouscoder.run.local_services import KeptGeneration
from nouscoder.run.loop import interruptible, run_loop, until_cancelled
from nouscoder.run.pages import open_pages
from nouscoder.run.preflight import checked_plan
from nouscoder.run.resume import Resumed, note_given, refuse_changes_of, resumed, take
from nouscoder.run.standing import lines_when_stopped
from nouscoder.run.view import View, open_view

_FIXED = ("run.services",)  # a stage that has begun refuses more


async def train_plan(config: Config, *, resume: bool, given: Given = NOTHING_GIVEN) -> int:
    """Run `nouscoder train` for a configuration with stages. Returns the exit code."""
    return await interruptible(_train_plan(config, resume=resume, given=given), lines_when_stopped(config))


async def _train_plan(config: Config, *, resume: bool, given: Given) -> None:
    opened = await _open(config, resume=resume, given=given)
    folder, config = opened.folder, opened.config
    with closing(folder), open_view(Console(), deployment(config).line_every_s) as view:
        for note in opened.notes:
            view.say(note)
        await run_stages(folder, config, view)
        if config.asked_run:
            # Until SIGTERM: what started this command would start it again.
            last = config.of_stage(len(config.plan.stages) - 1)
            with open_pages(last.run.folder, last.run.pages, last.run.pages_hosts) as address:
                if address:
                    view.say(f"the last stage's pages are at http://{address}/ until Ctrl-C")
                    await give_back(last, view.say)
                    await until_cancelled()


async def _open(config: Config, *, resume: bool, given: Given = NOTHING_GIVEN) -> OpenedRun:
    """The plan's folder: a new one, or with `resume` that of an earlier start with the plan that it recorded.

    A plan with external services always continues, with the configuration given now.

    Raises ConfigError with the faults of all stages that can be found before the first one begins, and RunChanged for
    new values that the stage that has begun cannot take.
    """
    if config.asked_run:
        folder = await attach_patiently(config)
        folder.record_given(config)
        return OpenedRun(folder, config)
    if resume:
        folder, recorded = RunFolder.reopen(config.run.folder)
        try:
            run = resumed(folder.path, recorded, given, _FIXED)
            _refuse_other_stages(recorded, run)
            begun = [index for index, history in enumerate(histories(run.config)) if history.begun]
            await asyncio.to_thread(checked_plan, run.config, begun)
            take(folder, run, given, sum(history.finished for history in histories(recorded)))
            return OpenedRun(folder, run.config, run.lines)
        except BaseException:
            folder.close()
            raise
    RunFolder.refuse_existing(config.run.folder)
    config = await asyncio.to_thread(checked_plan, config)
    folder = RunFolder.create(config)
    note_given(folder, given)
    return OpenedRun(folder, config, await asyncio.to_thread(_leaks_of_stages, config))


def _leaks_of_stages(config: Config) -> list[str]:
    """What is to be said of stages that are measured on what a stage before them trains on."""
    runs = [config.stage_run(index) for index in range(len(config.plan.stages))]
    found = [(run.run.name, leak_lines(run, runs[:index])) for index, run in enumerate(runs) if index]
    return [f"{name}: {line}" for name, lines in found for line in lines]


def _refuse_other_stages(before: Config, run: Resumed) -> None:
    """Raises RunChanged when a stage that has begun is another one, or cannot take its new values."""
    now = run.config
    for index, history in enumerate(histories(before)):
        if not history.begun:
            continue
        old = before.plan.stages[index]
        stage = now.plan.stages[index] if index < len(now.plan.stages) else None
        if stage is None or (old.name, old.start, old.yarn) != (stage.name, stage.start, stage.yarn):
            raise RunChanged(
                f"plan.stages: stage {old.name} has begun, so its name, from and yarn cannot change: put them back, or"
                " give the plan another run.name"
            )
        if not history.finished:
            refuse_changes_of(before.of_stage(index).run.folder, stage_values(now, index))
        elif changed := [key for key in run.changes if key.startswith(f"plan.stages.{index}.")]:
            raise RunChanged(f"{', '.join(changed)}: stage {old.name} is finished, so it stays as it is: put it back")


def stage_values(config: Config, index: int) -> Given:
    """What the plan says of a stage that has begun. Its policy and its engine were chosen when it began."""
    tree = config.stage_run(index).model_dump(mode="json", by_alias=True)
    del tree["policy"]["path"], tree["generation"]["engine_tokens_total"]
    return Given(sets=tree)


async def run_stages(folder: RunFolder, config: Config, view: View) -> None:
    """Run every stage that is not finished. Raises NousCoderError with one sentence."""
    stages = config.plan.stages
    generation = KeptGeneration(folder.path, view.say)
    try:
        while (begin := next_stage([stage.start for stage in stages], histories(config))) is not None:
            stage = stages[begin.index]
            view.say(f"stage {begin.index + 1} of {len(stages)}, {stage.name}: {_beginning(stages, begin)}")
            await _run_stage(config, begin, view, generation)
            folder.write_json("plan.json", plan_record(config))
    finally:
        await generation.close()
    folder.write_json("plan.json", plan_record(config))
    view.say(f"the plan in {folder.path} is finished: nothing is left to do")


def with_engine_tokens(config: Config, index: int, stage: Config) -> Config:
    """`stage` with the tokens that its engine is started for, so that it can also serve the stages after it.

    They are the most of the stages up to the next one with YaRN, unless the configuration gives a number.
    """
    if stage.generation.engine_tokens_total:
        return stage
    later = takewhile(
        lambda after: not config.plan.stages[after].yarn.factor, range(index + 1, len(config.plan.stages))
    )
    most = max([stage.engine_tokens, *(config.of_stage(after).engine_tokens for after in later)])
    return stage if most == stage.engine_tokens else stage.changed(generation={"engine_tokens_total": most})


def histories(config: Config) -> list[StageHistory]:
    """The history of each stage, from its run folder."""
    found = []
    for index in range(len(config.plan.stages)):
        run = config.of_stage(index).run.folder
        begun, finished = ((run / name).is_file() for name in ("config.toml", "summary.json"))
        found.append(StageHistory(begun, finished, recorded_evaluations(run)))
    return found


def plan_record(config: Config) -> dict[str, Any]:
    """plan.json: for each stage its state, and pass@1 of its first, last and best policy."""
    stages = []
    for stage, history in zip(config.plan.stages, histories(config), strict=True):
        record: dict[str, Any] = {"name": stage.name, "begun": history.begun, "finished": history.finished}
        if history.evaluations:
            best = best_of(history.evaluations)
            record["pass_at_1_first"] = history.evaluations[0].pass_at_1
            record["pass_at_1_last"] = history.evaluations[-1].pass_at_1
            record["pass_at_1_best"], record["best_version"] = best.pass_at_1, best.policy_version
        stages.append(record)
    return {"name": config.run.name, "stages": stages}


async def _run_stage(config: Config, begin: NextStage, view: View, generation: KeptGeneration) -> None:
    stage = config.stage_run(begin.index)
    if not begin.begun:
        stage = await asyncio.to_thread(_with_first_policy, config, begin, stage)
        if not config.asked_run:  # external generation starts its engine for each stage
            stage = with_engine_tokens(config, begin.index, stage)
    elif config.asked_run:
        begun = load_config(stage.run.folder / "config.toml")
        stage = stage.changed(policy={"path": begun.policy.path})
    given = stage_values(config, begin.index) if begin.begun else NOTHING_GIVEN
    opened = await deployment(stage).open_folder(stage, begin.begun, given)
    folder, stage = opened.folder, opened.config
    for note in opened.notes:
        view.say(note)
    shown = Feed(view)
    with closing(folder), open_pages(folder.path, stage.run.pages, stage.run.pages_hosts, shown) as address:
        if address:
            view.say(f"the stage is shown at http://{address}/")
        await run_loop(folder, stage, shown, time.monotonic(), generation)


def _with_first_policy(config: Config, begin: NextStage, stage: Config) -> Config:
    """`stage` with the policy that it begins with, made in its folder if new. Raises NousCoderError if it is gone."""
    yarn = config.plan.stages[begin.index].yarn
    first = weights = stage.policy.path
    prompt = trained = None
    if begin.policy_version is not None:
        file = config.of_stage(begin.index - 1).run.folder / "config.toml"
        if not file.is_file():
            raise NousCoderError(f"{file} does not exist: the stage before was removed, so its policy is not known")
        before = load_config(file)
        first = before.in_run_folder(before.policy.path)
        weights = weights_folder(before, begin.policy_version)
        prompt, trained = trained_prompt(before), before.run.folder
    if weights == first and not yarn.factor:
        made = first
    else:
        made = stage.run.folder / "policy"
        changed = with_yarn(first, yarn.factor, yarn.original_tokens) if yarn.factor else None
        compose_policy(made, first, weights, config=changed, prompt=prompt, trained=trained, link=weights != first)
    return stage.changed(policy={"path": made})


def _beginning(stages: tuple[StageSection, ...], begin: NextStage) -> str:
    """How the stage begins, in words."""
    if begin.begun:
        return "continues"
    if begin.policy_version is None:
        return "begins with the first policy"
    start = stages[begin.index].start
    return f"begins with the {start} policy of {stages[begin.index - 1].name}, version {begin.policy_version}"
