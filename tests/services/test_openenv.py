"""OpenEnv's protocol by hand: frames of /openenv/ws, the Task API, who may open sessions, and what they may cost.

tests/e2e/test_trainer_packages.py has the real package.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from nouscoder.config import VerifierSection
from nouscoder.domain.conversation import feedback_on
from nouscoder.http_server import listener, websocket
from nouscoder.http_server.api_keys import ApiKeys, new_api_key
from nouscoder.http_server.memory_budget import MemoryBudget
from nouscoder.store.tests_cache import TestsCache
from nouscoder.verifier.access.quotas import QuotaGrader, Quotas
from nouscoder.verifier.api.compat import openenv
from nouscoder.verifier.api.compat.openenv import add_openenv
from nouscoder.verifier.api.compat.problem_set import NO_PROBLEMS, ProblemSet, SampleAnswer, open_problem_set
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.base import Program, RunResult, SandboxError
from nouscoder.verifier.sandbox.fake import FakeSandbox, FakeSession, ended

SECRET = "only-the-hidden-tests-know-this"
ECHO, WRONG, OVERFITTED = "print('echo')", "print('no')", "print('shown')"
PATIENT: dict[str, Any] = {"proxy": None, "open_timeout": 60, "ping_interval": None}
RESET, FAILED = {"type": "reset", "data": {"index": 0}}, [{"input": "shown", "output": "shown"}]
PROBLEMS = [
    {
        "problem_id": "echo",
        "prompt": "Print the input.",
        "tests": {"type": "stdin", "cases": [{"input": SECRET, "output": SECRET}]},
        "public_tests": {"type": "stdin", "cases": FAILED},
    },
    {
        "problem_id": "blind",
        "prompt": "Print the input again.",
        "tests": {"type": "stdin", "cases": [{"input": SECRET, "output": SECRET}]},
    },
]


class Machine(FakeSandbox):
    """Runs programs once `works` is set, and loses each while `is_lost`."""

    def __init__(self) -> None:
        answers: dict[str, Callable[[bytes], RunResult]] = {
            WRONG: lambda _: ended(b"no"),
            OVERFITTED: lambda _: ended(b"shown"),
        }
        super().__init__(answers)
        self.works = asyncio.Event()
        self.works.set()
        self.is_lost = False
        self.num_open = 0

    @asynccontextmanager
    async def session(self, program: Program) -> AsyncIterator[FakeSession]:
        if self.is_lost:
            raise SandboxError("the machine is gone")
        async with super().session(program) as session:
            self.num_open += 1
            try:
                await self.works.wait()
                yield session
            finally:
                self.num_open -= 1


@dataclass
class Running:
    machine: Machine
    drain_state: DrainState
    budget: MemoryBudget
    problems: ProblemSet
    address: str

    def connect(self, **options: Any) -> connect:
        """A session of a client."""
        return connect(f"ws://{self.address}/openenv/ws", **PATIENT, **options)

    def http(self) -> httpx.AsyncClient:
        """A client of the Task API."""
        return httpx.AsyncClient(base_url=f"http://{self.address}/openenv")


@asynccontextmanager
async def running(
    folder: Path, api_keys: ApiKeys | None = None, most: int = 8, max_queue: int = 8, file: str = "problems.jsonl"
) -> AsyncIterator[Running]:
    """The environment over two slots. With `file` "" it has no problems."""
    (folder / "problems.jsonl").write_text("".join(json.dumps(one) + "\n" for one in PROBLEMS))
    machine, registry, drain_state, budget = Machine(), CollectorRegistry(), DrainState(), MemoryBudget(1_000_000)
    await machine.start()
    async with AsyncExitStack() as stack:
        core = Grader(machine, VerifierMetrics(registry), VerifierSection(max_queue=max_queue, cache_entries=0))
        grader, cache = QuotaGrader(core, Quotas()), TestsCache(folder / "cache", 2**20)
        stack.callback(cache.close)
        problems = await stack.enter_async_context(open_problem_set(str(folder / file) if file else "", grader, cache))
        app = make_app(grader, registry, drain_state, 100_000, api_keys, budget=budget)
        add_openenv(app, problems, budget, drain_state.enter, 100_000, most)
        address = await listener.start_http(app, "127.0.0.1:0", stack, websocket=websocket.bounded())
        yield Running(machine, drain_state, budget, problems, address)


async def ask(session: ClientConnection, message: object) -> dict[str, Any]:
    """The answer to one frame."""
    await session.send(message if isinstance(message, str) else json.dumps(message))
    answer: dict[str, Any] = json.loads(await session.recv())
    return answer


def step(answer: str, **more: object) -> dict[str, Any]:
    return {"type": "step", "data": {"answer": answer, **more}}


def block(code: str) -> str:
    return f"So:\n```python\n{code}\n```"


async def test_an_episode_gives_feedback_until_the_hidden_tests_decide(tmp_path: Path) -> None:
    """The feedback is the text of domain/conversation.py, which the environment `feedback` of a run gives too."""
    async with running(tmp_path) as service, service.connect() as session:
        first = await ask(session, {"type": "reset", "data": {"problem_id": "echo", "episode_id": "mine"}})
        begun = {"problem_id": "echo", "prompt": "Print the input.", "feedback": "", "verdict": None, "turns_left": 3}
        assert first == {"type": "observation", "data": {"observation": begun, "reward": None, "done": False}}

        failed = (await ask(session, step(block(WRONG))))["data"]
        verdict = await service.problems.public_verdict(service.problems.at(0), SampleAnswer(WRONG))
        assert verdict is not None
        assert failed["observation"]["feedback"] == feedback_on(verdict, 600)
        assert "Expected output:\nshown\nOutput:\nno\nWrite the corrected program." in feedback_on(verdict, 600)
        assert (failed["reward"], failed["done"], failed["observation"]["turns_left"]) == (0.0, False, 2)
        state = {"episode_id": "mine", "step_count": 1, "problem_id": "echo", "turns_left": 2, "done": False}
        assert await ask(session, {"type": "state"}) == {"type": "state", "data": state}

        right = (await ask(session, step(ECHO)))["data"]  # a program without a block
        assert (right["reward"], right["done"], right["observation"]["verdict"]) == (1.0, True, "accepted")
        assert "send reset first" in (await ask(session, step(ECHO)))["data"]["message"]


async def test_an_episode_ends_as_in_the_environment_feedback(tmp_path: Path) -> None:
    """At the last turn, and at once where no public test can fail. Nothing of a hidden test is told."""
    cases: list[tuple[dict[str, Any], list[str], list[float]]] = [
        ({"index": 0, "turns": 2}, [WRONG, WRONG], [0.0, 0.0]),
        ({"index": 0, "turns": 1}, [ECHO], [1.0]),
        ({"index": 1}, [WRONG], [0.0]),  # no public tests: the first program is final
        ({"index": 0}, [OVERFITTED], [0.0]),  # right for the public tests alone
        ({"index": 0}, ["no program", f"{ECHO} # ```"], [0.0, 0.0]),  # text that does not compile; half a block
    ]
    async with running(tmp_path) as service, service.connect() as session:
        for reset, answers, rewards in cases:
            assert (await ask(session, {"type": "reset", "data": reset}))["type"] == "observation"
            said = [await ask(session, step(answer)) for answer in answers]
            assert [one["data"]["reward"] for one in said] == rewards, reset
            assert SECRET not in json.dumps(said)


async def test_a_failure_of_the_service_is_an_error_frame_and_the_step_can_be_sent_again(tmp_path: Path) -> None:
    """The module's INVARIANT: sandbox lost, draining, memory; each leaves the episode as it was."""
    async with running(tmp_path) as service, service.connect() as session:
        await ask(session, RESET)
        before = await ask(session, {"type": "state"})
        lost, drained = [], []
        for answer in (block(ECHO), block(WRONG)):
            service.machine.is_lost = True
            lost.append(await ask(session, step(answer)))
            service.machine.is_lost, service.drain_state.draining = False, True
            drained.append(await ask(session, step(answer)))
            service.drain_state.draining = False
        service.budget.take(service.budget.budget_bytes)
        full = await ask(session, step(block(ECHO)))
        service.budget.give(service.budget.budget_bytes)
        for frame in (*lost, *drained, full):
            assert (frame["type"], frame["data"]["code"]) == ("error", "EXECUTION_ERROR")
        assert "the machine is gone" in lost[0]["data"]["message"]
        assert drained[0]["data"]["message"] == "the service is draining"
        assert await ask(session, {"type": "state"}) == before
        assert (await ask(session, step(block(ECHO))))["data"]["reward"] == 1.0


