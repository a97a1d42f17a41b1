"""Measures a new policy about every `run.evaluate_every_batches` batches, keeps the best, and ends a run early.

Training goes on meanwhile. The generation worker that samples the evaluation keeps the version that is measured until
all of it is sampled, and takes over the newest policy then; other workers follow the learner. Its rollouts for the
training are older for that time, within the bound of staleness.

INVARIANT: a recorded evaluation is of one policy version, whose weights and checkpoint were kept before that. While no
evaluation runs, only those of the best policy are left of what was kept. A run that fulfils its condition for an early
end is ended by the next step. At most one evaluation runs at a time, and it is over when the block ends.
"""

from __future__ import annotations

import asyncio
from functools import partial
from types import TracebackType
from typing import Any, Self

from nouscoder.domain.plan import EarlyEnd
from nouscoder.domain.run_status import RunStatus
from nouscoder.policy_folder.compose import PolicyFilesMissing
from nouscoder.policy_folder.weights_files import WeightsMissing
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.generation_client import PolicyReplaced
from nouscoder.rpc.tls import channel_credentials
from nouscoder.rpc.worker import observer_id
from nouscoder.run.evaluation import CannotEvaluate, announced_policy, measure, while_alive
from nouscoder.run.evaluations import drop_worse, evaluated_of, evaluation_file, keep_weights, recorded_evaluations
from nouscoder.run.folder import RunFolder
from nouscoder.run.kept_checkpoint import NotKept, kept_checkpoint
from nouscoder.run.services import RunServices
from nouscoder.run.view import View


class PeriodicEvaluation:
    """The evaluations during one run. `step` is called repeatedly during the run. Use as `async with`."""

    def __init__(self, folder: RunFolder, services: RunServices, view: View) -> None:
        run = services.config.run
        self._folder = folder
        self._services = services
        self._view = view
        self._every = run.evaluate_every_batches
        self._end = EarlyEnd(run.end_at_pass_at_1, run.end_after_no_gain)
        self._evaluations = recorded_evaluations(folder.path)
        self._running: asyncio.Task[None] | None = None
        self._last_said = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the evaluation that runs. After an error it is cancelled. Raises what `step` raises."""
        if self._running is None:
            return
        if kind is None:
            await self._running
            return
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    async def step(self, status: RunStatus | None) -> None:
        """Begin to measure the next policy when that is due, and end the run when its condition is fulfilled.

        Raises NousCoderError when an evaluation is not possible.
        """
        if self._running is not None and self._running.done():
            ended, self._running = self._running, None
            await ended
        if not self._every or status is None or status.finished or status.policy_version is None:
            return
        if reason := self._end.reason(self._evaluations):
            await self._finish_run(reason)
        elif self._running is None and (version := self._due(status.policy_version)) is not None:
            self._running = asyncio.create_task(self._evaluate(version), name="evaluation")

    def _due(self, policy_version: int) -> int | None:
        """The version to measure next, if the next batch may make it; None when it is not yet due."""
        due = max((each.policy_version for each in self._evaluations), default=0) + self._every
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
        await asyncio.to_thread(drop_worse, self._folder.path)

    async def _measure(self, from_version: int) -> dict[str, Any] | None:
        """The record of a policy whose weights and checkpoint are kept.

        None when that was not possible, for example because a newer policy came into use before it was measured.
        """
        config = self._services.config
        try:
            async with kept_checkpoint(config, from_version) as version:
                manifest = await announced_policy(config, version, config.run.evaluation_limit_s)
                if manifest.policy_version != version:
                    raise PolicyReplaced(f"version {manifest.policy_version} is published already")
                await asyncio.to_thread(keep_weights, self._folder.path, version)
                return await measure(config, manifest)
        except (NotKept, CannotEvaluate, PolicyReplaced, PolicyFilesMissing, WeightsMissing) as error:
            self._say_once(f"the evaluation of version {from_version}, or of a later one, is put off: {error}")
            return None

    def _say_once(self, message: str) -> None:
        """Say it unless it was the last that was said so: the learner may be away for many steps."""
        if message != self._last_said:
            self._last_said = message
            self._view.say(message)

    async def _finish_run(self, reason: str) -> None:
        """End the run at the broker. The learner sees it when it asks for its next batch."""
        config = self._services.config
        watcher = BrokerClient(config.broker.grpc, observer_id("watch"), credentials=channel_credentials(config.tls))
        async with watcher as broker:
            await broker.finish_run(reason)
        self._view.say(f"the run ends early: {reason}")
