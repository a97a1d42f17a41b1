"""pass@1 of policies of a run, measured through the services of the run: before, during and after the training.

evaluation_before.json and evaluation_after.json hold the evaluations of the first and the last policy.
evaluations/00000012.json holds that of version 12, measured during the run.

INVARIANT: a policy is measured once per run, and its result is recorded. A resumed run reads the recorded result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from nouscoder.atomic_files import numbered
from nouscoder.config import Config
from nouscoder.data.problem_index import held_out_problems
from nouscoder.domain.plan import Evaluated
from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.rollout import Sampling
from nouscoder.errors import NousCoderError
from nouscoder.evaluation.pass_at_1 import EVALUATION_ERRORS, Evaluation, evaluate
from nouscoder.policy_folder.identity import tokenizer_digests, weights_digest
from nouscoder.policy_folder.weights_files import (
    ADAPTER_FILE,
    WeightsMissing,
    WeightsUnusable,
    is_adapter,
    shard_of,
    shards_of,
    weights_files,
)
from nouscoder.recorded_evaluations import DURING
from nouscoder.rpc.generation_client import GenerationClient
from nouscoder.rpc.tls import channel_credentials
from nouscoder.rpc.verifier_client import VerifierClient, verifier_token
from nouscoder.run.evaluation_files import NoSuchVersion, evaluated_of, evaluation_file, put_off, weights_folder
from nouscoder.run.folder import POLICIES, RunFolder
from nouscoder.run.view import View
from nouscoder.run.watch import broker_of, generation_started

if TYPE_CHECKING:
    from nouscoder.run.services import RunServices


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
        config = services.config
        is_first = when == "before"
        manifest = first_policy(config) if is_first else await announced_policy(config, 0, config.run.peer_patience_s)
        known = folder.read_json(evaluation_file(manifest.policy_version))
        if known is None:
            progress = partial(view.progress, f"evaluation {when}")
            await while_alive(services, generation_started(config, view.progress))
            measuring = services.evaluation_retry.call(
                lambda: measure(config, manifest, progress),
                lambda error: view.say(f"evaluation {when} begins again: {error}"),
            )
            known = await while_alive(services, measuring)
        folder.write_json(name, known)
    evaluated = evaluated_of(known)
    view.say(f"pass@1 on held-out problems {when}: {evaluated.pass_at_1:.3f}")
    return evaluated


async def measure(
    config: Config,
    manifest: PolicyManifest,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    older: bool = False,
) -> dict[str, Any]:
    """The record of an evaluation, after the training also of an `older` policy. Raises EVALUATION_ERRORS."""
    credentials = channel_credentials(config.tls)
    sampling = config.evaluating.generation.sampling.record(Sampling, seed=config.evaluation_seed)
    evaluation = await evaluate(
        held_out_problems(config),
        GenerationClient(config.generation.grpc, credentials=credentials, run=config.asked_run),
        VerifierClient(config.verifier.grpc, credentials=credentials, token=verifier_token(config)),
        samples=config.evaluation.samples,
        sampling=sampling,
        manifest=manifest,
        pin_limit_s=config.evaluation.limit_s,
        progress=progress,
        older=older,
    )
    return evaluation_record(evaluation, sampling, config.evaluating.generation.max_tokens_total)


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


def first_policy(config: Config, policy_version: int = 0) -> PolicyManifest:
    """The initial weights of the run, or a later version that is on its disk. Raises CannotEvaluate."""
    first = config.in_run_folder(config.policy.path)
    try:
        folder = weights_folder(config, policy_version)
        base = first_policy(config) if is_adapter(folder) else None
        shards = shards_of(folder) if base is None else (shard_of(folder / ADAPTER_FILE),)
        return PolicyManifest(
            policy_version=policy_version,
            step=policy_version * config.learner.steps_per_batch,
            folder=str(folder),
            shards=shards,
            transport=config.generation.policy_from,
            base=base,
            weights="" if policy_version else weights_digest(weights_files(folder)),
            tokenizer=tokenizer_digests(first),
        )
    except (NoSuchVersion, WeightsMissing, WeightsUnusable, OSError) as error:
        raise CannotEvaluate(f"policy version {policy_version} cannot be read: {error}") from error


async def make_up(folder: RunFolder, services: RunServices, view: View) -> None:
    """Measure the policies that wait, after the training, and say how many were never measured.

    One that cannot be measured is left out, with its reason. Raises what `services.check` raises.
    """
    config = services.config

    async def measured(version: int) -> dict[str, Any]:
        manifest = await asyncio.to_thread(first_policy, config, version)
        return await measure(config, manifest, partial(view.progress, f"evaluation of version {version}"), older=True)

    for version in put_off(folder.path, config.evaluation.keep_put_off):
        try:
            record = await while_alive(services, services.evaluation_retry.call(partial(measured, version)))
        except (CannotEvaluate, *EVALUATION_ERRORS) as error:
            view.say(f"the evaluation of version {version}, which was put off, is left out: {error}")
            continue
        folder.write_json(evaluation_file(version), record)
        view.say(f"pass@1 of version {version}, which was put off: {evaluated_of(record).pass_at_1:.3f}")
    due = max([1, *numbered(folder.path / POLICIES)]) - 1
    missing = due // (config.evaluation.every_batches or due + 1) - len(numbered(folder.path / DURING, ".json"))
    if missing > 0:
        view.say(f"{missing} evaluations were left out: their policies were not kept (evaluation.keep_put_off)")


async def announced_policy(config: Config, from_version: int, limit_s: float) -> PolicyManifest:
    """The first policy of this version or later that the broker announces. Raises CannotEvaluate after `limit_s`."""
    with suppress(TimeoutError):
        async with broker_of(config) as broker, asyncio.timeout(limit_s):
            async for manifest in broker.watch_policy():
                if manifest.policy_version >= from_version:
                    return manifest
    raise CannotEvaluate(f"the broker announced no policy of version {from_version} or later within {limit_s:.0f} s")


_RECORDED = (
    *("pass_at_1", "standard_error", "sampling_error", "pass_at_k", "truncated_share", "mean_tokens"),
    *("policy_version", "num_problems", "num_rollouts", "by_family", "by_language"),
)


def evaluation_record(evaluation: Evaluation, sampling: Sampling, max_tokens_total: int) -> dict[str, Any]:
    """evaluation_*.json. `problems` is also a file of pass rates (data/pass_rates.py)."""
    return {name: getattr(evaluation, name) for name in _RECORDED} | {
        "pass_at_k": {str(k): value for k, value in evaluation.pass_at_k.items()},
        "sampling": {**asdict(sampling), "max_tokens_total": max_tokens_total},
        "problems": [
            {
                "problem_id": one.problem_id,
                "passed": one.num_accepted,
                "sampled": one.num_rollouts,
                "truncated": one.num_truncated,
                "tokens": one.num_tokens,
            }
            for one in evaluation.problems
        ],
        "samples": [asdict(sample) for sample in evaluation.samples],
    }
