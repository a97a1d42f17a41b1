"""How a worker process holds leases: its heartbeats. worker_id.py has its name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

from nouscoder.domain.lease import Lease, LeaseLoss, WorkReport
from nouscoder.rpc.channel import PeerError, PeerUnreachable

log = logging.getLogger(__name__)

# Heartbeats in the length of a lease: two may be lost.
_BEATS_A_LEASE = 3


# BrokerClient.heartbeat: extends leases; returns the lost ones, each with the reason.
Heartbeat = Callable[[Sequence[str], WorkReport | None], Awaitable[dict[str, LeaseLoss]]]


class LeaseKeeper:
    """Sends heartbeats for leases, so that they last as long as the worker works on them.

    INVARIANT: each heartbeat contains a lease from when it is added until it is dropped or reported lost.
    """

    def __init__(self, heartbeat: Heartbeat, report: Callable[[], WorkReport] | None = None) -> None:
        self._heartbeat = heartbeat
        self._report = report
        self._kept: dict[str, Lease] = {}
        self._lost: dict[str, LeaseLoss] = {}
        self._changed = asyncio.Event()

    def add(self, lease: Lease) -> None:
        """Send heartbeats for this lease from now on."""
        self._kept[lease.lease_id] = lease
        self._changed.set()

    def drop(self, lease_id: str) -> None:
        """Stop sending heartbeats for this lease: its work is submitted or given up. Unknown ids are ignored."""
        self._kept.pop(lease_id, None)
        self._lost.pop(lease_id, None)

    def take_lost(self) -> dict[str, LeaseLoss]:
        """The leases lost since the last call, each with the reason: stop the work on them."""
        lost, self._lost = self._lost, {}
        return lost

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._beat_for_ever(), name="lease-keeper")
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _beat_for_ever(self) -> None:
        while True:
            while not self._kept:
                self._changed.clear()
                await self._changed.wait()
            await asyncio.sleep(min(lease.expires_in_s for lease in self._kept.values()) / _BEATS_A_LEASE)
            await self._beat()

    async def _beat(self) -> None:
        asked = list(self._kept)
        if not asked:
            return
        try:
            lost = await self._heartbeat(asked, None if self._report is None else self._report())
        except PeerUnreachable:
            return  # the next heartbeat comes soon, and leases do not expire while the broker is absent
        except PeerError as error:
            log.error("heartbeat refused", extra={"reason": str(error)})
            return
        # A lease that was dropped during the heartbeat is not lost: its work is done.
        for lease_id, reason in lost.items():
            if self._kept.pop(lease_id, None) is not None:
                self._lost[lease_id] = reason
