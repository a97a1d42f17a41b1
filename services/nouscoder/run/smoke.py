"""`nouscoder train --smoke64`: does the reward rise on 64 problems that the first policy solves sometimes?

    runs/NAME-smoke64/config.toml      the configuration, as the test was begun
    runs/NAME-smoke64/problems.json    the problems
    runs/NAME-smoke64/01-pass-rates/   a run without batches: the counts of the first policy
    runs/NAME-smoke64/02-training/     an ordinary run on the problems alone
    runs/NAME-smoke64/smoke64.json     the result

The problems are those that the first policy solves sometimes, 0 < pass@G < 1. The problems of the training file are
measured in an order that `run.seed` chooses, each with G rollouts, until enough are found. pass_rates.jsonl has the
counts of each measured problem, in the form of data/pass_rates.py.

INVARIANT: each measured problem counts once. The choice depends only on the counts and the order, so a measurement that
was interrupted goes on and ends with the same problems.

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
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console

from nouscoder.atomic_files import whole_or_gone, write_whole
from nouscoder.config import Config, ConfigError
from nouscoder.config.tree import NOTHING_GIVEN, Given
from nouscoder.data.pass_rates import PassCount, read_pass_rates
from nouscoder.data.problem_index import ProblemIndex, index_folder, open_index
from nouscoder.domain.guards import TEST, BatchRewards, Direction, reward_trend
from nouscoder.domain.problem import Problem
from nouscoder.domain.rollout import Sampling
from nouscoder.domain.run_status import RunMode
from nouscoder.errors import NousCoderError, Unusable, for_terminal
from nouscoder.evaluation.pass_at_1 import Evaluation, evaluate
from nouscoder.rpc.generation_client import GenerationClient
from nouscoder.rpc.tls import channel_credentials
from nouscoder.rpc.verifier_client import VerifierClient, verifier_token
from nouscoder.run.evaluation import first_policy, while_alive
from nouscoder.run.folder import RunFolder
from nouscoder.run.loop import interruptible, run_loop
from nouscoder.run.preflight import checked, with_policy_folder
from nouscoder.run.resume import note_given, reopened
from nouscoder.run.services import RunServices, deployment
from nouscoder.run.view import View, open_view
from nouscoder.run.watch import broker_of

# The problems of a smoke test.

PASS_RATES = "pass_rates.jsonl"
MAX_MEASURED = 2048
_AT_ONCE = 64  # problems


def solved_sometimes(counts: dict[str, PassCount], order: Sequence[str], size: int) -> tuple[str, ...]:
    """The first `size` problems of `order` with 0 < pass rate < 1, or fewer when there are fewer."""
    found = [name for name in order if name in counts and 0 < counts[name].passed < counts[name].sampled]
    return tuple(found[:size])


def chosen_from_file(config: Config, file: Path, size: int) -> tuple[str, ...]:
    """The problems by a file of pass rates. Raises Unusable."""
    with closing(open_index(config)) as index:
        order = measuring_order(config, index)
    found = solved_sometimes(read_pass_rates(file), order, size)
    if len(found) < size:
        raise Unusable(f"{file}: {len(found)} problems of the training file have 0 < pass rate < 1, not {size}")
    return found


def measuring_order(config: Config, index: ProblemIndex) -> list[str]:
    """The problems of the training file in the order of the seed."""
    order = [*index.problem_ids]
    Random(f"{config.run.seed}/smoke").shuffle(order)
    return order


async def measured(folder: RunFolder, config: Config, view: View, size: int) -> tuple[str, ...]:
    """The problems by the counts of the first policy, measured by the services of this run. Raises Unusable."""
    file = folder.path / PASS_RATES
    with closing(await asyncio.to_thread(open_index, config)) as index:
        order = measuring_order(config, index)[:MAX_MEASURED]
        counts = read_pass_rates(file) if file.exists() else {}
        if len(solved_sometimes(counts, order, size)) < size and not counts.keys() >= set(order):
            async with deployment(config).open_services(folder, config, view.say, None) as services:
                counts = await _measure_until(services, index, order, counts, file, view, size)
    found = solved_sometimes(counts, order, size)
    if len(found) < size:
        raise Unusable(
            f"the first policy solves {len(found)} of {len(order)} problems sometimes and not always, and the test"
            f" needs {size}: take other problems, another policy, or a larger broker.group_size"
        )
    return found


async def _measure_until(
    services: RunServices,
    index: ProblemIndex,
    order: Sequence[str],
    counts: dict[str, PassCount],
    file: Path,
    view: View,
    size: int,
) -> dict[str, PassCount]:
    """`counts` with those of further problems, until `size` are solved sometimes or none is left."""
    services.start("broker", "verifier", "generation")
    await admit_nothing(services.config)
    manifest = first_policy(services.config)
    left = [name for name in order if name not in counts]
    while left and len(found := solved_sometimes(counts, order, size)) < size:
        view.say(f"{len(found)} of {size} problems found, after {len(counts)} were measured")
        names, left = left[:_AT_ONCE], left[_AT_ONCE:]
        with ExitStack() as opened:
            problems = [
                found.with_tests(opened.enter_context(index.tests.opened(found.tests_digest)))
                for found in map(index.problem, names)
            ]

            async def measure(problems: Sequence[Problem] = problems) -> Evaluation:
                credentials = channel_credentials(services.config.tls)
                return await evaluate(
                    problems,
                    GenerationClient(services.config.generation.grpc, credentials=credentials),
                    VerifierClient(
                        services.config.verifier.grpc, credentials=credentials, token=verifier_token(services.config)
                    ),
                    samples=services.config.broker.group_size,
                    sampling=services.config.generation.sampling.record(Sampling, seed=services.config.run.seed),
                    manifest=manifest,
                    progress=lambda done, total: view.progress("pass rates", done, total),
                    evaluation=False,
                )

            repeated = services.evaluation_retry.call(measure, lambda error: view.say(f"measured again: {error}"))
            evaluation = await while_alive(services, repeated)
        counts = counts | {
            each.problem_id: PassCount(each.num_accepted, each.num_rollouts) for each in evaluation.problems
        }
        write_whole(file, _text(counts))
    return counts


async def admit_nothing(config: Config) -> None:
    """The broker admits no group, so that generation samples only what is measured."""
    async with broker_of(config) as broker:
        await broker.set_mode(RunMode.PAUSED)


def _text(counts: dict[str, PassCount]) -> bytes:
    records = ({"problem_id": name, "passed": one.passed, "sampled": one.sampled} for name, one in counts.items())
    return "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records).encode()


# The test.

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
