"""A busy service is never a reward: POST /run_code waits for a slot, and answers 504 when it gets none in time.

verl sends a request again after a 504, and counts any other refusal as a wrong program.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import pytest
import sandbox_fusion
from prometheus_client import CollectorRegistry
from sandbox_fusion.models import RunCodeRequest as FusionRequest

from nouscoder.config import VerifierSection
from nouscoder.formats.json_values import BYTES_PER_WEIGHT, json_weight
from nouscoder.http_server.api_keys import ApiKeys, new_api_key
from nouscoder.http_server.listener import start_http
from nouscoder.http_server.memory_budget import MemoryBudget
from nouscoder.verifier.access.quotas import Quotas
from nouscoder.verifier.api import run_code
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.api.run_code import CodeRunner, RunCodeRequest
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.audit import AuditLog
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.base import CompileStarved, Program
from nouscoder.verifier.sandbox.fake import FakeSandbox, FakeSession

NUM_PROGRAMS = 40


class GateSandbox(FakeSandbox):
    """Two slots. Every program waits for the event, then prints its input."""

    def __init__(self) -> None:
        super().__init__(num_slots=2)
        self.let_go = asyncio.Event()
        self.num_starved = 0  # compilers that other work will keep from the CPU

    @asynccontextmanager
    async def session(self, program: Program) -> AsyncIterator[FakeSession]:
        """One program. Raises CompileStarved."""
        if self.num_starved:
            self.num_starved -= 1
            raise CompileStarved("other work kept the compiler from the CPU")
        async with super().session(program) as session:
            await self.let_go.wait()
            yield session


class Refusals:
    """In place of the audit log: the names of the refusals."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def write(self, code: str, *, refused: str, **fields: object) -> None:
        """Called once for each run."""
        self.names += [refused] if refused else []


@dataclass
class Running:
    sandbox: GateSandbox
    grader: Grader
    drain_state: DrainState
    budget: MemoryBudget
    url: str
    http: httpx.AsyncClient
    refusals: list[str] = field(default_factory=list)


@asynccontextmanager
async def running(api_keys: ApiKeys | None = None, budget_bytes: int = 1_000_000) -> AsyncIterator[Running]:
    """REST with a grader of two slots and a queue of two."""
    sandbox, registry, drain_state = GateSandbox(), CollectorRegistry(), DrainState()
    budget = MemoryBudget(budget_bytes)
    await sandbox.start()
    grader = Grader(sandbox, VerifierMetrics(registry), VerifierSection(max_queue=2))
    refusals = Refusals()
    runner = CodeRunner(grader, Quotas(), cast(AuditLog, refusals))
    app = make_app(grader, registry, drain_state, 100_000, api_keys, runner, budget=budget)
    async with AsyncExitStack() as stack:
        url = "http://" + await start_http(app, "127.0.0.1:0", stack)
        limits = httpx.Limits(max_connections=2 * NUM_PROGRAMS)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=120, limits=limits))
        yield Running(sandbox, grader, drain_state, budget, url, http, refusals.names)
        sandbox.let_go.set()


def body(number: int = 0, **fields: Any) -> dict[str, Any]:
    return {"code": "print(input())", "language": "python", "stdin": str(number), "compile_timeout": 600, **fields}


