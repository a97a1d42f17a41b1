"""pass@1 of policies of a run, measured through the services of the run: before, during and after the training.

evaluation_before.json and evaluation_after.json hold the evaluations of the first and the last policy.
evaluations/00000012.json holds that of version 12, measured during the run.

INVARIANT: a policy is measured once per run, and its result is recorded. A resumed run reads the recorded result.

INVARIANT: the weights of the best evaluated policy of a run are on its disk: its first policy, a folder of kept/, or
(the last policy) the newest of policies/. Its checkpoint is too: in kept/, or (the last policy) the newest of
checkpoints/; the first policy has none. After `drop_worse` kept/ holds no other.

The learner keeps the checkpoint of the policy that an evaluation measures in the run folder. It has the state of a
version only until it trains the next batch. So it is asked before that version exists, and the version that it keeps is
the one that is measured.

INVARIANT: when the block of `kept_checkpoint` ends without an error, the checkpoint of its version is complete on the
disk.

`PeriodicEvaluation` measures a new policy about every `evaluation.every_batches` batches, keeps the best, and ends a
run early. Training goes on meanwhile. The generation worker that samples the evaluation keeps the version that is
measured until all of it is sampled, and takes over the newest policy then; other workers follow the learner. Its
rollouts for the training are older for that time, within the bound of staleness.

A policy that comes due while another one is measured, or whose evaluation is interrupted, waits in kept/: generation
goes back to it after the training (`make_up`). At most `evaluation.keep_put_off` wait; then a later policy is measured.

INVARIANT: a recorded evaluation is of one policy version, whose weights and checkpoint were kept before that. While no
evaluation runs, only those of the best policy and of those that wait are left of what was kept. A run that fulfils its
condition for an early end is ended by the next step. At most one evaluation runs at a time, and it is over when the
block ends.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from nouscoder.atomic_files import numbered, remove, write_whole
from nouscoder.config import Config
from nouscoder.data.problem_index import held_out_problems
from nouscoder.domain.plan import EarlyEnd, Evaluated, best_of
from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.rollout import Sampling
from nouscoder.domain.run_status import RunStatus
from nouscoder.errors import NousCoderError, Unusable
from nouscoder.evaluation.pass_at_1 import EVALUATION_ERRORS, Evaluation, evaluate
from nouscoder.policy_folder.compose import PolicyFilesMissing, has_weights, link_weights
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
from nouscoder.recorded_evaluations import DURING, RecordedEvaluations, evaluation_files
from nouscoder.rpc.channel import PeerError
from nouscoder.rpc.generation_client import GenerationClient, PolicyReplaced
from nouscoder.rpc.learner_client import LearnerClient
from nouscoder.rpc.tls import channel_credentials
from nouscoder.rpc.verifier_client import VerifierClient, verifier_token
from nouscoder.run.folder import POLICIES, RunFolder
from nouscoder.run.view import View
from nouscoder.run.watch import broker_of, generation_started

if TYPE_CHECKING:
    from nouscoder.run.services import RunServices

# The evaluations on the disk, and the policy with the best one.

_KEPT = "kept"
_CHECKPOINT = ".checkpoint"  # the learner writes these folders of kept/
_OF_A_VERSION = re.compile(r"\d{8}(\.|$)")


class NoSuchVersion(Unusable):
    """The weights of a policy version are not on the disk any more. The message names it."""


def evaluation_file(policy_version: int) -> str:
    """The name of the record of an evaluation during the run, in the run folder."""
    return f"{DURING}/{policy_version:08d}.json"


def recorded_evaluations(run: Path) -> tuple[Evaluated, ...]:
    """All evaluations of a run folder, one a version, in order of versions. Raises NousCoderError for a damaged one."""
    found = {each.policy_version: each for file in evaluation_files(run) if file.is_file() for each in [_read(file)]}
    return tuple(found[version] for version in sorted(found))


def log_evaluations(run: Path) -> None:
    """Put the evaluations that metrics.jsonl lacks into its last lines, the newest into the last.

    The learner logs an evaluation with the step after it, and there is none after the last. Call it when the learner
    has ended. Raises StorageError.
    """
    file = run / "metrics.jsonl"
    lines = [json.loads(text) for text in file.read_text(encoding="utf8").splitlines()] if file.exists() else []
    logged = {line["evaluation"]["policy_version"] for line in lines if "evaluation" in line}
    due = [each for each in RecordedEvaluations(run).figures() if each["policy_version"] not in logged]
    free = [line for line in reversed(lines) if "evaluation" not in line]
    if not due or not free:
        return
    for line, figures in zip(free, reversed(due), strict=False):
        line["evaluation"] = figures
    write_whole(file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())


def keep_weights(run: Path, policy_version: int) -> None:
    """Keep the weights of a published policy. Call it before the policy is measured, while the learner has them."""
    link_weights(run / _KEPT / _number(policy_version), run / POLICIES / _number(policy_version))


def kept_checkpoint_folder(run: Path, policy_version: int) -> Path:
    """Where the checkpoint of a version is, when the learner has kept it."""
    return run / _KEPT / f"{_number(policy_version)}{_CHECKPOINT}"


def put_off(run: Path, most: int) -> list[int]:
    """The versions that wait for their evaluation with whole weights and checkpoints: the first `most` of them."""
    kept = [version for version in numbered(run / _KEPT) if kept_checkpoint_folder(run, version).is_dir()]
    return [version for version in kept if not (run / evaluation_file(version)).exists()][:most]


def drop_worse(run: Path, waiting: Collection[int] = ()) -> None:
    """Remove all that is kept but of the best policy and those that wait. Call it while the learner keeps none."""
    kept, best = run / _KEPT, best_of(recorded_evaluations(run)).policy_version
    stay = {f"{_number(version)}{ending}" for version in (best, *waiting) for ending in ("", _CHECKPOINT)}
    for folder in [*kept.iterdir()] if kept.is_dir() else []:
        if _OF_A_VERSION.match(folder.name) and folder.name not in stay:
            remove(folder)


def weights_folder(config: Config, policy_version: int) -> Path:
    """The folder that holds the weights of a version of a run. Raises NoSuchVersion naming those that are there."""
    run, first = config.run.folder, config.in_run_folder(config.policy.path)
    if policy_version == 0:
        return first
    for parent in (POLICIES, _KEPT):
        folder = run / parent / _number(policy_version)
        if has_weights(folder):
            return folder
    there = sorted({0, *numbered(run / POLICIES), *numbered(run / _KEPT)})
    raise NoSuchVersion(
        f"the weights of version {policy_version} are not in {run}: there are versions {', '.join(map(str, there))}"
    )


def evaluated_of(record: dict[str, Any]) -> Evaluated:
    """The version and its pass@1 in the record of an evaluation."""
    return Evaluated(int(record["policy_version"]), float(record["pass_at_1"]))


def _read(file: Path) -> Evaluated:
    try:
        return evaluated_of(json.loads(file.read_text(encoding="utf8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NousCoderError(f"{file} is not the record of an evaluation: {error}") from error


def _number(policy_version: int) -> str:
    return f"{policy_version:08d}"


# One evaluation.

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


# The checkpoint of the policy that is measured.


class NotKept(NousCoderError):
    """The learner has not kept a checkpoint. The message says why."""


@asynccontextmanager
async def kept_checkpoint(config: Config, from_version: int) -> AsyncIterator[int]:
    """Have the learner keep the checkpoint of this policy version, or of the first later one that is possible.

    The block gets the version as soon as its state is copied, and ends when the checkpoint is complete. The learner may
    be silent for evaluation.limit_s. Raises NotKept.
    """
    client = LearnerClient(config.learner.grpc, channel_credentials(config.tls), config.asked_run)
    async with client as learner, aclosing(_asked(learner, from_version, config.evaluation.limit_s)) as answers:
        version = await anext(answers, None)
        if version is None:
            raise NotKept("the learner kept no checkpoint")
        try:
            yield version
        except Exception:
            await _ended(answers)  # the learner writes nothing more, so what it kept can be removed
            raise
        fault = await _ended(answers)
    if not kept_checkpoint_folder(config.run.folder, version).is_dir():
        raise NotKept(f"the checkpoint of version {version} was not kept: {fault or 'the learner ended'}")


async def _asked(learner: LearnerClient, from_version: int, limit_s: float) -> AsyncGenerator[int, None]:
    """The version, once when its state is copied and once when it is complete. Raises NotKept."""
    try:
        async with aclosing(learner.keep_checkpoint(from_version, limit_s)) as answers:
            async for version, _ in answers:
                yield version
    except PeerError as error:
        raise NotKept(str(error)) from error


async def _ended(answers: AsyncGenerator[int, None]) -> str:
    """Wait until the learner has said all. Returns why it did not, if it did not."""
    try:
        async for _ in answers:
            pass
    except NotKept as error:
        return str(error)
    return ""


# Evaluations during the training.


_MEASURED, _ONLY_KEPT = True, False  # what is done with a version


class PeriodicEvaluation:
    """The evaluations during one run. `step` is called repeatedly during the run. Use as `async with`."""

    def __init__(self, folder: RunFolder, services: RunServices, view: View) -> None:
        section = services.config.evaluation
        self._folder = folder
        self._services = services
        self._view = view
        self._every, self._most_put_off = section.every_batches, section.keep_put_off
        self._end = EarlyEnd(section.end_at_pass_at_1, section.end_after_no_gain)
        self._evaluations = recorded_evaluations(folder.path)
        self._running: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._begun: dict[bool, int] = {}  # the version that is _MEASURED, and that which is _ONLY_KEPT, while it is
        self._is_known = False  # whether the learner has said which version is measured
        self._disk = asyncio.Lock()  # nothing is removed while a policy is only kept
        self._last_said = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the evaluation that runs. After an error it is cancelled. Raises what `step` raises."""
        tasks = [task for task in (self._running, self._keeping) if task is not None]
        for task in tasks if kind is not None else []:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=kind is not None)

    async def step(self, status: RunStatus | None) -> None:
        """Begin to measure a policy when that is due; end the run when its condition is met. Raises NousCoderError."""
        if self._running is not None and self._running.done():
            ended, self._running = self._running, None
            await ended
        if not self._every or status is None or status.finished or status.policy_version is None:
            return
        if reason := self._end.reason(self._evaluations):
            await self._finish_run(reason)
        elif (version := self._due(status.policy_version)) is None:
            return
        elif self._running is None:
            self._begun[_MEASURED] = version
            self._running = asyncio.create_task(self._evaluate(version), name="evaluation")
        elif self._is_known and not self._begun.get(_ONLY_KEPT) and len(self._waiting()) < self._most_put_off:
            self._begun[_ONLY_KEPT] = version
            self._keeping = asyncio.create_task(self._keep(version), name="keeping")

    def _waiting(self) -> list[int]:
        """The versions that wait, without that which is being measured."""
        found = put_off(self._folder.path, self._most_put_off + 1)
        return [version for version in found if version != self._begun.get(_MEASURED)][: self._most_put_off]

    def _due(self, policy_version: int) -> int | None:
        """The version to measure or to keep next, if the next batch may make it; None when it is not yet due."""
        known = [each.policy_version for each in self._evaluations]
        due = max([0, *known, *self._waiting(), *self._begun.values()]) + self._every
        version = max(due, policy_version)
        # The evaluation after the run measures the last version.
        is_due = policy_version >= due - 1 and version < self._services.config.run.total_batches
        return version if is_due else None

    async def _evaluate(self, from_version: int) -> None:
        """Measure, record and keep. An interruption begins it again as `services.evaluation_retry` allows."""
        services, view = self._services, self._view
        measuring = services.evaluation_retry.call(
            partial(self._measure, from_version), lambda error: view.say(f"the evaluation begins again: {error}")
        )
        record = await while_alive(services, measuring)
        if record is not None:
            evaluated = evaluated_of(record)
            self._folder.write_json(evaluation_file(evaluated.policy_version), record)
            self._evaluations = recorded_evaluations(self._folder.path)
            view.say(f"pass@1 on held-out problems of version {evaluated.policy_version}: {evaluated.pass_at_1:.3f}")
        async with self._disk:
            await asyncio.to_thread(drop_worse, self._folder.path, self._waiting())

    async def _keep(self, from_version: int) -> None:
        """Keep a policy that is measured after the training."""
        async with self._disk:
            await self._measure(from_version, only_keep=True)

    async def _measure(self, from_version: int, *, only_keep: bool = False) -> dict[str, Any] | None:
        """The record of a policy whose weights and checkpoint are kept; None when it is put off, as by a newer one."""
        config, run, version = self._services.config, self._folder.path, from_version
        own, other = (_ONLY_KEPT, _MEASURED) if only_keep else (_MEASURED, _ONLY_KEPT)
        self._begun[own], self._is_known = from_version, only_keep and self._is_known
        try:
            async with kept_checkpoint(config, from_version) as version:
                if version == self._begun.get(other):
                    raise NotKept("it is kept already")
                self._begun[own], self._is_known = version, True
                manifest = await announced_policy(config, version, config.evaluation.limit_s)
                await asyncio.to_thread(keep_weights, run, version)
                if not only_keep and manifest.policy_version != version:
                    raise PolicyReplaced(f"version {manifest.policy_version} is published already")
                if not only_keep:
                    return await measure(config, manifest)
            reason = "another one runs"
        except (NotKept, CannotEvaluate, PolicyReplaced, PolicyFilesMissing, WeightsMissing) as error:
            reason = str(error)
        finally:
            self._begun.pop(own, None)
        when = "until the training has ended" if version in self._waiting() else "to a later version"
        # Said once: the learner may be away for many steps.
        message = f"the evaluation of version {version} is put off {when}: {reason}"
        if message != self._last_said:
            self._last_said = message
            self._view.say(message)
        return None

    async def _finish_run(self, reason: str) -> None:
        """End the run at the broker. The learner sees it when it asks for its next batch."""
        async with broker_of(self._services.config) as broker:
            await broker.finish_run(reason)
        self._view.say(f"the run ends early: {reason}")
