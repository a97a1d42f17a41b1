"""The contract of every sandbox backend: sessions, order, exits, compile failures, results. `fake` has a table."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from tests.modal_server import modal_server
from tests.runsc_runners import runsc_pool
from tests.userns_runners import userns_pool

from nouscoder.config import ModalSection, SandboxSection
from nouscoder.domain.submission import Limits, StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import (
    CompileFailed,
    Dialogue,
    Exit,
    PartnerCompileFailed,
    Program,
    RunResult,
    Sandbox,
    SandboxError,
    SandboxUnavailable,
    open_sandbox,
)
from nouscoder.verifier.sandbox.fake import FakeSandbox, ended
from nouscoder.verifier.toolchains.languages import registry
from nouscoder.verifier.toolchains.libraries import library_folders

DOUBLE = "print(int(input()) * 2)\n"
FAIL = "raise SystemExit(3)\n"
ABORT = "import os; os.abort()\n"
LOOP = "while True: pass\n"
HOG = "x = bytearray(1 << 32)\n"
FLOOD = "import sys\nwhile True: sys.stdout.write('x' * 65536)\n"
ADD = "def add(a, b=0):\n    return (a + b, [a])\n"
PYTHON = registry()["python"]
SHORT = Limits(wall_time_s=0.4, cpu_time_s=5, memory_bytes=256 << 20, output_bytes=1 << 20, processes=16)
WIDE = replace(SHORT, wall_time_s=60)  # for programs that must end: on a busy machine that takes long

TABLE = {
    DOUBLE: lambda stdin: ended(b"%d\n" % (2 * int(stdin))),
    FAIL: lambda _: ended(exit_code=3),
    ABORT: lambda _: ended(exit=Exit.SIGNALLED, signal=6),
    LOOP: lambda _: ended(exit=Exit.TIME_LIMIT, signal=9),
    HOG: lambda _: ended(exit=Exit.MEMORY_LIMIT, exit_code=1, stderr=b"MemoryError\n"),
    FLOOD: lambda _: ended(b"x" * 65536, exit=Exit.OUTPUT_LIMIT),
    ADD: lambda _: ended(result=b"[3, [1]]"),
}


LIBRARIES = ("numpy", "networkx", "sortedcontainers")
POOLS = {"gvisor": "runner_pool", "userns": "userns_runner_pool", "agent-sandbox": "claimed_runner_pool"}
MODAL = ModalSection(image="example.org/nouscoder-sandbox:1", runtime="vm")


@pytest.fixture(
    params=[
        "local",
        "runsc",
        "fake",
        pytest.param(
            "modal", marks=pytest.mark.soak
        ),  # an agent for each test, as on pods and in test_modal_backend.py
        pytest.param("runners-in-runsc", marks=pytest.mark.soak),  # the runners of a pool, without a cluster
        pytest.param("runners-in-userns", marks=pytest.mark.heavy),
        pytest.param("gvisor", marks=pytest.mark.cluster),
        pytest.param("userns", marks=pytest.mark.cluster),
        pytest.param("agent-sandbox", marks=[pytest.mark.cluster, pytest.mark.soak]),
    ]
)
async def sandbox(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Sandbox]:
    if request.param != "modal":
        async for made in opened(request):
            yield made
        return
    async with modal_server(tmp_path, monkeypatch):
        made = open_sandbox(SandboxSection(backend="modal", slots=1, pool_spares=0, pool_start_s=120, modal=MODAL))
        try:
            await made.start()
            yield made
        finally:
            await made.close()


async def opened(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    made: Sandbox
    if request.param.startswith("runners-in"):
        try:
            async with runsc_pool() if request.param == "runners-in-runsc" else userns_pool() as found:
                yield found
        except SandboxUnavailable as error:
            pytest.skip(str(error))
        return
    if request.param == "fake":
        made = FakeSandbox(TABLE, num_slots=1)
    else:
        try:
            if request.param in POOLS:  # pods have the libraries of their image
                made = open_sandbox(request.getfixturevalue(POOLS[request.param]))
            else:
                folders = library_folders(LIBRARIES)
                made = open_sandbox(SandboxSection(backend=request.param, slots=1, site_packages=folders))
        except SandboxUnavailable as error:
            pytest.skip(str(error))
    try:
        await made.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield made
    await made.close()


async def test_stdin_program_answers_each_run(sandbox: Sandbox) -> None:
    async with sandbox.session(Program(PYTHON, DOUBLE, WIDE)) as session:
        for number in (1, 2, 30):
            result = await session.run(b"%d\n" % number)
            assert (result.exit, result.exit_code, result.stdout) == (Exit.EXITED, 0, b"%d\n" % (2 * number))
            assert result.wall_time_s > 0
            assert result.memory_bytes > 0


@pytest.mark.parametrize(
    ("code", "exit_", "exit_code", "signal"),
    [(FAIL, Exit.EXITED, 3, 0), (ABORT, Exit.SIGNALLED, 0, 6)],
)
async def test_exit_code_and_signal(sandbox: Sandbox, code: str, exit_: Exit, exit_code: int, signal: int) -> None:
    async with sandbox.session(Program(PYTHON, code, WIDE)) as session:
        for _ in range(2):  # the process that compiled, and one that did not
            result = await session.run(b"")
            assert (result.exit, result.exit_code, result.signal) == (exit_, exit_code, signal)


@pytest.mark.parametrize(
    ("code", "exit_"), [(LOOP, Exit.TIME_LIMIT), (HOG, Exit.MEMORY_LIMIT), (FLOOD, Exit.OUTPUT_LIMIT)]
)
async def test_each_limit_has_its_exit(sandbox: Sandbox, code: str, exit_: Exit) -> None:
    limits = SHORT if exit_ is Exit.TIME_LIMIT else WIDE
    async with sandbox.session(Program(PYTHON, code, limits)) as session:
        assert (await session.run(b"")).exit is exit_
        assert (await session.run(b"")).exit is exit_


async def test_call_program_returns_its_value_as_json(sandbox: Sandbox) -> None:
    async with sandbox.session(Program(PYTHON, ADD, WIDE, entry_point="add")) as session:
        result = await session.run(b'{"args": [1], "kwargs": {"b": 2}}')
        assert result.result == b"[3, [1]]"


IMPORTS = """import networkx, numpy, sortedcontainers
path = networkx.shortest_path_length(networkx.path_graph(int(input())), 0, 4)
print(path, int(numpy.arange(3).sum()), sortedcontainers.SortedList([2, 1])[0])
"""
TABLE[IMPORTS] = lambda _: ended(b"4 3 1\n")


async def test_the_default_libraries_of_candidates_can_be_imported(
    sandbox: Sandbox, request: pytest.FixtureRequest
) -> None:
    if any(name in request.node.name for name in ("modal", "runners-in")):
        pytest.skip("these runners are processes of this host: the sandbox image with its libraries is missing")
    grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()))
    cases = tuple(StdinCase(f"{size}\n", "4 3 1") for size in (5, 6))  # in the process that compiled, and in another
    verdict = await grader.grade(Submission(StdinTests(cases), IMPORTS, limits=WIDE))
    assert (verdict.kind, verdict.passed) == (VerdictKind.ACCEPTED, 2), verdict


@pytest.mark.parametrize("code", ["def (:\n", "x = 1\n  y = 2\n", "a\x00b", "return 1\n"])
async def test_code_that_does_not_compile_fails_on_entry(sandbox: Sandbox, code: str) -> None:
    with pytest.raises(CompileFailed) as caught:
        async with sandbox.session(Program(PYTHON, code, WIDE)):
            pytest.fail("the session must not open")
    assert "Error" in caught.value.detail
    async with sandbox.session(Program(PYTHON, DOUBLE, WIDE)) as session:  # and the slot still works
        assert (await session.run(b"4")).stdout == b"8\n"


async def test_sessions_wait_for_a_slot_and_get_it_in_order(sandbox: Sandbox) -> None:
    order: list[int] = []

    async def one(number: int) -> None:
        async with sandbox.session(Program(PYTHON, DOUBLE, WIDE)) as session:
            order.append(number)
            await session.run(b"1")

    await asyncio.gather(*(one(number) for number in range(6)))
    assert order == list(range(6))


async def test_a_cancelled_waiter_and_a_cancelled_run_free_the_slot(sandbox: Sandbox) -> None:
    async def one(code: str) -> None:
        async with sandbox.session(Program(PYTHON, code, Limits())) as session:
            await session.run(b"")

    tasks = [asyncio.create_task(one(DOUBLE if sandbox.name == "fake" else LOOP)) for _ in range(3)]
    await asyncio.sleep(0.1)
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, ValueError):
            await task
    async with asyncio.timeout(60), sandbox.session(Program(PYTHON, DOUBLE, WIDE)) as session:
        assert (await session.run(b"21")).stdout == b"42\n"


async def test_a_closed_sandbox_refuses_sessions(sandbox: Sandbox) -> None:
    await sandbox.close()
    with pytest.raises(SandboxError):
        async with sandbox.session(Program(PYTHON, DOUBLE, WIDE)):
            pass


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match="warp"):
        SandboxSection(backend="warp")


def test_an_invalid_setting_is_named() -> None:
    with pytest.raises(ValueError, match="slots"):
        SandboxSection(slots=-1)
    with pytest.raises(ValueError, match="tmp_bytes"):
        SandboxSection(tmp_bytes=0)


GIVEN = "import sys\nprint(sys.argv[1:], *(open(name).read() for name in sys.argv[1:]))\n"
SAYS = "print('hello', flush=True)\nimport sys\nsys.stdin.read()\n"
HEARS = "import sys\nprint(len(input()), *sys.argv[1:])\n"
EXTRA = {
    GIVEN: lambda _: ended(b"['a', 'b'] 1 2\n"),
    SAYS: lambda _: ended(b"hello\n"),
    HEARS: lambda stdin: ended(b"%d x\n" % len(stdin.strip())),
}
TABLE.update(EXTRA)


async def test_arguments_and_files_are_those_of_one_run(sandbox: Sandbox) -> None:
    async with sandbox.session(Program(PYTHON, GIVEN, WIDE)) as session:
        for _ in range(2):  # the process that compiled, and one that did not
            result = await session.run(b"", args=("a", "b"), files={"a": b"1", "b": b"2"})
            assert result.stdout == b"['a', 'b'] 1 2\n", result.stderr.decode()
        if sandbox.name == "local":
            assert (await session.run(b"")).stdout == b"[]\n"
            assert b"FileNotFoundError" in (await session.run(b"", args=("a",))).stderr


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "main.py", "a\0"])
async def test_file_names_that_are_taken_or_not_plain_are_refused(sandbox: Sandbox, name: str) -> None:
    async with sandbox.session(Program(PYTHON, DOUBLE, WIDE)) as session:
        with pytest.raises(ValueError, match="name of a file"):
            await session.run(b"", files={name: b""})
        with pytest.raises(ValueError, match="NUL"):
            await session.run(b"", args=("a\0",))


async def test_two_programs_have_a_dialogue_and_see_the_end_of_each_other(sandbox: Sandbox) -> None:
    async with sandbox.with_partners(Program(PYTHON, SAYS, WIDE), Program(PYTHON, HEARS, WIDE)) as (one, other):
        for _ in range(2):
            said, heard = await one.dialogue_with(other, args=("x",))
            assert (said.exit, said.exit_code, said.stdout) == (Exit.EXITED, 0, b"hello\n")
            assert (heard.exit, heard.exit_code, heard.stdout) == (Exit.EXITED, 0, b"5 x\n")


CLOSES = "import os, sys\nos.write(1, b'3 4\\n')\nos.close(1)\nsys.stderr.write(sys.stdin.read())\n"
SUMS = "import sys\nprint(sum(map(int, sys.stdin.read().split())))\n"
TABLE[CLOSES] = lambda _: ended(b"3 4\n", stderr=b"7\n")
TABLE[SUMS] = lambda stdin: ended(b"%d\n" % sum(map(int, stdin.split())))


async def test_a_program_that_closes_its_output_ends_the_input_of_its_partner(sandbox: Sandbox) -> None:
    async with sandbox.with_partners(Program(PYTHON, CLOSES, WIDE), Program(PYTHON, SUMS, WIDE)) as (one, other):
        for _ in range(2):
            closed, summed = await one.dialogue_with(other)
            assert (closed.exit, closed.stdout, closed.stderr) == (Exit.EXITED, b"3 4\n", b"7\n")
            assert (summed.exit, summed.stdout) == (Exit.EXITED, b"7\n")


# Reads all from its partner, and leaves what it read in the file "output".
KEEPS = """import os, sys
said = sys.stdin.read()
if said == "nothing\\n": os.symlink("/etc/passwd", "output")
elif said != "no file\\n": open("output", "w").write(f"{sys.argv[1]} {said}")
"""
NOTHING, NO_FILE = "print('nothing')\n", "print('no file')\n"
TABLE[KEEPS] = lambda said: ended(result=None if said in (b"nothing\n", b"no file\n") else b"x " + said)
TABLE[NOTHING], TABLE[NO_FILE] = lambda _: ended(b"nothing\n"), lambda _: ended(b"no file\n")


async def test_a_file_of_a_partner_can_be_read_and_a_third_program_gets_it(sandbox: Sandbox) -> None:
    keeps, doubles = Program(PYTHON, KEEPS, WIDE, makes_file=True), Program(PYTHON, DOUBLE, WIDE)
    async with sandbox.with_partners(Program(PYTHON, "print(21)\n", WIDE), keeps, doubles) as (one, other, third):
        for _ in range(2):
            _, kept = await one.dialogue_with(other, args=("x",))
            assert (kept.exit, kept.exit_code, kept.result) == (Exit.EXITED, 0, b"x 21\n"), kept.stderr
            assert kept.result is not None
            assert (await third.run(kept.result[2:])).stdout == b"42\n"
    for code in (NOTHING, NO_FILE):
        async with sandbox.with_partners(Program(PYTHON, code, WIDE), keeps) as (one, other):
            _, kept = await one.dialogue_with(other, args=("x",))
            assert (kept.exit, kept.exit_code, kept.result) == (Exit.EXITED, 0, None), kept.stderr


TABLE["print(21)\n"] = lambda _: ended(b"21\n")
LEAVES = """import os, sys
if (kind := input()) == "link": os.symlink("/etc/passwd", "output")
elif kind == "pipe": os.mkfifo("output")
elif kind == "folder": os.mkdir("output")
elif kind == "file": open("output", "w").write("left")
"""
TABLE[LEAVES] = lambda stdin: ended(result=b"left" if stdin == b"file" else None)


async def test_a_program_that_runs_alone_leaves_a_file_and_nothing_else(sandbox: Sandbox) -> None:
    async with sandbox.session(Program(PYTHON, LEAVES, WIDE, makes_file=True)) as session:
        for kind in (b"file", b"link", b"pipe", b"folder", b"nothing", b"file"):
            left = await session.run(kind)
            assert (left.exit, left.exit_code, left.result) == (Exit.EXITED, 0, b"left" if kind == b"file" else None)


async def test_a_checker_that_does_not_compile_has_the_error_of_a_partner(sandbox: Sandbox) -> None:
    program = Program(PYTHON, DOUBLE, WIDE)
    with pytest.raises(PartnerCompileFailed):
        async with sandbox.with_partners(program, program, Program(PYTHON, "def (", WIDE)):
            pytest.fail("the pair must not open")
    async with sandbox.with_partners(program, program, program) as sessions:  # and the slots still work
        assert [(await session.run(b"4")).stdout for session in sessions] == [b"8\n"] * 3


OPENS = "out = open('/dev/stdout', 'w')\nprint('hello', file=out, flush=True)\nopen('/dev/stdin').read()\n"
TABLE[OPENS] = TABLE[SAYS]


async def test_a_program_can_open_its_streams_by_path_in_a_dialogue(sandbox: Sandbox) -> None:
    if sandbox.name in ("runsc", "gvisor"):
        pytest.skip("the mode of a pipe cannot be changed in gVisor")
    async with sandbox.with_partners(Program(PYTHON, OPENS, WIDE), Program(PYTHON, HEARS, WIDE)) as (one, other):
        said, heard = await one.dialogue_with(other, args=("x",))
        assert (said.exit_code, said.stdout) == (0, b"hello\n"), said.stderr.decode()
        assert heard.stdout == b"5 x\n"


async def test_a_partner_that_does_not_compile_has_its_own_error(sandbox: Sandbox) -> None:
    with pytest.raises(PartnerCompileFailed):
        async with sandbox.with_partners(Program(PYTHON, DOUBLE, WIDE), Program(PYTHON, "def (", WIDE)):
            pytest.fail("the pair must not open")
    with pytest.raises(CompileFailed) as caught:
        async with sandbox.with_partners(Program(PYTHON, "def (", WIDE), Program(PYTHON, DOUBLE, WIDE)):
            pytest.fail("the pair must not open")
    assert type(caught.value) is CompileFailed


async def test_more_pairs_than_slots_wait_for_each_other(sandbox: Sandbox) -> None:
    async def one() -> bytes:
        async with sandbox.with_partners(Program(PYTHON, DOUBLE, WIDE), Program(PYTHON, DOUBLE, WIDE)) as (
            first,
            second,
        ):
            middle = await first.run(b"1")
            return (await second.run(middle.stdout)).stdout

    async with asyncio.timeout(60):
        assert await asyncio.gather(*(one() for _ in range(3))) == [b"4\n"] * 3


UPPER = "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)\n"
ENDS = "input(); print('bye', flush=True); raise SystemExit(3)\n"
TABLE[UPPER] = lambda said: ended(said.upper())
TABLE[ENDS] = lambda _: ended(b"bye\n", exit_code=3)


async def heard(dialogue: Dialogue, num_bytes: int) -> bytes:
    """So many bytes of output, which may come in pieces."""
    found = b""
    while len(found) < num_bytes:
        part = await dialogue.hear(60.0)
        assert isinstance(part, bytes), part
        found += part
    return found


async def test_a_program_keeps_its_state_in_a_dialogue_and_can_be_held_between_two_inputs(sandbox: Sandbox) -> None:
    async with sandbox.dialogue(Program(PYTHON, UPPER, WIDE)) as dialogue:
        for said in (b"one\n", b"two\n"):
            await dialogue.say(said)
            assert await heard(dialogue, 4) == said.upper()
            assert await dialogue.hold() is None


async def test_a_dialogue_ends_with_the_result_of_its_program(sandbox: Sandbox) -> None:
    async with sandbox.dialogue(Program(PYTHON, ENDS, WIDE)) as dialogue:
        await dialogue.say(b"x\n")
        assert await heard(dialogue, 4) == b"bye\n"
        for _ in range(2):
            result = await dialogue.hear(60.0)
            assert isinstance(result, RunResult)
            assert (result.exit, result.exit_code) == (Exit.EXITED, 3)
            await dialogue.say(b"dropped\n")
        assert await dialogue.hold() == result


async def test_a_silent_program_costs_the_caller_its_patience_and_frees_its_slot(sandbox: Sandbox) -> None:
    async with sandbox.dialogue(Program(PYTHON, UPPER, WIDE)) as dialogue:
        with pytest.raises(TimeoutError):
            await dialogue.hear(0.01)
    async with sandbox.session(Program(PYTHON, DOUBLE, WIDE)) as session:
        assert (await session.run(b"4")).stdout == b"8\n"


async def test_a_dialogue_takes_a_slot(sandbox: Sandbox) -> None:
    async with sandbox.dialogue(Program(PYTHON, UPPER, WIDE)):
        waiting = asyncio.ensure_future(sandbox.session(Program(PYTHON, DOUBLE, WIDE)).__aenter__())
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