async def test_a_full_queue_and_a_used_up_quota_are_error_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openenv, "_QUEUE_PATIENCE_S", 0.0)
    secret, line = new_api_key("ann")
    keys = ApiKeys(environment=f"{line}:1")
    head = {"Authorization": f"Bearer {secret}"}
    async with running(tmp_path, keys) as service, AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(service.connect(additional_headers=head)) for _ in range(2)]
        for session in (first, second):
            await ask(session, RESET)
        service.machine.works.clear()
        await first.send(json.dumps(step(block(ECHO))))
        while not service.machine.num_open:
            await asyncio.sleep(0)
        refused = (await ask(second, step(block(ECHO))))["data"]
        assert (refused["code"], "1 submissions in flight" in refused["message"]) == ("EXECUTION_ERROR", True)
        service.machine.works.set()
        assert json.loads(await first.recv())["data"]["reward"] == 1.0
        assert (await ask(second, step(block(ECHO))))["data"]["reward"] == 1.0


async def test_a_wrong_message_is_answered_and_the_session_goes_on(tmp_path: Path) -> None:
    cases: list[tuple[object, str, str]] = [
        ("{", "INVALID_JSON", "not JSON"),
        ("[]", "VALIDATION_ERROR", "not a JSON object"),
        ({"type": "jump"}, "UNKNOWN_TYPE", "'jump'"),
        ({"type": "step", "data": {"answer": 1, "x": 2}}, "VALIDATION_ERROR", "x: unknown field"),
        ({"type": "reset", "data": {"problem": "echo"}}, "VALIDATION_ERROR", "problem: unknown field"),
        ({"type": "reset", "data": {"index": 2}}, "VALIDATION_ERROR", "there is no problem 2: the last is 1"),
        ({"type": "reset", "data": {"problem_id": "other"}}, "VALIDATION_ERROR", "there is no problem 'other'"),
        ({"type": "reset", "data": {"split": "test"}}, "VALIDATION_ERROR", "split"),
        ({"type": "step", "data": {"answer": "x"}}, "EXECUTION_ERROR", "send reset first"),
        ("[" * 2 + "{}," * 200_000 + "0]]", "VALIDATION_ERROR", "too many values"),
    ]
    async with running(tmp_path) as service, service.connect() as session:
        for message, code, says in cases:
            answer = await ask(session, message)
            assert (answer["type"], answer["data"]["code"]) == ("error", code), says
            assert says in answer["data"]["message"]
        assert (await ask(session, RESET))["type"] == "observation"
        rpc = await ask(session, {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 7, "method": "tools/list"}})
        assert rpc == {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 7, "result": {"tools": []}}}


