"""Tool sessions of the verifier: cells, state, bounds, shares of clients, and the end of a session's caller.

Tests the invariant of sessions.py. That of places.py: tests/domain/test_tool_places.py.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from nouscoder.config import SandboxSection, ToolSessionsSection, VerifierSection, load_config
from nouscoder.domain.conversation import CallEnd
from nouscoder.domain.submission import Limits, StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import VerdictKind
from nouscoder.http_server.api_keys import ApiKeys, Quota, new_api_key
from nouscoder.http_server.memory_budget import MemoryBudget
from nouscoder.rpc.channel import PeerBehind, PeerRefused, PeerUnreachable, open_channel
from nouscoder.rpc.status_codes import StatusCodes
from nouscoder.rpc.verifier_client import InterpreterCalls, VerifierClient
from nouscoder.v1 import verifier_pb2_grpc
from nouscoder.v1.verifier_pb2 import InterpretRequest
from nouscoder.verifier.access.caller import Caller, set_caller
from nouscoder.verifier.access.grpc_gate import GrpcGate
from nouscoder.verifier.access.quotas import QuotaExceeded, Quotas
from nouscoder.verifier.api import servicer
from nouscoder.verifier.api.servicer import FULL_NAME, STATUS_CODES, Servicer
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.grading.time_limits import ExclusiveRunLock
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.observe.audit import AuditLog
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import Exit, Sandbox, SandboxUnavailable, open_backends, open_sandbox
from nouscoder.verifier.sandbox.fake import FakeSandbox, ended
from nouscoder.verifier.tools import sessions as interpreter_module
from nouscoder.verifier.tools.places import Sharing
from nouscoder.verifier.tools.sessions import (
    MAX_CODE_BYTES,
    InterpreterLimits,
    SandboxInterpreter,
    ToolSessions,
    clipped,
    limits_of,
)

module_loop = pytest.mark.asyncio(loop_scope="module")
WIDE = InterpreterLimits(call_s=120.0, life_s=600.0, memory_bytes=512 << 20)
CASE = StdinCase("1 2", "3")
ADD = Submission(StdinTests((CASE,)), "print(sum(map(int, input().split())))", limits=Limits(60.0, 60.0))
HOLDER = """
import asyncio, sys
from nouscoder.rpc.verifier_client import VerifierClient

async def main():
    async with VerifierClient(sys.argv[1]) as client, client.interpreter() as calls:
        print((await calls.run("1 + 1")).output, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    """Two slots: one for grading, one for a tool session."""
    made = open_sandbox(SandboxSection(slots=1), tool_slots=1)
    try:
        await made.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def interpreter(sandbox: Sandbox) -> AsyncIterator[SandboxInterpreter]:
    made = SandboxInterpreter(sandbox, WIDE)
    yield made
    await made.close()


async def settled(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.002)


# Cells


@module_loop
async def test_state_lasts_from_call_to_call(interpreter: SandboxInterpreter) -> None:
    for code, output in (
        ("import math\nx = [1]\ndef twice(n): return 2 * n", ""),
        ("x.append(twice(3)); x", "[1, 6]\n"),
        ("open('/tmp/kept', 'w').write('4')", "1\n"),
        ("print(open('/tmp/kept').read()); math.pi > 3", "4\nTrue\n"),
        ("import dataclasses, pickle\n@dataclasses.dataclass\nclass P:\n    n: int\n", ""),
        ("pickle.loads(pickle.dumps(P(3)))", "P(n=3)\n"),
    ):
        answer = await interpreter.run(code)
        assert (answer.end, answer.output) == (CallEnd.DONE, output), code


@module_loop
async def test_an_exception_ends_the_cell_and_its_traceback_shows_only_the_cells(
    interpreter: SandboxInterpreter,
) -> None:
    await interpreter.run("def fails():\n    return 1 / 0\nkept = 5")
    answer = await interpreter.run("print('before')\nfails()\nprint('after')")
    assert answer.end is CallEnd.DONE
    assert answer.output.splitlines() == [
        *("before", "Traceback (most recent call last):", '  File "<cell 2>", line 2, in <module>', "    fails()"),
        *('  File "<cell 1>", line 2, in fails', "    return 1 / 0", "           ~~^~~"),
        "ZeroDivisionError: division by zero",
    ]
    assert "was never closed" in (await interpreter.run("print(1 +")).output
    assert (await interpreter.run("import sys; sys.exit('x')")).end is CallEnd.DONE
    assert (await interpreter.run("kept")).output == "5\n"


@module_loop
async def test_input_is_empty_and_errors_are_in_the_order_of_printing(interpreter: SandboxInterpreter) -> None:
    code = "import sys, os\nprint('a', flush=True); print('b', file=sys.stderr); os.system('echo c'); sys.stdin.read()"
    assert (await interpreter.run(code)).output == "a\nb\nc\n''\n"


@module_loop
async def test_an_ended_interpreter_says_so_and_the_next_call_begins_with_a_fresh_one(
    interpreter: SandboxInterpreter,
) -> None:
    await interpreter.run("kept = 1")
    answer = await interpreter.run("import os; print('x', flush=True); os._exit(7)")
    assert (answer.end, answer.output) == (CallEnd.EXITED, "x\n")
    assert "NameError" in (await interpreter.run("kept")).output


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("print('x', flush=True)\nwhile True: pass", CallEnd.TIME_LIMIT),
        ("import sys\nwhile True: sys.stdout.write('x' * 65536)", CallEnd.OUTPUT_LIMIT),
        ("bytearray(1 << 40)", CallEnd.DONE),
    ],
)
@module_loop
async def test_a_call_over_a_limit_ends_and_the_slot_serves_others(sandbox: Sandbox, code: str, end: CallEnd) -> None:
    call_s = 1.0 if end is CallEnd.TIME_LIMIT else 120.0
    limited = SandboxInterpreter(sandbox, replace(WIDE, call_s=call_s))
    answer = await limited.run(code)
    await limited.close()
    assert answer.end is end
    assert end is not CallEnd.DONE or "MemoryError" in answer.output, "the cell gets the exception and may go on"
    other = SandboxInterpreter(sandbox, WIDE)
    assert (await other.run("6 * 7")).output == "42\n"
    await other.close()


