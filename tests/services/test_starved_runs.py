"""A run that others keep from the CPU: the kernel tells how long; gVisor does not, so there it is repeated alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable

import pytest
from prometheus_client import CollectorRegistry
from tests.busy_cpu import on_a_busy_cpu

from nouscoder.config import SandboxSection
from nouscoder.domain.submission import (
    InteractiveTests,
    JudgeProgram,
    Limits,
    StdinCase,
    StdinTests,
    Submission,
)
from nouscoder.domain.verdict import Verdict
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.grading.time_limits import ExclusiveRunLock
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import Sandbox

pytestmark = pytest.mark.alone

NUM_HOGS = 32
WORKS = "total = 0\nfor i in range(4_000_000):\n    total += i\nprint(total)"  # 0.2 s of CPU time
LIMITS = {
    "wall": Limits(wall_time_s=4, cpu_time_s=4),  # enough for the repetition on a machine that others use too
    "CPU": Limits(wall_time_s=30, cpu_time_s=1),  # in gVisor its clock goes on
}


class CountedLock(ExclusiveRunLock):
    """Counts the repetitions, and tells when the first begins to wait for other runs."""

    def __init__(self) -> None:
        super().__init__()
        self.num_exclusive = 0
        self.is_asked = asyncio.Event()

    @contextlib.asynccontextmanager
    async def exclusive(self, patience_s: float) -> AsyncIterator[None]:
        """See `ExclusiveRunLock`."""
        self.num_exclusive += 1
        self.is_asked.set()
        async with super().exclusive(patience_s):
            yield


async def graded(sandbox: Sandbox, lock: CountedLock, code: str, limits: Limits) -> tuple[Verdict, int]:
    """The verdict of a program, and its repetitions."""
    grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()), run_lock=lock)
    tests = StdinTests((StdinCase("", "7999998000000\n"),))
    async with asyncio.timeout(120):
        return await grader.grade(Submission(tests, code, limits=limits)), lock.num_exclusive


async def graded_beside_another_run(
    sandbox: Sandbox, end_hogs: Callable[[], None], code: str, limits: Limits
) -> tuple[Verdict, int]:
    """The verdict of a program beside a run to which the hogs belong, and its repetitions."""
    lock = CountedLock()

    async def another() -> None:
        async with lock.shared():
            await lock.is_asked.wait()
            end_hogs()

    other = asyncio.create_task(another())
    await asyncio.sleep(0)
    try:
        return await graded(sandbox, lock, code, limits)
    finally:
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)


@pytest.mark.parametrize(
    ("backend", "limit"),
    [
        ("local", "wall"),
        pytest.param("runsc", "wall", marks=pytest.mark.heavy),
        pytest.param("local", "CPU", marks=pytest.mark.heavy),
        pytest.param("runsc", "CPU", marks=pytest.mark.heavy),
    ],
)
async def test_a_program_that_others_keep_from_the_cpu_is_accepted(backend: str, limit: str) -> None:
    async with on_a_busy_cpu(SandboxSection(backend=backend, slots=1), NUM_HOGS) as (sandbox, end_hogs):
        verdict, num_repeated = await graded_beside_another_run(sandbox, end_hogs, WORKS, LIMITS[limit])
    assert (verdict.kind.value, num_repeated) == ("accepted", int(backend == "runsc"))


NEAR_LIMITS = {  # the seconds are of CPU time but for "asleep"
    "a loop": "work()",
    "a child": "if not os.fork():\n    work()\n    os._exit(0)\nos.wait()",
    "a thread": "t = threading.Thread(target=work)\nt.start()\nt.join()",
    "work that moves from thread to thread": """
turns = [threading.Semaphore(0) for _ in range(8)]
begun, t = time.process_time(), {t}
def take_turns(at):
    while True:
        turns[at].acquire()
        until = min(time.process_time() + 0.03, begun + t)
        while time.process_time() < until: pass
        turns[(at + 1) % 8].release()
        if until == begun + t: return
threads = [threading.Thread(target=take_turns, args=(at,)) for at in range(8)]
for one in threads: one.start()
turns[0].release()
for one in threads: one.join()
""",
    "asleep": "time.sleep({t})",
    "asleep beside threads that look now and then": """
ends = time.monotonic() + {t}
def look():
    while time.monotonic() < ends: time.sleep(0.01)
