"""Evaluations during the training.

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
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from nouscoder.domain.plan import EarlyEnd
from nouscoder.domain.run_status import RunStatus
from nouscoder.policy_folder.compose import PolicyFilesMissing
from nouscoder.policy_folder.weights_files import WeightsMissing
from nouscoder.rpc.generation_client import PolicyReplaced
from nouscoder.run.evaluation_files import (
    drop_worse,
    evaluated_of,
    evaluation_file,
    keep_weights,
    put_off,
    recorded_evaluations,
)
from nouscoder.run.folder import RunFolder
from nouscoder.run.kept_checkpoint import NotKept, kept_checkpoint
from nouscoder.run.view import View
from nouscoder.run.watch import broker_of

if TYPE_CHECKING:
    from nouscoder.run.services import RunServices
from nouscoder.run.evaluation import CannotEvaluate, announced_policy, measure, while_alive

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