@module_loop
async def test_a_cell_that_writes_the_mark_ends_only_its_own_call(interpreter: SandboxInterpreter) -> None:
    forged = (
        "import gc, os, sys\n"
        "frame = sys._getframe()\n"
        "while 'mark' not in frame.f_locals: frame = frame.f_back\n"
        "os.write(1, b'early' + frame.f_locals['mark'] + b'late')\n"
        "print('more')"
    )
    answer = await interpreter.run(forged)
    assert (answer.end, answer.output) == (CallEnd.DONE, "early")
    again = await interpreter.run("1 + 1")
    assert again.end is CallEnd.DONE
    assert again.output.endswith("2\n") or not again.output, "what was left of the first call may come before"


def test_a_long_output_keeps_its_beginning_and_end() -> None:
    text = clipped(b"a" * 40_000 + b"z" * 40_000)
    assert text.startswith("aaa")
    assert text.endswith("zzz")
    assert "[14464 bytes left out]" in text
    assert clipped(b"\xff") == "\ufffd"


# Sessions


@dataclass
class Rig:
    """Tool sessions over a sandbox, of which one call runs at once."""

    tools: ToolSessions
    grader: Grader
    registry: CollectorRegistry


def rig(sandbox: Sandbox, audit: AuditLog | None = None, sharing: Sharing | None = None, **section: float) -> Rig:
    registry = CollectorRegistry()
    metrics = VerifierMetrics(registry)
    bounds = ToolSessionsSection(**{"sessions": 1, "call_s": 120.0, **section})
    run_lock = ExclusiveRunLock()
    grader = Grader(sandbox, metrics, VerifierSection(tools=bounds), run_lock)
    tools = ToolSessions(sandbox, 1, run_lock, Quotas(), metrics, bounds, audit, sharing)
    return Rig(tools, grader, registry)


def num_sessions(made: Rig, state: str) -> float | None:
    """What the metric says."""
    return made.registry.get_sample_value("nouscoder_verifier_tool_sessions", {"state": state})


def answering(source: bytes) -> bytes:
    """What a fake interpreter prints: the code in capital letters."""
    head, _, code = source.partition(b"\n")
    return code.upper() + head.split(b" ")[0]


