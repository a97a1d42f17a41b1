"""`nouscoder bench verifier`: the grading service under load over its REST API, compared with bare process spawns.

Client and service share the cores of this machine, the cache is off, and full isolation is on. Rates are per core: the
wall-clock rate divided by the number of cores. Each block of load is between two measurements of the control, so that a
slower machine affects both. Requests are prepared before, and answers checked after, the measured time.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from nouscoder.bench.controls import (
    SlotClocks,
    SubmissionCost,
    bare_spawn,
    cost_of,
    floor,
    forks_per_second,
    rate,
    warm_forks_per_second,
)
from nouscoder.bench.controls import as_lines as lines_of_cost
from nouscoder.bench.http_load import LeanClient
from nouscoder.bench.measuring import BenchError, Machine, p99, started, usage_of
from nouscoder.bench.peers import Peer, PeerBench, PeerLoad, as_lines
from nouscoder.client.calls import GRADE_PATH


@dataclass(frozen=True, slots=True)
class Throughput:
    """One kind of load. `multiple` is tests per second and core over bare interpreter spawns per second on one core."""

    submissions: int
    tests_a_submission: int
    wall_s: float
    tests_per_second_per_core: float
    bare_spawns_per_second: float
    multiple: float
    gateway_cpu_share: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds to an answer at half of the capacity, for submissions of 20 tests."""

    submissions: int
    load_submissions_per_second: float
    p50_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class VerifierBench:
    """The figures of one run. `peak_memory_bytes` is the highest observed sum of proportional set sizes.

    `stolen_cpu_share` is the share of CPU that the hypervisor gave to other machines. If it is high, repeat the bench.
    """

    backend: str
    num_cores: int
    bare_spawns_per_second: float
    forks_per_second: float
    warm_forks_per_second: float  # each runs a test without isolation
    many_small_tests: Throughput
    one_test_submissions: Throughput
    latency_at_half_load: Latency
    peak_memory_bytes: int
    stolen_cpu_share: float
    peers: tuple[PeerBench, ...] = ()
    processes: int = 1  # of the figures in `with_processes`
    with_processes: Throughput | None = None  # submissions of one test
    one_test_cost: SubmissionCost | None = None  # backend local

    @property
    def one_test_of_floor(self) -> float | None:
        """The service's CPU time for a submission of one test, as a multiple of the floor."""
        return None if self.one_test_cost is None else self.one_test_cost.of_floor


def as_text(result: VerifierBench) -> str:
    """The figures as readable lines."""
    many, single, late = result.many_small_tests, result.one_test_submissions, result.latency_at_half_load
    rows = [
        f"backend {result.backend}, {result.num_cores} cores, cache off, client and service on the same cores",
        f"control: {result.bare_spawns_per_second:.0f} bare interpreter spawns/s,"
        f" {result.forks_per_second:.0f} forks/s, {result.warm_forks_per_second:.0f} tests/s in unisolated forks of a"
        f" warm interpreter; {result.stolen_cpu_share:.1%} of the CPU stolen",
        f"many small tests: {many.tests_per_second_per_core:.0f} tests/s a core = {many.multiple:.2f}x bare spawns",
        f"one-test submissions: {single.tests_per_second_per_core:.0f}/s a core = {single.multiple:.2f}x bare spawns",
        f"20 tests at half load ({late.load_submissions_per_second:.1f} submissions/s):"
        f" p50 {late.p50_s * 1e3:.0f} ms, p99 {late.p99_s * 1e3:.0f} ms",
        f"gateway: {many.gateway_cpu_share:.0%} of the service's CPU (one-test submissions:"
        f" {single.gateway_cpu_share:.0%}); peak memory {result.peak_memory_bytes >> 20} MiB",
        *(lines_of_cost(result.one_test_cost) if result.one_test_cost is not None else ()),
        *_several_lines(result),
        *(line for peer in result.peers for line in as_lines(peer)),
    ]
    return "\n".join(rows)


def _several_lines(result: VerifierBench) -> list[str]:
    if (several := result.with_processes) is None:
        return []
    return [
        f"{result.processes} gateway processes, one-test submissions: {several.tests_per_second_per_core:.0f}/s a core"
        f" = {several.multiple:.2f}x bare spawns; gateways: {several.gateway_cpu_share:.0%} of the service's CPU"
    ]


_START_LIMIT_S = 60.0
_AT_ONCE, _ROUNDS = 8, 4
_GATEWAY = "nouscoder.verifier.processes.share"  # the module of each of several gateway processes