for _ in range(20): threading.Thread(target=look).start()
""",
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", NEAR_LIMITS)
async def test_no_load_of_others_decides_a_verdict(name: str) -> None:
    """0.75 s of 1 s are accepted and 1.5 s are late, beside 4 processes of others on its CPU, as on an idle machine."""
    limits = Limits(wall_time_s=1, cpu_time_s=1)
    verdicts = []
    async with on_a_busy_cpu(SandboxSection(slots=1), 4) as (sandbox, _):
        for seconds in (0.75, 1.5):
            loop = f"    end = time.process_time() + {seconds}\n    while time.process_time() < end: pass\n"
            code = f"import os, threading, time\ndef work():\n{loop}{NEAR_LIMITS[name].format(t=seconds)}"
            text = f"{code}\nprint(7999998000000)"
            verdicts.append((await graded(sandbox, CountedLock(), text, limits))[0].kind.value)
    assert verdicts == ["accepted", "time_limit_exceeded"]


@pytest.mark.parametrize(
    ("backend", "is_beside_another"),
    [
        ("runsc", False),
        pytest.param("runsc", True, marks=pytest.mark.heavy),
        pytest.param("local", False, marks=pytest.mark.heavy),
        pytest.param("local", True, marks=pytest.mark.heavy),
    ],
)
async def test_an_endless_loop_exceeds_its_limit(backend: str, is_beside_another: bool) -> None:
    """Beside hogs of another run it may be repeated once. With no other run in progress it never is."""
    limits = Limits(wall_time_s=1, cpu_time_s=1)
    async with on_a_busy_cpu(SandboxSection(backend=backend, slots=1), NUM_HOGS) as (sandbox, end_hogs):
        if is_beside_another:
            verdict, num_repeated = await graded_beside_another_run(sandbox, end_hogs, "while True: pass", limits)
            assert num_repeated == 1
        else:
            verdict, num_repeated = await graded(sandbox, CountedLock(), "while True: pass", limits)
            assert num_repeated == 0
    assert verdict.kind.value == "time_limit_exceeded"


LEAVES_WORK = {  # programs that are killed in the middle of what the sentry does for them
    "processes": "import os\nfor _ in range(20):\n    if not os.fork():\n        os.setsid()\nwhile True: os.getpid()",
    "files": "while True:\n    with open('/tmp/a', 'wb') as file:\n        file.write(bytes(1 << 22))",
    "memory": "held = []\nwhile True:\n    held = [bytearray(1 << 22) for _ in range(40)]",
    "threads": "import threading\ndef loop():\n    while True: pass\n"
    "for _ in range(8):\n    threading.Thread(target=loop).start()",
}


async def looks_starved(sandbox: Sandbox, end_hogs: Callable[[], None], code: str) -> bool:
    """Whether each of five runs of a program that works all the time is repeated.

    Skips on a machine that starves a plain loop.
    """
    limits = Limits(wall_time_s=2, cpu_time_s=2)
    for _ in range(5):
        _, num_repeated = await graded_beside_another_run(sandbox, end_hogs, code, limits)
        if not num_repeated:
            return False
        _, num_repeated = await graded_beside_another_run(sandbox, end_hogs, "while True: pass", limits)
        if num_repeated:
            pytest.skip(f"other work of this machine starves even a plain loop: load {os.getloadavg()}")
    return True


@pytest.mark.soak
@pytest.mark.parametrize("name", LEAVES_WORK)
async def test_what_a_program_leaves_behind_does_not_make_it_look_starved(name: str) -> None:
    """Its processes are dead when the share of the CPU is measured. Other load of the machine may change it."""
    async with on_a_busy_cpu(SandboxSection(backend="runsc", slots=1), num_hogs=0) as (sandbox, end_hogs):
        assert not await looks_starved(sandbox, end_hogs, LEAVES_WORK[name])


@pytest.mark.heavy
async def test_an_interactor_waits_for_a_program_that_others_keep_from_the_cpu() -> None:
    """Its own limit is 10 s longer. The program needs 1.6 s of CPU time of 2 s, and about 20 s of wall time here."""
    code = "import time\nend = time.process_time() + 1.6\nwhile time.process_time() < end: pass\nprint(1)"
    interactor = JudgeProgram("raise SystemExit(int(input()) != 1)", "python")
    tests = InteractiveTests((StdinCase("", ""),), interactor)
    async with on_a_busy_cpu(SandboxSection(slots=1), 12) as (sandbox, _):
        grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()))
        verdict = await grader.grade(Submission(tests, code, limits=Limits(wall_time_s=2, cpu_time_s=2)))
    assert verdict.kind.value == "accepted", verdict