@pytest.fixture
async def fake() -> FakeSandbox:
    """Runs nothing. `hang` prints nothing, `die` ends the interpreter."""

    def behave(source: bytes) -> object:
        if source.endswith(b"hang"):
            return ended(b"so far")
        return ended(exit=Exit.SIGNALLED, signal=9) if source.endswith(b"die") else ended(answering(source))

    made = FakeSandbox({interpreter_module._cells(): behave}, num_slots=4)  # type: ignore[dict-item]
    await made.start()
    return made


async def test_the_number_and_size_of_calls_are_bounded(fake: FakeSandbox) -> None:
    made = rig(fake, calls=2)
    async with made.tools.open() as session:
        with pytest.raises(InvalidSubmission, match="longer than"):
            await session.run("x" * (MAX_CODE_BYTES + 1))
        for _ in range(2):
            assert (await session.run("x")).output == "X"
        with pytest.raises(InvalidSubmission, match="a session has 2 calls"):
            await session.run("x")


async def test_a_fake_call_that_never_ends_costs_its_limit_and_one_that_dies_its_state(fake: FakeSandbox) -> None:
    async with rig(fake, call_s=0.01).tools.open() as session:
        answer = await session.run("hang")
        assert (answer.end, answer.output) == (CallEnd.TIME_LIMIT, "so far")
    async with rig(fake).tools.open() as session:
        assert (await session.run("die")).end is CallEnd.EXITED
        assert (await session.run("on")).output == "ON"
    assert fake.num_sessions == 3


async def test_sessions_beyond_the_number_wait_and_are_served_in_turn(fake: FakeSandbox) -> None:
    made = rig(fake)
    order: list[str] = []

    async def one(client: str) -> None:
        set_caller(Caller(client))
        async with made.tools.open() as session:
            await session.run("x")
            order.append(client)

    async with made.tools.open():
        waiting = [asyncio.create_task(one(client)) for client in ("a", "a", "b")]
        await settled(lambda: num_sessions(made, "waiting") == 3)
    await asyncio.gather(*waiting)
    assert order == ["a", "b", "a"]


async def test_a_call_that_does_not_end_holds_no_grading_slot(fake: FakeSandbox) -> None:
    """One grading slot. Before, the submission waited until the call had ended."""
    made = rig(fake, sessions=3)
    assert made.grader.num_slots == 1
    async with made.tools.open() as session:
        call = asyncio.create_task(session.run("hang"))
        await settled(lambda: fake.num_sessions == 1)
        verdict = await made.grader.grade(Submission(StdinTests((StdinCase("1", "1"),)), "print(1)"))
        assert verdict.kind is VerdictKind.ACCEPTED  # the fake echoes
        assert not call.done()
        call.cancel()


async def test_calls_of_clients_take_turns_beside_grading(fake: FakeSandbox) -> None:
    made = rig(fake, sessions=3)
    order: list[str] = []

    async def called(client: str, begun: asyncio.Event) -> None:
        set_caller(Caller(client))
        async with made.tools.open() as session:
            begun.set()
            await session.run("x")
            order.append(client)

    async with made.tools._turn():
        tasks = []
        for client in ("a", "a", "b"):
            begun = asyncio.Event()
            tasks.append(asyncio.create_task(called(client, begun)))
            await begun.wait()
        await settled(lambda: made.tools._turns.waiting == 3)
        assert not order
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "a"]


@module_loop
async def test_an_open_session_without_a_call_takes_no_slot_from_grading(sandbox: Sandbox) -> None:
    made = rig(sandbox)
    async with made.tools.open() as session:
        assert (await session.run("1 + 1")).output == "2\n"
        assert made.grader.unfinished == 0
        assert (await made.grader.grade(ADD)).kind is VerdictKind.ACCEPTED
        assert (await session.run("_ = 3; _")).output == "3\n"


async def test_a_session_is_one_submission_of_its_callers_quota(fake: FakeSandbox) -> None:
    made = rig(fake)
    set_caller(Caller("ann", quota=Quota(max_in_flight=1)))
    async with made.tools.open():
        with pytest.raises(QuotaExceeded):
            async with made.tools.open():
                pytest.fail("the quota is used up")
    async with made.tools.open() as session:
        assert (await session.run("x")).output == "X"


