"""The sweeper, and the clock of a run.

The sweeper expires leases by a clock of the run, which advances only while the broker and Redis work. Redis' own clock
may be set forwards or back, and a worker cannot send heartbeats while the broker or Redis stands still. So leases are
measured by the run's clock in Redis. Once a period the broker advances it by the monotonic time that it observed. The
clock does not advance while the broker is stopped, its event loop is blocked, or Redis does not answer (an absence),
nor for lease_s seconds after that, so every live worker can send a heartbeat first. This extra time ends when the clock
advances by another broker, because that one served the workers meanwhile.

INVARIANT: a lease expires only after lease_s seconds without a heartbeat in which the broker and Redis worked. The
lease of a dead worker is taken back after lease_s, plus, for each absence, its length and lease_s.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

from nouscoder.broker import streams
from nouscoder.broker.errors import BrokerUnavailable
from nouscoder.broker.records import Records
from nouscoder.broker.store import Store
from nouscoder.broker.wakeups import Waits

log = logging.getLogger(__name__)

_LONGEST_PERIOD_S = 1.0
_PERIODS_A_LEASE = 5
# A gap longer than a period plus this share of a lease is an absence. Workers send three heartbeats in a lease.
_GAP_SHARE = 0.25


class Sweeper:
    """Call `sweep` once a period. `now_s` is a monotonic clock."""

    def __init__(self, store: Store, lease_s: float, now_s: Callable[[], float]) -> None:
        self.period_s = min(_LONGEST_PERIOD_S, lease_s / _PERIODS_A_LEASE)
        self._store = store
        self._lease_s = lease_s
        self._now_s = now_s
        self._name = secrets.token_hex(8)
        self._seen_tick = -1
        self._seen_clock_ms = 0
        self._last_s: float | None = None
        self._was_away = False  # an absence ended at the last look
        self._still_s = lease_s  # the clock starts after this time: before its start the broker was absent

    async def sweep(self) -> int:
        """Advance the clock, then take back expired leases; returns how many. Raises BrokerUnavailable."""
        counted_ms = round(1000 * self._observe())
        try:
            tick, clock_ms = map(int, await self._store.run("tick", self._name, self._seen_tick, counted_ms))
            if clock_ms > self._seen_clock_ms and self._seen_tick >= 0 and not self._was_away:
                self._still_s = 0.0  # the clock runs: another broker served the holders all the time
            self._seen_tick, self._seen_clock_ms = tick, clock_ms
            return await streams.sweep(self._store)
        except BrokerUnavailable:
            self._still_s = self._lease_s
            self._seen_tick = -1  # what was seen before this absence tells nothing about now
            raise

    def _observe(self) -> float:
        """By how many seconds the clock advances: by none for lease_s after an absence.

        An absence counts as one period of that time, so leases expire even on a machine where every period is late.
        """
        now_s = self._now_s()
        gap_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        self._was_away = was_away = gap_s > self.period_s + _GAP_SHARE * self._lease_s
        observed_s = self.period_s if was_away else gap_s
        if not self._still_s:
            self._still_s = self._lease_s if was_away else 0.0
            return observed_s
        counted_s = max(0.0, observed_s - self._still_s)
        self._still_s = max(0.0, self._still_s - observed_s)
        return counted_s


async def keep_sweeping(store: Store, records: Records, lease_s: float, waits: Waits) -> None:
    """Take back expired leases and delete the records that no rollout needs any more, until the broker stops."""
    sweeper = Sweeper(store, lease_s, asyncio.get_running_loop().time)
    while not waits.ended:
        await asyncio.sleep(sweeper.period_s)
        try:
            num_lost = await sweeper.sweep()
            await records.delete_garbage()
        except BrokerUnavailable as error:
            log.warning("sweep put off", extra={"reason": str(error)})
            continue
        if num_lost:
            log.info("leases taken back", extra={"leases": num_lost})
