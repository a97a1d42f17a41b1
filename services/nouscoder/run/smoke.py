"""`nouscoder train --smoke64`: does the reward rise on 64 problems that the first policy solves sometimes?

    runs/NAME-smoke64/config.toml      the configuration, as the test was begun
    runs/NAME-smoke64/problems.json    the problems
    runs/NAME-smoke64/01-pass-rates/   a run without batches: the counts of the first policy
    runs/NAME-smoke64/02-training/     an ordinary run on the problems alone
    runs/NAME-smoke64/smoke64.json     the result

The training has the configuration's values, but no filter: groups of equal rewards are kept, so that the rewards of a
batch are those of all its rollouts. The verdict is that of domain/guards.py.

INVARIANT: the problems are chosen once, and the result follows from rewards.jsonl of the training alone. A test that
was killed at any point goes on with `resume` and has the result of its training.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from nouscoder.atomic_files import whole_or_gone
from nouscoder.config import Config, ConfigError
from nouscoder.config.tree import NOTHING_GIVEN, Given
from nouscoder.data.problem_index import index_folder
from nouscoder.domain.guards import TEST, BatchRewards, Direction, reward_trend
from nouscoder.errors import NousCoderError, Unusable, for_terminal
from nouscoder.run.deployment import deployment
from nouscoder.run.folder import RunFolder
from nouscoder.run.loop import interruptible, run_loop
from nouscoder.run.preflight import checked, with_policy_folder
from nouscoder.run.resume import note_given, reopened
from nouscoder.run.smoke_problems import chosen_from_file, measured
from nouscoder.run.view import View, open_view

NUM_PROBLEMS = 64
RESULT = "smoke64.json"
_PROBLEMS = "problems.json"


@dataclass(frozen=True, slots=True)
class SmokeTest:
    """What is asked for. `num_batches` 0: as many as `default_batches` says. `pass_rates`: instead of a measurement."""

    num_batches: int = 0
    pass_rates: Path | None = None
    num_problems: int = NUM_PROBLEMS


async def smoke64(config: Config, test: SmokeTest, *, resume: bool, as_json: bool, given: Given = NOTHING_GIVEN) -> int:
    """Run the test and print its result. Returns 0 if the reward rises, 1 if not, 130 after Ctrl-C or SIGTERM."""
    results: list[dict[str, Any]] = []

    async def work() -> None:
        console = Console(stderr=as_json)
        with open_view(console, deployment(config).line_every_s) as view:
            results.append(await run_test(config, test, view, resume=resume, given=given))

    if code := await interruptible(work()):
        return code
    (result,) = results
    print(json.dumps(result, indent=1) if as_json else for_terminal(sentence(result)))  # noqa: T201
    return 0 if result["direction"] == Direction.RISES else 1


async def run_test(
    config: Config, test: SmokeTest, view: View, *, resume: bool, given: Given = NOTHING_GIVEN
) -> dict[str, Any]:
    """The result, as in smoke64.json. Raises NousCoderError with one sentence."""
    folder, config = await _open(config, test, resume=resume, given=given)
    with closing(folder):
        result = folder.read_json(RESULT)
        if result is None:
            known = folder.read_json(_PROBLEMS)
            if known is None:
                if test.pass_rates is not None:
                    names = await asyncio.to_thread(chosen_from_file, config, test.pass_rates, test.num_problems)
                else:
                    names = await _measure(part_config(config, "01-pass-rates", {}, 0), test, view)
                known = {"problem_ids": names}
                folder.write_json(_PROBLEMS, known)
                view.say(f"{len(names)} problems with 0 < pass@{config.broker.group_size} < 1 are chosen")
            names = tuple(known["problem_ids"])
            training = training_config(config, names)
            await _train(training, view)
            trend = reward_trend(read_rewards(training.run.folder), training.run.total_batches, training.run.seed)
            result = {
                "direction": trend.direction.value,
                **asdict(trend),
                "num_batches": training.run.total_batches,
                "test": TEST,
                "run": str(training.run.folder),
            }
            folder.write_json(RESULT, result)
    return result


def smoke_config(config: Config, test: SmokeTest) -> Config:
    """That of the run, or of a first stage, under another name. Raises ConfigError where that is not possible."""
    if config.run.services != "local":
        raise ConfigError('--smoke64 starts its services itself: set run.services to "local"')
    if config.plan.stages and config.plan.stages[0].yarn.factor:
        raise ConfigError("--smoke64 tests the first stage of a plan, and cannot when that stage has yarn")
    run = config.stage_run(0) if config.plan.stages else config.with_inputs_of(config)
    num_batches = test.num_batches or default_batches(test.num_problems, run)
    if num_batches < 3:
        raise ConfigError("--smoke-batches must be at least 3: the test compares the first and the last third")
    return run.changed(
        run={"name": f"{config.run.name}-smoke64", "pages": "", "total_batches": num_batches},
        evaluation={"every_batches": 0, "end_at_pass_at_1": 0.0, "end_after_no_gain": 0},
        plan={"stages": ()},
    )


def default_batches(num_problems: int, config: Config) -> int:
    """At least 12, and so many that each third of them has a group of each problem."""
    groups_in_a_batch = config.broker.batch_size // config.broker.group_size
    return 3 * max(4, math.ceil(num_problems / groups_in_a_batch))


def part_config(config: Config, part: str, broker: dict[str, Any], total_batches: int) -> Config:
    """The configuration of a part of the test: a run in a folder inside the test's folder."""
    tree = config.model_dump(mode="json", by_alias=True)
    tree["run"] |= {"name": f"{config.run.name}/{part}", "total_batches": total_batches}
    tree["broker"] |= broker
    return Config.model_validate(tree)


