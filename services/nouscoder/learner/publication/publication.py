"""Publishes policies while training continues.

INVARIANT: versions reach the broker in order, each after its files are complete. At most one publication is in
progress. So when the weights of a version are copied, the broker knows all versions before it. The sender has a version
before the broker announces it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, ThreadPoolExecutor

from nouscoder.domain.policy import PolicyManifest
from nouscoder.learner.core import LearnerCore
from nouscoder.learner.metrics.prometheus import LearnerMetrics
from nouscoder.learner.publication.publisher import StagedPolicy
from nouscoder.learner.publication.sender import PolicySender
from nouscoder.learner.recovery import Recovery
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.channel import PeerBehind


class Publication:
    """Publishes policies. The weights are copied in `training`, the training thread, and written in another thread."""

    def __init__(
        self,
        core: LearnerCore,
        broker: BrokerClient,
        metrics: LearnerMetrics,
        training: Executor,
        recovery: Recovery,
        sender: PolicySender | None = None,
    ) -> None:
        self._core = core
        self._broker = broker
        self._recovery = recovery
        self._metrics = metrics
        self._training = training
        self._sender = sender
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="publication")
        self._task: asyncio.Task[None] | None = None
        self.known_version = -1  # the newest that the broker is known to have
        self.newest: PolicyManifest | None = None  # that this process published

    def known(self, policy_version: int) -> None:
        """Record that the broker has this version."""
        self.known_version = max(self.known_version, policy_version)
        self._metrics.published(self.known_version)

    async def begin(self) -> None:
        """Wait for the previous publication or raise its error, copy the weights, and publish in the background."""
        await self.settle()
        loop = asyncio.get_running_loop()
        policy = await loop.run_in_executor(self._training, self._core.stage_policy)
        self._task = asyncio.create_task(self._publish(policy))

    async def settle(self) -> None:
        """Wait for the publication in progress. Raises its error."""
        if self._task is not None:
            await asyncio.shield(self._task)

    def raise_if_failed(self) -> None:
        """Raise the error of a failed publication, without waiting for one in progress."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def close(self) -> None:
        """Stop publishing. Files that are being written are completed first."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._writing.shutdown, wait=True)

    async def _publish(self, policy: StagedPolicy) -> None:
        loop = asyncio.get_running_loop()
        manifest = await loop.run_in_executor(self._writing, self._core.write_policy, policy)
        if self._sender is not None:
            await loop.run_in_executor(self._writing, self._sender.offer, policy, manifest)
        try:
            await self._broker.publish_policy(manifest)
        except PeerBehind:
            await self._recovery.settle(manifest)
        self.newest = manifest
        self.known(manifest.policy_version)