async def test_each_call_is_audited_and_counted(fake: FakeSandbox, tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit")
    made = rig(fake, audit)
    async with made.tools.open() as session:
        await session.run("x")
        await session.run("die")
    audit.close()
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert [(line["tool_call"], line["end"], "source" in line) for line in lines] == [
        (1, "done", False),
        (2, "exited", False),
    ]
    assert made.registry.get_sample_value("nouscoder_verifier_tool_calls_total", {"end": "exited"}) == 1


def test_the_configuration_gives_tool_sessions_slots_of_their_own() -> None:
    section = load_config(None, ["verifier.tools.sessions=3", "verifier.sandbox.slots=2"]).verifier
    sandbox = open_backends(section)
    assert sandbox.num_slots == 5
    assert Grader(sandbox, VerifierMetrics(CollectorRegistry()), section).num_slots == 2
    assert limits_of(section.tools).life_s > 16 * 60


# Over gRPC


@pytest_asyncio.fixture(loop_scope="module")
async def served(sandbox: Sandbox) -> AsyncIterator[tuple[str, Rig]]:
    """The service with one tool session."""
    made = rig(sandbox)
    async with AsyncExitStack() as stack:
        yield await serve(made.tools, made.grader, stack), made


async def serve(tools: ToolSessions | None, grader: Grader, stack: AsyncExitStack, keys: ApiKeys | None = None) -> str:
    server = grpc.aio.server(
        interceptors=[GrpcGate(keys or ApiKeys(), MemoryBudget(1 << 30)), StatusCodes(STATUS_CODES, [FULL_NAME])]
    )
    servicer = Servicer(grader, (), MemoryBudget(1 << 30), tools)
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stack.push_async_callback(server.stop, None)
    return f"127.0.0.1:{port}"


def is_free(made: Rig) -> bool:
    return num_sessions(made, "open") == 0


@module_loop
async def test_a_client_calls_an_interpreter_and_its_session_ends_with_it(served: tuple[str, Rig]) -> None:
    address, made = served
    async with VerifierClient(address) as client:
        async with client.interpreter() as calls:
            assert is_free(made), "a session begins with its first call"
            assert (await calls.run("x = 20")).end is CallEnd.DONE
            assert (await calls.run("x + 1")).output == "21\n"
            assert not is_free(made)
        await settled(lambda: is_free(made))
        async with client.interpreter() as calls:
            assert "NameError" in (await calls.run("x")).output


@module_loop
async def test_the_session_of_a_killed_client_ends(served: tuple[str, Rig]) -> None:
    address, made = served
    process = subprocess.Popen([sys.executable, "-c", HOLDER, address], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == b"2\n"
    assert not is_free(made)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    await settled(lambda: is_free(made))
    async with VerifierClient(address) as client, client.interpreter() as calls:
        assert (await calls.run("3")).output == "3\n"


async def test_the_session_of_a_client_over_its_share_ends_and_its_next_call_says_why(fake: FakeSandbox) -> None:
    """Before, one client kept all places until it was idle for `idle_s` seconds, up to 6,120 s with the defaults."""
    made = rig(fake, sharing=Sharing(safe_s=0.0), sessions=2)

    async with AsyncExitStack() as stack:
        of_alice, of_bob = new_api_key("alice"), new_api_key("bob")
        keys = ApiKeys(environment=f"{of_alice[1]} {of_bob[1]}")
        address = await serve(made.tools, made.grader, stack, keys)
        alice = await stack.enter_async_context(VerifierClient(address, token=lambda: of_alice[0]))
        bob = await stack.enter_async_context(VerifierClient(address, token=lambda: of_bob[0]))
        first, second = [await stack.enter_async_context(alice.interpreter()) for _ in range(2)]
        for calls in (first, second):
            assert (await calls.run("x")).output == "X"
        async with bob.interpreter() as calls:
            assert (await calls.run("y")).output == "Y"
            with pytest.raises(PeerBehind, match=r"another client with fewer sessions was waiting for its place"):
                await first.run("x")
            assert (await second.run("x")).output == "X", "the session with the latest call stays"


async def test_a_client_that_takes_no_answer_keeps_no_place(fake: FakeSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the service waited for it to take them: its place was taken for as long as its connection lived."""
    monkeypatch.setattr(interpreter_module, "_DELIVERY_S", 0.05)
    made = rig(fake, sharing=Sharing(safe_s=0.0, long_open_s=0.0), sessions=1, calls=10_000)
    async with AsyncExitStack() as stack:
        of_alice, of_bob = new_api_key("alice"), new_api_key("bob")
        keys = ApiKeys(environment=f"{of_alice[1]} {of_bob[1]}")
        address = await serve(made.tools, made.grader, stack, keys)
        channel = await stack.enter_async_context(open_channel(address))
        metadata = (("authorization", f"Bearer {of_alice[0]}"),)
        call: Any = verifier_pb2_grpc.VerifierServiceStub(channel).Interpret(metadata=metadata)

        async def write() -> None:
            while True:
                await call.write(InterpretRequest(code="x" * 200_000))

        writing = asyncio.create_task(write())
        await settled(lambda: fake.num_sessions > 0)
        (place,) = made.tools._places._open
        last, same = None, 0
        while same < 100:  # gRPC's windows are full
            await asyncio.sleep(0.005)
            last, same = place.idle_since_s, same + 1 if place.idle_since_s == last else 0
        bob = await stack.enter_async_context(VerifierClient(address, token=lambda: of_bob[0]))
        async with asyncio.timeout(60), bob.interpreter() as calls:
            assert (await calls.run("y")).output == "Y"
        call.cancel()
        await asyncio.gather(writing, return_exceptions=True)


async def test_a_session_without_calls_ends_and_says_why(fake: FakeSandbox) -> None:
    made = rig(fake, idle_s=0.05)
    async with AsyncExitStack() as stack:
        address = await serve(made.tools, made.grader, stack)
        channel = await stack.enter_async_context(open_channel(address))
        silent = verifier_pb2_grpc.VerifierServiceStub(channel).Interpret()
        with pytest.raises(grpc.aio.AioRpcError, match=r"its client was idle for 0.05 s"):
            await silent.read()
        assert await silent.code() is grpc.StatusCode.ABORTED
    assert is_free(made)


async def test_a_service_without_tool_sessions_refuses_and_names_the_key(fake: FakeSandbox) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(VerifierClient(await serve(None, rig(fake).grader, stack)))
        async with client.interpreter() as calls:
            with pytest.raises(PeerRefused, match=r"set verifier.tools.sessions"):
                await calls.run("x")


async def test_a_service_without_tool_sessions_does_not_wait_for_a_client_that_sends_nothing(
    fake: FakeSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "_FIRST_CALL_S", 0.01)
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(open_channel(await serve(None, rig(fake).grader, stack)))
        call: Any = verifier_pb2_grpc.VerifierServiceStub(channel).Interpret()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call.read()
    assert failed.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_session_that_ends_during_a_write_is_unreachable_and_no_internal_error() -> None:
    """gRPC loses the status of the service then; seen in one of fifteen writes to a service that ends each call."""

    class Ended(verifier_pb2_grpc.VerifierServiceServicer):
        async def Interpret(self, _: object, context: Any) -> AsyncIterator[Any]:  # noqa: N802
            await context.send_initial_metadata((("x-request-id", "ended"),))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "over")
            yield

    class Writing:
        """A call whose first write begins while the service ends the call."""

        def __init__(self, call: Any) -> None:
            self.read, self.cancel, self._call = call.read, call.cancel, call

        async def write(self, request: Any) -> None:
            await self._call.initial_metadata()
            self._call._cython_call.set_internal_error("as _StreamRequestMixin._write does when the send fails")
            await self._call._raise_for_status()

    server = grpc.aio.server()
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(Ended(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
        calls = InterpreterCalls("verifier", lambda: Writing(stub.Interpret()))  # type: ignore[arg-type,return-value]
        with pytest.raises(PeerUnreachable, match="verifier ended the session while code was sent"):
            await calls.run("x")
        calls.close()
    await server.stop(None)


async def test_a_refused_call_names_the_fault_and_a_failed_sandbox_is_not_the_codes_fault(fake: FakeSandbox) -> None:
    made = rig(fake)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(VerifierClient(await serve(made.tools, made.grader, stack)))
        async with client.interpreter() as calls:
            with pytest.raises(PeerRefused, match=r"code: longer than"):
                await calls.run("x" * (MAX_CODE_BYTES + 1))
        await fake.close()
        async with client.interpreter() as calls:
            with pytest.raises(PeerUnreachable, match=r"the interpreter failed: the sandbox is not open"):
                await calls.run("x")