async def test_many_sessions_play_at_once_and_a_seed_chooses_the_problem(tmp_path: Path) -> None:
    async with running(tmp_path) as service, AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(service.connect()) for _ in range(8)]
        begun = await asyncio.gather(*(ask(one, {"type": "reset", "data": {"seed": 3}}) for one in sessions))
        assert len({one["data"]["observation"]["problem_id"] for one in begun}) == 1
        played = await asyncio.gather(*(ask(one, step(block(ECHO))) for one in sessions))
        assert [one["data"]["reward"] for one in played] == [1.0] * 8
        async with service.connect() as refused:
            frame = json.loads(await refused.recv())
            counts = {"active_sessions": 8, "max_sessions": 8}
            assert frame["data"] == {"message": frame["data"]["message"], "code": "CAPACITY_REACHED", **counts}
            with pytest.raises(ConnectionClosed):
                await refused.recv()
        await sessions[0].close()
        async with service.connect() as admitted:
            assert (await ask(admitted, RESET))["type"] == "observation"


async def test_a_client_that_disconnects_frees_its_slot(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        service.machine.works.clear()
        async with service.connect() as session:
            await ask(session, RESET)
            await session.send(json.dumps(step(block(ECHO))))
            while not service.machine.num_open:
                await asyncio.sleep(0)
        async with asyncio.timeout(60):
            while service.machine.num_open or service.budget.held_bytes:
                await asyncio.sleep(0.01)


async def test_a_session_without_a_message_ends_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv, "IDLE_S", 0.01)
    async with running(tmp_path) as service, service.connect() as session:
        frame = json.loads(await session.recv())
        assert frame["data"]["code"] == "SESSION_ERROR"
        with pytest.raises(ConnectionClosed):
            await session.recv()


