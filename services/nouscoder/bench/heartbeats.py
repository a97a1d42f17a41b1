"""A process that holds leases and sends heartbeats for them at a fixed rate: `python -m nouscoder.bench.heartbeats`.

Arguments: address, number of leases, seconds between heartbeats. It prints a line once it holds the leases, and sends
heartbeats until its standard input is closed. Then it prints {"beats": [[time, seconds] ...], "lost": N} as JSON. Times
are those of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from nouscoder.rpc.broker_client import BrokerClient


async def beat(address: str, num_leases: int, pace_s: float) -> None:
    """Lease tasks, send heartbeats, and print the result."""
    async with BrokerClient(address, "generation-beats-0-1") as client:
        lease_ids = [item.lease.lease_id for item in (await client.lease_tasks(num_leases)).tasks]
        _say(str(len(lease_ids)))
        closed = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        beats: list[tuple[float, float]] = []
        lost: set[str] = set()
        while not closed.done():
            begun_s = time.monotonic()
            lost.update(await client.heartbeat(lease_ids))
            spent_s = time.monotonic() - begun_s
            beats.append((begun_s, spent_s))
            await asyncio.wait({closed}, timeout=max(0.0, pace_s - spent_s))
    _say(json.dumps({"beats": beats, "lost": len(lost)}))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(beat(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
