"""Has the broker hold what was trained.

INVARIANT: after `settle` the broker holds what the learner trained, or the learner exits with a message that says why.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from nouscoder.domain.policy import PolicyManifest
from nouscoder.errors import Unusable
from nouscoder.learner.core import LearnerCore
from nouscoder.learner.state.curriculum_copy import CurriculumCopy
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.channel import PeerRefused

log = logging.getLogger(__name__)


class Recovery:
    """Used by the loop that trains and by the publication in the background; one call at a time."""

    def __init__(self, core: LearnerCore, broker: BrokerClient, curriculum: CurriculumCopy) -> None:
        self._core = core
        self._broker = broker
        self._curriculum = curriculum
        self._one_at_a_time = asyncio.Lock()

    async def settle(self, policy: PolicyManifest | None) -> bool:
        """Have the broker hold all that was trained, with `policy` as the newest.

        Returns True if it had forgotten something. Raises Unusable when the broker's state is of another run, or ahead
        of the learner's disk.
        """
        async with self._one_at_a_time:
            trained = replace(self._core.trained_state(policy), curriculum=await self._curriculum.state())
            try:
                restored = await self._broker.restore_run(trained)
            except PeerRefused as error:
                raise Unusable(str(error)) from error
        if restored.was_behind:
            log.warning(
                "the broker had forgotten a part of the run: restored from this learner's state",
                extra={"batches": self._core.progress.batch_id + 1, "rollouts_lost": restored.rollouts_lost},
            )
        return restored.was_behind