async def test_sessions_pass_the_checks_of_every_request(tmp_path: Path) -> None:
    """API keys in both forms, a key that is withdrawn, a share of half for one client, and foreign sites."""
    secret, line = new_api_key("ann")
    file = tmp_path / "tokens"
    file.write_text(line + "\n")
    keys = ApiKeys(file)
    head = {"Authorization": f"Bearer {secret}"}
    async with running(tmp_path, keys, most=4) as service:
        for wrong in ({}, {"Authorization": "Bearer other"}):
            with pytest.raises(InvalidStatus) as refused:
                async with service.connect(additional_headers=wrong):
                    pass
            assert refused.value.response.status_code == 401
            assert b"a valid API key is required" in refused.value.response.body
        async with connect(f"ws://any:{secret}@{service.address}/openenv/ws", **PATIENT) as basic:
            assert (await ask(basic, RESET))["type"] == "observation"
            async with service.connect(additional_headers=head), service.connect(additional_headers=head) as third:
                assert json.loads(await third.recv())["data"]["max_sessions"] == 2
            file.write_text("")
            keys.reload()
            await basic.send(json.dumps(step(block(ECHO))))
            with pytest.raises(ConnectionClosed):
                await basic.recv()
    async with running(tmp_path) as service:
        for foreign in ({"Origin": "http://elsewhere.example"}, {"Host": "elsewhere.example"}):
            with pytest.raises(InvalidStatus) as refused:
                async with service.connect(additional_headers=foreign):
                    pass
            assert refused.value.response.status_code in (400, 403)  # two Host headers are no valid request
        with pytest.raises((ConnectionClosed, InvalidStatus)) as over:  # before the handshake on a busy machine
            async with service.connect(additional_headers={"X-Deadline-S": "0.01"}) as session:
                await session.recv()
        body = over.value.response.body if isinstance(over.value, InvalidStatus) else None
        assert "the deadline of 0.01 s has passed" in (str(over.value) if body is None else body.decode())


async def test_the_descriptions_and_the_task_api(tmp_path: Path) -> None:
    async with running(tmp_path) as service, service.http() as http:
        assert (await http.get("/health")).json() == {"status": "healthy"}
        assert (await http.get("/metadata")).json()["name"] == "nouscoder"
        schema = (await http.get("/schema")).json()
        assert schema["action"]["required"] == ["answer"]  # so that clients may send a policy's text as it is
        assert (await http.get("/openapi.json")).json()["info"]["version"] == openenv.VERSION
        assert (await http.post("/mcp", json={})).json()["jsonrpc"] == "2.0"
        assert (await http.get("/list_environments")).json() == ["nouscoder"]
        assert (await http.get("/nouscoder/splits")).json() == [{"name": "train", "type": "train"}]
        specs = [{"problem_id": name, "split": "train", "index": at} for at, name in enumerate(("echo", "blind"))]
        cases: list[tuple[str, dict[str, Any], int, object]] = [
            ("nouscoder/tasks", {}, 200, {"tasks": specs, "env_name": "nouscoder"}),
            ("nouscoder/num_tasks", {}, 200, {"num_tasks": 2}),
            ("nouscoder/task", {"index": 1}, 200, {"task": {**specs[1], "prompt": "Print the input again."}}),
            ("nouscoder/task_range", {"start": 1}, 200, {"tasks": specs[1:]}),
            ("nouscoder/task", {"index": 2}, 400, None),
            ("nouscoder/task", {"index": "1"}, 422, None),
            ("nouscoder/goals", {}, 501, None),
            ("other/tasks", {}, 404, None),
        ]
        for path, asked, status, answer in cases:
            got = await http.post(f"/{path}", json={"split": "train", **asked})
            assert (got.status_code, got.json() if answer is not None else None) == (status, answer), path
            assert SECRET not in got.text


async def test_a_service_without_problems_says_which_key_is_missing(tmp_path: Path) -> None:
    async with running(tmp_path, file="") as service, service.http() as http:
        for answer in (await http.get("/health"), await http.post("/nouscoder/tasks", json={"split": "train"})):
            assert (answer.status_code, answer.json()["detail"]) == (501, NO_PROBLEMS)


def test_the_environment_in_the_documents_is_the_one_that_trl_trains_in() -> None:
    """tests/e2e/test_openenv_package.py runs it with TRL."""
    root = Path(__file__).parents[2]
    shown = (root / "docs/protocols.md").read_text().partition("class Programming")[2].partition("```")[0]
    script = (root / "tests/e2e/trainer_packages/trl_openenv.py").read_text()
    assert "get_reward" in shown
    assert shown in script