def training_config(config: Config, names: tuple[str, ...]) -> Config:
    """The configuration of the training on these problems."""
    broker = {"curriculum": {"name": "subset", "problem_ids": list(names)}, "drop_zero_variance": False}
    return part_config(config, "02-training", broker, config.run.total_batches)


def read_rewards(run: Path) -> list[BatchRewards]:
    """The rewards of each batch of a run folder. Raises NousCoderError when there are none."""
    file = run / "rewards.jsonl"
    try:
        records = [json.loads(line) for line in file.read_text(encoding="utf8").splitlines()]
    except (OSError, ValueError) as error:
        raise NousCoderError(f"{file} cannot be read: {error}") from error
    return [
        BatchRewards(one["batch_id"], {name: tuple(rewards) for name, rewards in one["rewards"].items()})
        for one in records
    ]


def sentence(result: dict[str, Any]) -> str:
    """The result in words."""
    verb = {Direction.RISES: "rises", Direction.FALLS: "falls", Direction.UNDECIDED: "is not shown to rise"}
    return (
        f"the reward {verb[Direction(result['direction'])]}: {result['first']:.3f} in the first third,"
        f" {result['last']:.3f} in the last, gain {result['gain']:+.3f} ({result['low']:+.3f} to {result['high']:+.3f})"
        f" over {result['num_problems']} problems and {result['num_batches']} batches\n"
        f"({result['test']})\n{result['run']}"
    )


async def _open(config: Config, test: SmokeTest, *, resume: bool, given: Given) -> tuple[RunFolder, Config]:
    """The test's folder: a new one, or with `resume` that of an earlier start, as it recorded it. Raises RunChanged."""
    wanted = smoke_config(await asyncio.to_thread(with_policy_folder, config), test)
    if resume:
        return reopened(wanted.run.folder, given, "--smoke64")
    RunFolder.refuse_existing(wanted.run.folder)
    with whole_or_gone(index_folder(wanted)):
        config = await checked(wanted)
        if test.pass_rates is not None:
            await asyncio.to_thread(chosen_from_file, config, test.pass_rates, test.num_problems)
    folder = RunFolder.create(config)
    note_given(folder, given)
    return folder, wanted


async def _measure(config: Config, test: SmokeTest, view: View) -> tuple[str, ...]:
    begun = (config.run.folder / "config.toml").exists()
    opened = await deployment(config).open_folder(config, begun, NOTHING_GIVEN)
    with closing(opened.folder):
        return await measured(opened.folder, opened.config, view, test.num_problems)


async def _train(config: Config, view: View) -> None:
    """Run the training, or what is left of it. Raises Unusable when the record has other problems."""
    if (config.run.folder / "summary.json").exists():
        return
    begun = (config.run.folder / "config.toml").exists()
    opened = await deployment(config).open_folder(config, begun, NOTHING_GIVEN)
    folder, recorded = opened.folder, opened.config
    with closing(folder):
        if recorded.broker.curriculum != config.broker.curriculum:
            raise Unusable(f"{folder.path} was begun on other problems: remove the folder, or take another run.name")
        await run_loop(folder, recorded, view, time.monotonic())
