"""Measures the newest policy about every `run.evaluate_every_batches` batches, keeps the best, and ends a run early.

Training goes on meanwhile. The generation worker that samples the evaluation keeps the version that is measured until
all of it is sampled, and takes over the newest policy then; other workers follow the learner. Its rollouts for the
training are older for that time, within the bound of staleness.

INVARIANT: a recorded evaluation is of one policy version, whose weights were kept before it began. While no evaluation
runs, of the kept weights only those of the best policy are left. A run that fulfils its condition for an early end is
ended by the next step. At most one evaluation runs at a time, and it is over when the block ends.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

from nouscoder.domain.plan import EarlyEnd
from nouscoder.domain.run_status import RunStatus
from nouscoder.policy_folder.compose import PolicyFilesMissing
from nouscoder.policy_folder.weights_files import WeightsMissing
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.generation_client import PolicyReplaced
from nouscoder.rpc.tls import channel_credentials
from nouscoder.rpc.worker_identity import observer_id
from nouscoder.run.evaluation import measure, newest_policy, while_alive
from nouscoder.run.evaluations import drop_worse, evaluated_of, evaluation_file, keep_weights, recorded_evaluations
from nouscoder.run.folder import RunFolder
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
        """Begin to measure the newest policy when that is due, and end the run when its condition is fulfilled.

        Raises NousCoderError when an evaluation is not possible.
        """
        if self._running is not None and self._running.done():
            ended, self._running = self._running, None
            await ended
        if not self._every or status is None or status.finished:
            return
        if self._running is None and self._is_due(status.policy_version or 0):
            self._running = asyncio.create_task(self._evaluate(), name="evaluation")
        if reason := self._end.reason(self._evaluations):
            await self._finish_run(reason)

    def _is_due(self, policy_version: int) -> bool:
        if policy_version >= self._services.config.run.total_batches:
            return False  # the evaluation after the run measures it
        last = max((each.policy_version for each in self._evaluations), default=0)
        return policy_version - last >= self._every

    async def _evaluate(self) -> None:
        """Measure, record and keep. An interruption begins it again as `services.evaluation_retry` allows."""
        services, view = self._services, self._view
        measuring = services.evaluation_retry.call(
            self._measure, lambda error: view.say(f"the evaluation begins again: {error}")
        )
        record = await while_alive(services, measuring)
        if record is not None:
            evaluated = evaluated_of(record)
            self._folder.write_json(evaluation_file(evaluated.policy_version), record)
            self._evaluations = recorded_evaluations(self._folder.path)
            view.say(f"pass@1 on held-out problems of version {evaluated.policy_version}: {evaluated.pass_at_1:.3f}")
        await asyncio.to_thread(drop_worse, self._folder.path)

    async def _measure(self) -> dict[str, Any] | None:
        """The record of the newest policy; None when a newer one came into use before it was measured."""
        manifest = await newest_policy(self._services.config)
        version = manifest.policy_version
        try:
            await asyncio.to_thread(keep_weights, self._folder.path, version)
            return await measure(self._services.config, manifest)
        except (PolicyReplaced, PolicyFilesMissing, WeightsMissing) as error:
            self._view.say(f"version {version} is not measured, a later one will be: {error}")
            return None

    async def _finish_run(self, reason: str) -> None:
        """End the run at the broker. The learner sees it when it asks for its next batch."""
        config = self._services.config
        watcher = BrokerClient(config.broker.grpc, observer_id("watch"), credentials=channel_credentials(config.tls))
        async with watcher as broker:
            await broker.finish_run(reason)
        self._view.say(f"the run ends early: {reason}")
