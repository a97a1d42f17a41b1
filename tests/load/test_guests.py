"""Rollouts keep their rate, the worker its event loop and its memory, whatever guests of the API send.

Each attack runs between two quiet windows, and an honest guest asks for two tokens meanwhile. `-s` shows the figures.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tests.load import guest_attacks, guest_worker

WINDOW_S = float(os.environ.get("NOUSCODER_WINDOW_S", "5"))
REST_S = 1.5  # after an attack, for connections that end
MOST_STOP_S = 0.25
MOST_KEPT_MIB = 64.0
# Of the tokens for a second of the worker's CPU in the quiet windows. With a free core it is 0.91 and more. On a
# machine with four times as much work as cores it was 0.83, and without a process for the API 0.01.
LEAST_SHARE = 0.6
HONEST_FROM = "127.0.0.200"
REQUEST = {"model": "mine", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@dataclass(frozen=True, slots=True)
class Window:
    """What the worker did in some seconds: tokens of rollouts, longest stop of its loop, its memory."""

    rate: float  # a second
    cpu_rate: float  # a second of the worker's CPU
    stop_s: float
    mib: float


class Worker:
    """The process of guest_worker.py."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self._process = process
        self.address = address

    async def window(self, seconds: float) -> Window:
        """Measure for so long."""
        await self._told()
        await asyncio.sleep(seconds)
        return await self._told()

    async def _told(self) -> Window:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return Window(**json.loads(await asyncio.wait_for(self._process.stdout.readline(), 60)))


@asynccontextmanager
async def worker(folder: Path, *overrides: str) -> AsyncIterator[Worker]:
    file = Path(guest_worker.__file__)
    command = [sys.executable, str(file), str(folder), *overrides]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        assert process.stdout is not None
        address = (await asyncio.wait_for(process.stdout.readline(), 120)).decode().strip()
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=120) as http:
            assert (await http.get("/readyz")).status_code == 200
        yield Worker(process, address)
    finally:
        process.kill()
        await process.wait()


async def honest(address: str) -> list[float]:
    """The seconds that each request of an honest guest waited, until it is cancelled."""
    waits: list[float] = []
    transport = httpx.AsyncHTTPTransport(local_address=HONEST_FROM)
    async with httpx.AsyncClient(base_url=f"http://{address}", transport=transport, timeout=120) as http:
        begun_s = 0.0
        try:
            while True:
                begun_s = time.monotonic()
                answer = await http.post(guest_attacks.CHAT, json=REQUEST)
                waits.append(time.monotonic() - begun_s if answer.status_code == 200 else float("inf"))
                await asyncio.sleep(0.2)
        except asyncio.CancelledError:
            return [*waits, time.monotonic() - begun_s]


@pytest.mark.heavy
@pytest.mark.timeout(900)
async def test_rollouts_keep_their_rate_whatever_guests_send(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    await asyncio.to_thread(guest_worker.make_policy, policy)
    faults = []
    async with worker(policy) as served:
        await asyncio.sleep(REST_S)
        before = first = await served.window(WINDOW_S)
        for name in guest_attacks.ATTACKS:
            command = [sys.executable, guest_attacks.__file__, served.address, name, str(WINDOW_S + 20)]
            attack = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
            asking = asyncio.create_task(honest(served.address))
            await asyncio.sleep(REST_S)
            during = await served.window(WINDOW_S)
            asking.cancel()
            waits = await asking
            if attack.returncode is None:
                attack.kill()
            await attack.wait()
            await asyncio.sleep(REST_S)
            after = await served.window(WINDOW_S)
            share = 2 * during.cpu_rate / (before.cpu_rate + after.cpu_rate)
            told = [
                f"{name}: rollouts at {2 * during.rate / (before.rate + after.rate):.2f} of their tokens a second,",
                f"{share:.2f} of those a second of CPU; the loop stopped for {during.stop_s * 1000:.0f} ms, in quiet",
                f"{after.stop_s * 1000:.0f}; memory {first.mib:.0f} -> {during.mib:.0f} -> {after.mib:.0f} MiB;",
                f"{len(waits)} honest requests waited {max(waits):.2f} s at most",
            ]
            print(*told)
            if share < LEAST_SHARE:
                faults.append(f"{name}: rollouts at {share:.2f} of their tokens")
            if during.stop_s > max(MOST_STOP_S, 3 * max(before.stop_s, after.stop_s)):
                faults.append(f"{name}: the loop stopped for {during.stop_s:.2f} s")
            if after.mib > first.mib + MOST_KEPT_MIB:
                faults.append(f"{name}: {after.mib - first.mib:.0f} MiB are kept")
            before = after
    assert not faults
