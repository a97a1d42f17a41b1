"""Measures the newest policy every `run.evaluate_every_batches` batches, keeps the best, and ends a run early.

The learner is paused for an evaluation, so that the policy does not change; rollouts are sampled and graded meanwhile,
up to the bound of admission.

INVARIANT: after every step that returned, the best policy measured so far is on the disk, and a run that fulfils its
condition for an early end has been ended. A pause that a killed process left behind is ended by the next one.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from nouscoder.domain.plan import EarlyEnd
from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.run_status import RunStatus
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.channel import PeerError
from nouscoder.rpc.learner_client import LearnerClient
from nouscoder.rpc.tls import channel_credentials
from nouscoder.rpc.worker_identity import observer_id
from nouscoder.run.evaluation import CannotEvaluate, measure, newest_policy, while_alive
from nouscoder.run.evaluations import (
    drop_worse,
    evaluated_of,
    evaluation_file,
    keep_if_best,
    recorded_evaluations,
)
from nouscoder.run.folder import RunFolder
from nouscoder.run.services import RunServices
from nouscoder.run.view import View

_PAUSED = "paused"  # the learner's state


class PeriodicEvaluation:
    """The evaluations during one run. `step` is called repeatedly during the run."""

    def __init__(self, folder: RunFolder, services: RunServices, view: View) -> None:
        run = services.config.run
        self._folder = folder
        self._services = services
        self._view = view
        self._every = run.evaluate_every_batches
        self._end = EarlyEnd(run.end_at_pass_at_1, run.end_after_no_gain)
        self._may_be_paused = True  # by an earlier process
        self._evaluations = recorded_evaluations(folder.path)

    async def step(self, status: RunStatus | None) -> None:
        """Measure the newest policy when that is due, and end the run when its condition is fulfilled.

        Raises NousCoderError when the evaluation is not possible.
        """
        if not self._every or status is None or status.finished:
            return
        if self._is_due(status.policy_version or 0):
            await self._evaluate()
        if reason := self._end.reason(self._evaluations):
            await self._finish_run(reason)
        if self._may_be_paused:
            await self._end_pause()

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
        if record is None:
            return
        evaluated = evaluated_of(record)
        await asyncio.to_thread(keep_if_best, self._folder.path, evaluated)
        self._folder.write_json(evaluation_file(evaluated.policy_version), record)
        await asyncio.to_thread(drop_worse, self._folder.path)
        self._evaluations = recorded_evaluations(self._folder.path)
        view.say(f"pass@1 on held-out problems of version {evaluated.policy_version}: {evaluated.pass_at_1:.3f}")

    async def _measure(self) -> dict[str, Any] | None:
        """The record of the newest policy; None when the run has finished."""
        self._may_be_paused = True
        manifest = await self._pause()
        if manifest is None:
            return None
        return await measure(self._services.config, manifest, self._view, f"of version {manifest.policy_version}")

    async def _pause(self) -> PolicyManifest | None:
        """The newest policy, after the learner has paused and the broker knows it; None when the run has finished.

        A learner that restarts has forgotten the pause, so it is asked again at each look. Raises CannotEvaluate.
        """
        config = self._services.config
        credentials = channel_credentials(config.tls)
        watcher = BrokerClient(config.broker.grpc, observer_id("watch"), credentials=credentials)
        trainer = LearnerClient(config.learner.grpc, credentials)
        limit_s = config.learner.batch_patience_s
        try:
            async with asyncio.timeout(limit_s), watcher as broker, trainer as learner:
                while True:
                    status = await broker.status()
                    if status.finished:
                        return None
                    with suppress(PeerError):  # it restarts
                        await learner.pause()
                        now = await learner.status()
                        if now.state == _PAUSED and now.policy_version == status.policy_version:
                            return await newest_policy(config)
                    await asyncio.sleep(self._services.watch_every_s)
        except TimeoutError:
            raise CannotEvaluate(f"the learner did not pause for an evaluation within {limit_s:.0f} s") from None

    async def _finish_run(self, reason: str) -> None:
        """End the run at the broker. The learner sees it after its pause."""
        config = self._services.config
        watcher = BrokerClient(config.broker.grpc, observer_id("watch"), credentials=channel_credentials(config.tls))
        async with watcher as broker:
            await broker.finish_run(reason)
        self._view.say(f"the run ends early: {reason}")

    async def _end_pause(self) -> None:
        """End the pause. If the learner does not answer, the next step repeats this."""
        config = self._services.config
        with suppress(PeerError):
            async with LearnerClient(config.learner.grpc, channel_credentials(config.tls)) as learner:
                await learner.resume()
            self._may_be_paused = False
