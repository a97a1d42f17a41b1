"""Samples memory, descriptors and processes of a service under load every few seconds."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from nouscoder.bench.measuring import usage_of


@dataclass(frozen=True, slots=True)
class Holding:
    """One sample. `memory_bytes` is the sum of proportional set sizes. Descriptors are those of the gateway without its
    client connections.
    """

    at_s: float
    memory_bytes: int
    num_descriptors: int
    num_processes: int


async def watch(pid: int, every_s: float, num_connections: Callable[[], int], into: list[Holding]) -> None:
    """Take samples until cancelled or until the service has exited."""
    while True:
        held = await asyncio.to_thread(look, pid, num_connections())
        if held is None:
            return
        into.append(held)
        await asyncio.sleep(every_s)


def look(pid: int, num_connections: int) -> Holding | None:
    """One sample now; None when the process does not exist."""
    try:
        num_descriptors = len(os.listdir(f"/proc/{pid}/fd")) - num_connections
        num_processes = 1 + len(psutil.Process(pid).children(recursive=True))
    except (OSError, psutil.Error):
        return None
    return Holding(time.monotonic(), usage_of(pid).memory_bytes, num_descriptors, num_processes)


def typical(held: Sequence[Holding]) -> Holding:
    """The medians of the samples."""
    return Holding(
        statistics.median(one.at_s for one in held),
        int(statistics.median(one.memory_bytes for one in held)),
        int(statistics.median(one.num_descriptors for one in held)),
        int(statistics.median(one.num_processes for one in held)),
    )


def first_and_last(held: Sequence[Holding], window_s: float) -> tuple[Holding, Holding]:
    """The medians of the first and of the last `window_s` seconds. Raises ValueError without samples."""
    if not held:
        raise ValueError("no samples of the service were taken")
    first = [one for one in held if one.at_s - held[0].at_s <= window_s]
    last = [one for one in held if held[-1].at_s - one.at_s <= window_s]
    return typical(first), typical(last)
