"""The problems of a smoke test: those that the first policy solves sometimes.

The problems are those that the first policy solves sometimes, 0 < pass@G < 1. The problems of the training file are
measured in an order that `run.seed` chooses, each with G rollouts, until enough are found. pass_rates.jsonl has the
counts of each measured problem, in the form of data/pass_rates.py.

INVARIANT: each measured problem counts once. The choice depends only on the counts and the order, so a measurement that
was interrupted goes on and ends with the same problems.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from random import Random

from nouscoder.atomic_files import write_whole
from nouscoder.config import Config
from nouscoder.data.pass_rates import PassCount, read_pass_rates
from nouscoder.data.problem_index import ProblemIndex, open_index
from nouscoder.domain.problem import Problem
from nouscoder.domain.rollout import Sampling
from nouscoder.domain.run_status import RunMode
from nouscoder.errors import Unusable
from nouscoder.evaluation.pass_at_1 import Evaluation, evaluate
from nouscoder.rpc.generation_client import GenerationClient
from nouscoder.rpc.tls import channel_credentials
from nouscoder.rpc.verifier_client import VerifierClient, verifier_token
from nouscoder.run.deployment import deployment
from nouscoder.run.evaluation import first_policy, while_alive
from nouscoder.run.folder import RunFolder
from nouscoder.run.services import RunServices
from nouscoder.run.view import View
from nouscoder.run.watch import broker_of

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
