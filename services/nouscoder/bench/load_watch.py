"""What a service and all below it hold while it is under load, looked at every few seconds."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nouscoder.bench.processes import descendants, usage_of


@dataclass(frozen=True, slots=True)
class Holding:
    """One look. `memory_bytes` is the sum of proportional set sizes; descriptors are the gateway's own, without its
    connections to clients.
    """

    at_s: float
    memory_bytes: int
    num_descriptors: int
    num_processes: int


async def watch(pid: int, every_s: float, num_connections: Callable[[], int], into: list[Holding]) -> None:
    """Until cancelled. Ends by itself when the service has."""
    while True:
        held = await asyncio.to_thread(look, pid, num_connections())
        if held is None:
            return
        into.append(held)
        await asyncio.sleep(every_s)


def look(pid: int, num_connections: int) -> Holding | None:
    """None when there is no such process."""
    try:
        num_descriptors = len(os.listdir(f"/proc/{pid}/fd")) - num_connections
    except OSError:
        return None
    usage = usage_of(pid)
    return Holding(time.monotonic(), usage.memory_bytes, num_descriptors, 1 + len(descendants(pid)))


def typical(held: Sequence[Holding]) -> Holding:
    """The medians; submissions come and go between two looks."""
    return Holding(
        statistics.median(one.at_s for one in held),
        int(statistics.median(one.memory_bytes for one in held)),
        int(statistics.median(one.num_descriptors for one in held)),
        int(statistics.median(one.num_processes for one in held)),
    )


def first_and_last(held: Sequence[Holding], window_s: float) -> tuple[Holding, Holding]:
    """What was typical of the first and of the last `window_s` seconds. Raises ValueError when nobody looked."""
    if not held:
        raise ValueError("nobody looked at the service")
    first = [one for one in held if one.at_s - held[0].at_s <= window_s]
    last = [one for one in held if held[-1].at_s - one.at_s <= window_s]
    return typical(first), typical(last)
