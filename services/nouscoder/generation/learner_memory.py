"""Policies from the learner's memory: the learner sends them to the engine's processes, without files.

INVARIANT: whatever fails on this way, the caller is told to take the files, and the engine samples on meanwhile. Only
an engine that no longer runs is an error.
"""

from __future__ import annotations

import asyncio
import logging
import time

from nouscoder.domain.policy import Meeting, PolicyManifest
from nouscoder.generation.engines.base import EngineError, EngineStopped, StagingEngine
from nouscoder.generation.metrics import FetchResult, GenerationMetrics
from nouscoder.retry import Retry
from nouscoder.rpc.channel import PeerBusy, PeerError
from nouscoder.rpc.learner_client import LearnerClient

log = logging.getLogger(__name__)

# Many engines ask for a new policy at once, and the learner sends to a few at a time.
_BUSY = Retry("a transfer from the learner's memory", (PeerBusy,), for_s=120.0, wait_s=0.2)


class LearnerMemory:
    """Stages policies in one engine, one at a time."""

    def __init__(self, client: LearnerClient, engine: StagingEngine, metrics: GenerationMetrics) -> None:
        self._client = client
        self._engine = engine
        self._metrics = metrics
        self._one_at_a_time = asyncio.Lock()
        self._digests: dict[int, str] = {}  # of the policies that the engine may hold in memory

    async def stage(self, manifest: PolicyManifest) -> bool:
        """Whether the engine now holds the policy beside the one in use. Raises EngineStopped."""
        version = manifest.policy_version
        started_s = time.monotonic()
        async with self._one_at_a_time:
            try:
                meeting = await self._meeting(manifest)
                await self._engine.stage_policy(manifest, meeting)
            except EngineStopped:
                raise
            except (PeerError, EngineError) as error:
                reason = {"policy_version": version, "reason": str(error)}
                log.warning("a policy did not come from the learner's memory, its files are taken", extra=reason)
                self._metrics.policy_fetches.labels(FetchResult.NOT_FROM_MEMORY.value).inc()
                return False
        seconds = time.monotonic() - started_s
        self._metrics.policy_fetches.labels(FetchResult.FROM_MEMORY.value).inc()
        self._metrics.policy_fetch_seconds.observe(seconds)
        extra = {"policy_version": version, "fetch_s": round(seconds, 3), "changes": meeting.changes}
        log.info("policy received from memory", extra=extra)
        return True

    async def _meeting(self, manifest: PolicyManifest) -> Meeting:
        """Where the learner sends the policy, or only its changes. Raises PeerError."""
        in_use = self._engine.version_in_memory
        base = {version: digest for version, digest in self._digests.items() if version == in_use}
        self._digests = {**base, manifest.policy_version: manifest.digest}
        wanted = (manifest.policy_version, manifest.digest, self._engine.num_receivers, "".join(base.values()))
        return await _BUSY.call(lambda: self._client.send_policy(*wanted))

    async def load(self, policy_version: int) -> float:
        """Load the staged policy. Returns the seconds for which decoding paused. Raises EngineError."""
        return await self._engine.load_staged(policy_version)