def submission(number: int, num_tests: int) -> dict[str, Any]:
    """A unique program, so that no answer can come from a cache, with trivial tests that it passes."""
    cases = [{"input": f"{i} {number}\n", "output": f"{i + number}\n"} for i in range(num_tests)]
    code = f"# {number}\na, b = map(int, input().split())\nprint(a + b)\n"
    return {"code": code, "tests": {"type": "stdin", "cases": cases}, "limits": {"memory_bytes": 1 << 30}}


class Bench:
    """One service and its client."""

    def __init__(self, pid: int, client: LeanClient, control_s: float) -> None:
        self._pid = pid
        self._control_s = control_s
        self._client = client
        self._num_sent = 0
        self._client_s = self._candidates_s = 0.0  # CPU time
        self.peak_memory_bytes = 0
        self.backend = ""

    async def throughput(self, num_submissions: int, num_tests: int) -> Throughput:
        """Alternate between load and control."""
        spawns = [await asyncio.to_thread(rate, bare_spawn, self._control_s)]
        wall_s, own_s, children_s = 0.0, 0.0, 0.0
        for _ in range(_ROUNDS):
            before = usage_of(self._pid, _GATEWAY)
            wall_s += await self.load(num_submissions // _ROUNDS, num_tests)
            after = usage_of(self._pid, _GATEWAY)
            own_s += after.own_cpu_s - before.own_cpu_s
            children_s += after.children_cpu_s - before.children_cpu_s
            spawns.append(await asyncio.to_thread(rate, bare_spawn, self._control_s))
        spawn_rate = statistics.median(spawns)
        num_done = num_submissions // _ROUNDS * _ROUNDS
        per_core = num_done * num_tests / wall_s / (os.cpu_count() or 1)
        share = own_s / (own_s + children_s)
        return Throughput(
            num_done, num_tests, wall_s, per_core, spawn_rate, per_core / spawn_rate, gateway_cpu_share=share
        )

    async def cost(self, num_submissions: int) -> SubmissionCost:
        """Where the CPU time of a submission of one test goes, in turn with its floor. Only for backend local."""
        floors = [await asyncio.to_thread(floor, self._control_s)]
        client_s, candidates_s = self._client_s, self._candidates_s
        before = SlotClocks.of(self._pid)
        for _ in range(_ROUNDS):
            await self.load(num_submissions // _ROUNDS, 1)
            floors.append(await asyncio.to_thread(floor, self._control_s))
        return cost_of(
            before,
            SlotClocks.of(self._pid),
            submissions=num_submissions // _ROUNDS * _ROUNDS,
            candidates_s=self._candidates_s - candidates_s,
            client_s=self._client_s - client_s,
            floors=floors,
        )

    async def capacity(self, num_submissions: int) -> float:
        """Submissions of 20 tests per second while some always wait."""
        return num_submissions / await self.load(num_submissions, 20)

    async def latency(self, per_second: float, num_submissions: int) -> Latency:
        """Send submissions at random moments (a Poisson stream), independent of earlier answers."""
        moments = random.Random(0)
        tasks = []
        bodies = self._bodies(num_submissions, 20)
        begun = time.perf_counter()
        due = 0.0
        for body in bodies:
            due += moments.expovariate(per_second)
            await asyncio.sleep(max(0.0, begun + due - time.perf_counter()))
            tasks.append(asyncio.create_task(self._timed(body)))
        answers = await asyncio.gather(*tasks)
        self._check([answer for _, answer in answers], 20)
        times = sorted(spent_s for spent_s, _ in answers)
        return Latency(num_submissions, per_second, statistics.median(times), p99(times))

    async def load(self, num_submissions: int, num_tests: int) -> float:
        """Send so many submissions, some always waiting. Returns the seconds until the last answer."""
        waiting = iter(self._bodies(num_submissions, num_tests))
        answers = []
        begun, client_begun_s = time.perf_counter(), time.process_time()

        async def sender() -> None:
            for body in waiting:
                answers.append((await self._timed(body))[1])

        await asyncio.gather(*(sender() for _ in range(_AT_ONCE)))
        wall_s = time.perf_counter() - begun
        self._client_s += time.process_time() - client_begun_s
        self.peak_memory_bytes = max(self.peak_memory_bytes, usage_of(self._pid).memory_bytes)
        self._check(answers, num_tests)
        return wall_s

    def submissions(self, num_submissions: int, num_tests: int) -> list[Mapping[str, Any]]:
        """The next submissions, all different."""
        numbers = range(self._num_sent, self._num_sent + num_submissions)
        self._num_sent += num_submissions
        return [submission(number, num_tests) for number in numbers]

    def _bodies(self, num_submissions: int, num_tests: int) -> list[bytes]:
        return [json.dumps(each).encode() for each in self.submissions(num_submissions, num_tests)]

    async def _timed(self, body: bytes) -> tuple[float, bytes]:
        begun = time.perf_counter()
        status, answer = await self._client.post(GRADE_PATH, body)
        spent_s = time.perf_counter() - begun
        if status != 200:
            raise BenchError(f"HTTP {status}: {answer.decode('utf8', 'replace')[:200]}")
        return spent_s, answer

    def _check(self, answers: list[bytes], num_tests: int) -> None:
        for answer in map(json.loads, answers):
            self.backend = str(answer["backend"])
            self._candidates_s += sum(test["cpu_time_s"] for test in answer["tests"])
            if (answer["verdict"], answer["passed"]) != ("accepted", num_tests):
                got = f"{answer['verdict']} with {answer['passed']} of {num_tests} passed"
                raise BenchError(f"a right program got {got}")


async def bench_verifier(
    overrides: tuple[str, ...] = (),
    scale: float = 1.0,
    control_s: float = 2.0,
    peers: Sequence[Peer] = (),
    processes: int = 1,
) -> VerifierBench:
    """Start a service, load it and stop it. Then load each of `peers`, which must be running.

    With `processes` over 1 and backend local, a service of so many gateway processes is then loaded with submissions of
    one test: other backends have one process (verifier.processes).
    `scale` multiplies the submissions. A control takes `control_s` seconds. Raises BenchError, for a peer that does not
    answer before anything is measured.
    """
    async with AsyncExitStack() as stack:
        pid, url = await stack.enter_async_context(running_service(overrides))
        bench = Bench(pid, await stack.enter_async_context(LeanClient(url)), control_s)
        loads = []
        for peer in peers:
            client = await stack.enter_async_context(LeanClient(peer.url))
            loads.append(PeerLoad(peer, client, bench.submissions, _AT_ONCE))
            await loads[-1].warm_up()
        await bench.load(4 * (os.cpu_count() or 1), 5)  # until every slot has been used
        machine = Machine()
        forks = await asyncio.to_thread(forks_per_second, control_s)
        warm_forks = await asyncio.to_thread(warm_forks_per_second, control_s)
        many = await bench.throughput(max(8, round(100 * scale)), 50)
        single = await bench.throughput(max(8, round(800 * scale)), 1)
        cost = await bench.cost(max(8, round(800 * scale))) if bench.backend == "local" else None
        capacity = await bench.capacity(max(8, round(80 * scale)))
        latency = await bench.latency(capacity / 2, max(20, round(400 * scale)))
        compared = [await load.bench(many.submissions, single.submissions, bench.load) for load in loads]
        processes = processes if bench.backend == "local" else 1
        several = await _with_processes(overrides, scale, control_s, processes) if processes > 1 else None
        return VerifierBench(
            stolen_cpu_share=machine.stolen_share,
            backend=bench.backend,
            num_cores=machine.num_cores,
            bare_spawns_per_second=statistics.median([many.bare_spawns_per_second, single.bare_spawns_per_second]),
            forks_per_second=forks,
            warm_forks_per_second=warm_forks,
            many_small_tests=many,
            one_test_submissions=single,
            latency_at_half_load=latency,
            peak_memory_bytes=bench.peak_memory_bytes,
            peers=tuple(compared),
            processes=processes,
            with_processes=several,
            one_test_cost=cost,
        )


async def _with_processes(overrides: tuple[str, ...], scale: float, control_s: float, processes: int) -> Throughput:
    """The load of submissions of one test on several gateway processes, each with a slot at least."""
    slots = max(processes, os.cpu_count() or 1)
    settings = (f"verifier.sandbox.slots={slots}", *overrides, f"verifier.processes={processes}")
    async with running_service(settings) as (pid, url), LeanClient(url) as client:
        bench = Bench(pid, client, control_s)
        await bench.load(4 * (os.cpu_count() or 1), 5)
        return await bench.throughput(max(8, round(800 * scale)), 1)


@asynccontextmanager
async def running_service(overrides: tuple[str, ...]) -> AsyncIterator[tuple[int, str]]:
    """Start a verifier with the cache off. Yields its pid and URL. Raises BenchError when it does not start."""
    anywhere = "127.0.0.1:0"
    command = [sys.executable, "-m", "nouscoder", "serve", "verifier", "--grpc", anywhere, "--http", anywhere]
    command += [f"--set={override}" for override in ("verifier.cache_entries=0", *overrides)]
    texts = ("the verifier exited while it started", f"the verifier did not start within {_START_LIMIT_S:.0f} s")
    async with started(command, "http", _START_LIMIT_S, *texts) as (pid, address):
        yield pid, f"http://{address}"
