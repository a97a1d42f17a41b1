"""Sends the tokens of long rollouts to the broker while they are sampled, so that another worker can continue them.

INVARIANT: what the broker keeps of a rollout begins what this worker has sampled of it, or the next report replaces it.
A report that fails costs nothing: its tokens are in the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from nouscoder.generation.engines.base import EngineError
from nouscoder.generation.rollouts import Rollouts
from nouscoder.generation.task_broker import TaskBroker
from nouscoder.rpc.channel import PeerError

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5
# The time to the next report when the broker does not take one, for example because its memory is full.
_AGAIN_S = 5.0

Leases = Callable[[], Mapping[str, str]]


class PartialReports:
    """Reports a rollout when it has sampled `every_tokens` tokens more; 0 never."""

    def __init__(self, broker: TaskBroker, rollouts: Rollouts, every_tokens: int) -> None:
        self._broker = broker
        self._rollouts = rollouts
        self._every_tokens = every_tokens
        self._lost: set[str] = set()

    async def run(self, leases: Leases) -> None:
        """Send reports until cancelled. `leases` answers the lease id of each rollout in progress."""
        while self._every_tokens:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                await self._send(leases(), is_last=False)
            except (PeerError, EngineError) as error:
                log.warning("partial rollouts were not saved", extra={"reason": str(error)})
                await asyncio.sleep(_AGAIN_S)
        await asyncio.Event().wait()

    async def send_last(self, leases: Mapping[str, str]) -> None:
        """Report every rollout with more than `every_tokens` sampled tokens, before its lease is given back.

        Raises PeerError and EngineError.
        """
        if self._every_tokens:
            await self._send(leases, is_last=True)

    async def _send(self, leases: Mapping[str, str], *, is_last: bool) -> None:
        self._lost &= set(leases.values())
        asked = {name: lease_id for name, lease_id in leases.items() if lease_id not in self._lost}
        unsaved = await self._rollouts.unsaved(asked, self._every_tokens, is_last=is_last)
        if not unsaved:
            return
        answers = await self._broker.keep_partials({asked[name]: piece for name, piece in unsaved.items()})
        for rollout_id, piece in unsaved.items():
            num_kept = answers[asked[rollout_id]]
            if num_kept is None:
                self._lost.add(asked[rollout_id])
            self._rollouts.note_saved(rollout_id, piece if num_kept == piece.end_token else None)