async def settled(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits 0.1 s besides its compile_timeout."""
    monkeypatch.setattr(run_code, "_SPARE_S", 0.1)


async def test_40_right_programs_at_once_score_40_with_a_queue_of_two() -> None:
    async with running() as service:
        bodies = [httpx.Request("POST", "http://x/", json=body(number)).content for number in range(NUM_PROGRAMS)]
        all_bytes = sum(len(one) + BYTES_PER_WEIGHT * json_weight(one) for one in bodies)
        sent = [asyncio.ensure_future(service.http.post("/run_code", json=body(n))) for n in range(NUM_PROGRAMS)]
        await settled(lambda: service.grader.unfinished == 4 and service.budget.held_bytes == all_bytes)
        service.sandbox.let_go.set()
        answers = await asyncio.gather(*sent)
        right = [
            answer.status_code == 200 and answer.json()["run_result"]["stdout"] == str(number)
            for number, answer in enumerate(answers)
        ]
        print(f"{sum(right)} of {NUM_PROGRAMS} right programs got their result")
        assert sum(right) == NUM_PROGRAMS
        assert service.grader.unfinished == 0
        assert service.budget.held_bytes == 0


@pytest.mark.usefixtures("no_patience")
async def test_a_run_without_a_slot_is_504_and_leaves_nothing_behind() -> None:
    async with running() as service:
        waiting = [asyncio.ensure_future(service.http.post("/run_code", json=body())) for _ in range(2)]
        await settled(lambda: service.grader.unfinished == 2)
        in_queue = await service.http.post("/run_code", json=body(compile_timeout=0.1))
        assert (in_queue.status_code, in_queue.json()["field"]) == (504, None)
        assert int(in_queue.headers["retry-after"]) >= 1
        assert service.grader.unfinished == 2
        graded = {"code": "1", "tests": {"type": "stdin", "cases": [{"input": "a", "output": "a"}]}}
        queued = [asyncio.ensure_future(service.http.post("/v1/grade", json=graded)) for _ in range(2)]
        await settled(lambda: service.grader.unfinished == 4)
        assert (await service.http.post("/run_code", json=body(compile_timeout=0.1))).status_code == 504
        service.sandbox.let_go.set()
        assert {(await one).status_code for one in waiting} == {200}
        assert [(await one).json()["verdict"] for one in queued] == ["accepted"] * 2
        assert (await service.http.post("/run_code", json=body(7))).json()["run_result"]["stdout"] == "7"


@pytest.mark.usefixtures("no_patience")
async def test_a_full_quota_a_full_memory_and_a_drain_are_504_too() -> None:
    secret, line = new_api_key("ann")
    async with running(ApiKeys(environment=f"{line}:1"), budget_bytes=20_000) as service:
        service.http.headers["Authorization"] = f"Bearer {secret}"
        first = asyncio.ensure_future(service.http.post("/run_code", json=body()))
        await settled(lambda: service.grader.unfinished == 1)
        assert (await service.http.post("/run_code", json=body(compile_timeout=0.1))).status_code == 504
        assert (await service.http.post("/run_code", json=body(code="#" * 20_000))).status_code == 504
        service.sandbox.let_go.set()
        assert (await first).status_code == 200
        service.drain_state.start()
        drained = await service.http.post("/run_code", json=body())
        assert (drained.status_code, drained.json()["detail"]) == (504, "the service is draining")


@pytest.mark.usefixtures("no_patience")
async def test_sandbox_fusions_own_client_repeats_the_refused_run() -> None:
    async with running() as service:
        waiting = [asyncio.ensure_future(service.http.post("/run_code", json=body())) for _ in range(2)]
        await settled(lambda: service.grader.unfinished == 2)
        request = FusionRequest(code="print(input())", language="python", stdin="9", compile_timeout=0.1)
        fused = asyncio.ensure_future(asyncio.to_thread(sandbox_fusion.run_code, request, service.url))
        await settled(lambda: "QueueFull" in service.refusals)
        service.sandbox.let_go.set()
        answer = await fused
        assert answer.run_result is not None
        assert answer.run_result.stdout == "9"
        await asyncio.gather(*waiting)


async def test_a_compiler_without_cpu_is_504_and_sandbox_fusions_own_client_repeats_the_run() -> None:
    async with running() as service:
        service.sandbox.let_go.set()
        service.sandbox.num_starved = 2
        starved = await service.http.post("/run_code", json=body())
        assert (starved.status_code, starved.json()["detail"]) == (504, "other work kept the compiler from the CPU")
        request = FusionRequest(code="print(input())", language="python", stdin="9")
        answer = await asyncio.to_thread(sandbox_fusion.run_code, request, service.url)
        assert answer.run_result is not None
        assert (answer.run_result.stdout, service.sandbox.num_starved) == ("9", 0)
        assert (service.grader.unfinished, service.refusals) == (0, ["CompileStarved"] * 2)


def test_the_wait_ends_before_verl_gives_up() -> None:
    """verl waits compile_timeout + run_timeout + 10 s, a program of C++ may use both timeouts."""
    for compile_timeout, run_timeout in ((10.0, 10.0), (1.0, 60.0), (60.0, 1.0)):
        for language, compile_s in (("python", 0.0), ("cpp", compile_timeout)):
            request = RunCodeRequest(
                code="1", language=language, compile_timeout=compile_timeout, run_timeout=run_timeout
            )
            longest_s = request.slot_patience_s + compile_s + run_timeout
            assert longest_s <= compile_timeout + run_timeout + 10.0 - 5.0
    assert RunCodeRequest(code="1", language="python", compile_timeout=1e9).slot_patience_s <= 120.0
