"""`nouscoder bench verifier --simulate-slots`: how many submissions per second one gateway process can serve.

Everything but the sandboxes is real: HTTP, parsing, the queue, sessions, frames and pipes, and control groups. The
slots sleep in place of programs (sleeping_slot.py), as if each had a core of its own. So the rate grows with the slots
until the gateway's one core is the limit. Client and slots need CPU time too; on two cores they have the other one.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nouscoder.bench.errors import BenchError
from nouscoder.bench.http_load import LeanClient
from nouscoder.bench.processes import stolen_s, usage_of
from nouscoder.bench.verifier import running_service
from nouscoder.client.calls import GRADE_PATH

SLEEP_S = 0.004  # about what a one-test submission costs in a slot
_ROUNDS = 3  # of warming up
_NUM_TESTS = (1, 20)
_MAX_SLOTS = 256
_TICK_S = 0.01  # the unit of CPU times in /proc


@dataclass(frozen=True, slots=True)
class Simulated:
    """The load of one number of slots. `slots_per_second` is the most that sleeping slots allow."""

    slots: int
    tests_a_submission: int
    submissions_per_second: float
    slots_per_second: float
    gateway_cpu_ms: float  # a submission
    capacity_per_second: float  # of one gateway process that has a core of its own: 1 s over its CPU time


@dataclass(frozen=True, slots=True)
class GatewayBench:
    """The figures of one run."""

    num_cores: int
    sleep_s: float
    stolen_cpu_share: float
    loads: list[Simulated]


def slot_numbers(text: str) -> list[int]:
    """The numbers of slots in "1,2,4". Raises BenchError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 0 < int(word) <= _MAX_SLOTS for word in words):
        raise BenchError(f"--simulate-slots takes numbers from 1 to {_MAX_SLOTS}, such as 1,2,4, not {text!r:.60}")
    return [int(word) for word in words]


async def bench_gateway(
    numbers: Sequence[int], overrides: tuple[str, ...] = (), seconds: float = 4.0, sleep_s: float = SLEEP_S
) -> GatewayBench:
    """Start a service for each number of slots and load it for `seconds` with each size of submission."""
    begun_s, stolen_before_s = time.perf_counter(), stolen_s()
    loads = []
    with tempfile.TemporaryDirectory() as folder:
        python = _sleeping_python(Path(folder), sleep_s)
        for number in numbers:
            settings = (f"verifier.sandbox.python={python}", f"verifier.sandbox.slots={number}", *overrides)
            async with running_service(settings) as (pid, url), LeanClient(url) as client:
                for num_tests in _NUM_TESTS:
                    loads.append(await _load(pid, client, number, num_tests, seconds, sleep_s))
    num_cpu_s = (time.perf_counter() - begun_s) * (os.cpu_count() or 1)
    return GatewayBench(os.cpu_count() or 1, sleep_s, (stolen_s() - stolen_before_s) / num_cpu_s, loads)


def _sleeping_python(folder: Path, sleep_s: float) -> Path:
    """A command in place of the interpreter of candidates. It drops the arguments of the real harness."""
    command = shlex.join([sys.executable, "-m", "nouscoder.bench.sleeping_slot", str(sleep_s)])
    python = folder / "sleeping-python"
    python.write_text(f"#!/bin/sh\nexec {command}\n")
    python.chmod(0o755)
    return python


async def _load(
    pid: int, client: LeanClient, num_slots: int, num_tests: int, seconds: float, sleep_s: float
) -> Simulated:
    for _ in range(_ROUNDS):
        await asyncio.gather(*(_send(client, number, num_tests) for number in range(num_slots)))
    num_done = 0
    before, begun_s = usage_of(pid), time.perf_counter()

    async def sender() -> None:
        nonlocal num_done
        while time.perf_counter() < begun_s + seconds:
            num_done += 1
            await _send(client, num_done, num_tests)

    await asyncio.gather(*(sender() for _ in range(2 * num_slots + 4)))
    spent_s, after = time.perf_counter() - begun_s, usage_of(pid)
    cpu_s = max(after.own_cpu_s - before.own_cpu_s, _TICK_S) / num_done
    most = num_slots / (num_tests * sleep_s)
    return Simulated(num_slots, num_tests, num_done / spent_s, most, 1e3 * cpu_s, 1 / cpu_s)


async def _send(client: LeanClient, number: int, num_tests: int) -> None:
    """Raises BenchError for any other answer than that the program passes."""
    cases = [{"input": f"{i} {number}\n", "output": f"{i} {number}\n"} for i in range(num_tests)]
    request = {"code": f"# {number}\nprint(input())\n", "tests": {"type": "stdin", "cases": cases}}
    status, _, answer = await client.post(GRADE_PATH, json.dumps(request).encode())
    if status != 200 or json.loads(answer)["passed"] != num_tests:
        raise BenchError(f"HTTP {status}: {answer.decode('utf8', 'replace')[:200]}")


def as_text(result: GatewayBench) -> str:
    """The figures as readable lines."""
    head = (
        f"slots that sleep {1e3 * result.sleep_s:g} ms a test, client and slots on the same {result.num_cores} cores;"
        f" {result.stolen_cpu_share:.1%} of the CPU stolen"
    )
    lines = [head, "slots  tests  submissions/s  (slots alone)  gateway CPU  capacity of one process"]
    for one in result.loads:
        lines.append(
            f"{one.slots:5}  {one.tests_a_submission:5}  {one.submissions_per_second:13.0f}"
            f"  {one.slots_per_second:13.0f}  {one.gateway_cpu_ms:8.2f} ms  {one.capacity_per_second:14.0f}/s"
        )
    return "\n".join(lines)


def as_record(result: GatewayBench) -> dict[str, Any]:
    """The figures as a record for scripts."""
    return asdict(result)
