"""pass@1 of policies of a run, measured through the services of the run.

INVARIANT: a policy is measured once per run, and its result is recorded. A resumed run reads the recorded result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from nouscoder.config import Config
from nouscoder.data.problem_index import held_out_problems
from nouscoder.domain.plan import Evaluated
from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.rollout import Sampling
from nouscoder.errors import NousCoderError
from nouscoder.evaluation.pass_at_1 import Evaluation, evaluate
from nouscoder.policy_folder.weights_files import WeightsMissing, shards_of
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.generation_client import GenerationClient
from nouscoder.rpc.tls import channel_credentials
from nouscoder.rpc.verifier_client import VerifierClient, verifier_token
from nouscoder.rpc.worker_identity import observer_id
from nouscoder.run.evaluations import evaluated_of, evaluation_file
from nouscoder.run.folder import RunFolder
from nouscoder.run.services import RunServices
from nouscoder.run.view import View

Answer = TypeVar("Answer")


class CannotEvaluate(NousCoderError):
    """An input of the evaluation is missing. The message names it."""


async def evaluate_once(folder: RunFolder, services: RunServices, view: View, when: str) -> Evaluated:
    """pass@1 on the held-out problems `before` or `after` the learning. Raises NousCoderError.

    A failed evaluation starts again as `services.evaluation_retry` allows, because a restarted service has lost its
    weights or its rollouts.
    """
    name = f"evaluation_{when}.json"
    known = folder.read_json(name)
    if known is None:
        manifest = first_policy(services.config) if when == "before" else await newest_policy(services.config)
        known = folder.read_json(evaluation_file(manifest.policy_version))
        if known is None:
            progress = partial(view.progress, f"evaluation {when}")
            measuring = services.evaluation_retry.call(
                lambda: measure(services.config, manifest, progress),
                lambda error: view.say(f"evaluation {when} begins again: {error}"),
            )
            known = await while_alive(services, measuring)
        folder.write_json(name, known)
    evaluated = evaluated_of(known)
    view.say(f"pass@1 on held-out problems {when}: {evaluated.pass_at_1:.3f}")
    return evaluated


async def measure(
    config: Config, manifest: PolicyManifest, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """The record of an evaluation of this policy. Raises EVALUATION_ERRORS and CannotEvaluate."""
    credentials = channel_credentials(config.tls)
    evaluation = await evaluate(
        held_out_problems(config),
        GenerationClient(config.generation.grpc, credentials=credentials),
        VerifierClient(config.verifier.grpc, credentials=credentials, token=verifier_token(config)),
        samples=config.problems.held_out_samples,
        sampling=config.generation.sampling.record(Sampling, seed=config.run.seed),
        manifest=manifest,
        pin_limit_s=config.run.evaluation_limit_s,
        progress=progress,
    )
    return evaluation_record(evaluation, manifest.policy_version)


async def while_alive(services: RunServices, work: Coroutine[Any, Any, Answer]) -> Answer:
    """Await `work`, but stop at once when a service cannot be kept alive."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            services.check()
            await asyncio.wait({task}, timeout=services.watch_every_s)
        return task.result()
    finally:
        task.cancel()


def first_policy(config: Config) -> PolicyManifest:
    """Version 0: the initial weights of the run. Raises CannotEvaluate."""
    folder = config.in_run_folder(config.policy.path)
    try:
        return PolicyManifest(0, 0, str(folder), shards_of(folder), config.generation.policy_from)
    except WeightsMissing as error:
        raise CannotEvaluate(f"the first policy cannot be read: {error}") from error


async def newest_policy(config: Config) -> PolicyManifest:
    """The last policy that the learner published. Raises CannotEvaluate when the broker announces none in time."""
    return await announced_policy(config, 0, config.run.peer_patience_s)


async def announced_policy(config: Config, from_version: int, limit_s: float) -> PolicyManifest:
    """The first policy that the broker announces from now on, of this version or a later one.

    Raises CannotEvaluate when there is none within `limit_s` seconds.
    """
    client = BrokerClient(config.broker.grpc, observer_id("watch"), credentials=channel_credentials(config.tls))
    with suppress(TimeoutError):
        async with client as broker, asyncio.timeout(limit_s):
            async for manifest in broker.watch_policy():
                if manifest.policy_version >= from_version:
                    return manifest
    raise CannotEvaluate(f"the broker announced no policy of version {from_version} or later within {limit_s:.0f} s")


def evaluation_record(evaluation: Evaluation, policy_version: int) -> dict[str, Any]:
    """evaluation_*.json."""
    return {
        "pass_at_1": evaluation.pass_at_1,
        "standard_error": evaluation.standard_error,
        "policy_version": policy_version,
        "num_problems": evaluation.num_problems,
        "num_rollouts": evaluation.num_rollouts,
        "by_family": evaluation.by_family,
        "samples": [asdict(sample) for sample in evaluation.samples],
    }
