"""Math tests: slow answers keep nobody waiting, and each answer has a verdict that depends on nothing else.

Tests the invariants of grading/grader.py, judges/mathematics.py and judges/math_worker.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from nouscoder.domain.submission import Limits, MathCase, MathTests, StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.verifier.access.caller import Caller, set_caller
from nouscoder.verifier.api.capabilities import Capabilities
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.grading.math_lane import MathLane
from nouscoder.verifier.judges import math_worker
from nouscoder.verifier.judges.math_worker import Code
from nouscoder.verifier.judges.mathematics import MathLimits, MathProcess, compare, rulings_of
from nouscoder.verifier.judges.rulings import Ruling
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.base import Program, SandboxError
from nouscoder.verifier.sandbox.cgroup import Groups
from nouscoder.verifier.sandbox.fake import FakeSandbox, ended
from nouscoder.verifier.toolchains.languages import installed

pytest.importorskip("math_verify")

SLOW = (r"\boxed{100000!!}", r"\boxed{9^{9^9}}", r"\boxed{(x+y+z)^{300}}")
ENDLESS = MathLimits(cpu_s=1000.0, wall_s=1000.0, total_s=1000.0)
SHORT = MathLimits(cpu_s=0.1, niceness=0)
SECONDS = 20.0  # for the library to be loaded on a busy machine, and more than any wait here
PROGRAM = "print(1)"


def math_of(answer: str, *golds: str) -> Submission:
    return Submission(MathTests(tuple(map(MathCase, golds or ("5",)))), answer, limits=Limits(wall_time_s=60.0))


@pytest.fixture
async def grader() -> AsyncIterator[Grader]:
    """A grader with one slot."""
    sandbox = FakeSandbox({PROGRAM: lambda _: ended(b"1")}, num_slots=1)
    await sandbox.start()
    grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()))
    yield grader
    await grader.close()


@pytest.fixture
async def process() -> AsyncIterator[MathProcess]:
    process = MathProcess()
    yield process
    await process.close()


def lane_of(num_places: int, limits: MathLimits) -> tuple[Grader, MathLane]:
    """A grader whose lane has so many places and these limits."""
    metrics = VerifierMetrics(CollectorRegistry())
    grader = Grader(FakeSandbox(), metrics)
    grader.mathematics = MathLane(num_places, 100, metrics, limits)
    return grader, grader.mathematics


async def ruled(process: MathProcess, answer: str, *golds: str, limits: MathLimits = ENDLESS) -> list[Ruling]:
    tests = MathTests(tuple(map(MathCase, golds or ("5",))))
    return rulings_of(await compare(process, tests, answer, limits), len(tests.cases), limits)


def children_of(pid: int | None) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


async def within(wait: Awaitable[object]) -> object:
    async with asyncio.timeout(SECONDS):
        return await wait


async def test_programs_code_runs_and_capabilities_never_wait_for_slow_answers(grader: Grader) -> None:
    grader.mathematics = MathLane(1, 100, VerifierMetrics(CollectorRegistry()), ENDLESS)
    slow = [asyncio.create_task(grader.grade(math_of(answer))) for answer in SLOW]
    process = grader.mathematics.process
    await until(lambda: process.pid is not None and bool(children_of(process.pid)))
    tests = StdinTests((StdinCase("", "1"),))
    verdict = await within(grader.grade(Submission(tests, PROGRAM)))
    await within(grader.run_once(Program(installed()["python"], PROGRAM, Limits()), b"", {}))
    await within(Capabilities(grader, []).answer())
    assert isinstance(verdict, Verdict)
    assert verdict.kind is VerdictKind.ACCEPTED
    assert not any(one.done() for one in slow), "they must still be at it"
    assert grader.unfinished == len(SLOW)
    for one in slow:
        one.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert grader.unfinished == 0


async def test_an_answer_does_not_wait_for_slow_ones_while_a_place_is_free(process: MathProcess) -> None:
    slow = [asyncio.create_task(ruled(process, answer)) for answer in SLOW]
    assert await within(ruled(process, "5")) == [Ruling(VerdictKind.ACCEPTED)]
    await until(lambda: len(children_of(process.pid)) == len(SLOW))
    assert not any(one.done() for one in slow)
    for one in slow:
        one.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    await until(lambda: not children_of(process.pid))


async def test_slow_answers_have_a_verdict_of_their_own_and_the_same_again() -> None:
    grader, lane = lane_of(2, SHORT)
    for _ in range(2):
        verdicts = await asyncio.gather(*(grader.grade(math_of(answer)) for answer in SLOW))
        assert [one.kind for one in verdicts] == [VerdictKind.TIME_LIMIT_EXCEEDED] * len(SLOW)
    assert lane.unfinished == 0
    failure = verdicts[0].first_failure
    assert failure is not None
    assert "could not be compared in 0.1 s" in failure.stderr
    assert (await grader.grade(math_of("5"))).kind is VerdictKind.ACCEPTED
    await grader.close()


async def test_clients_take_turns() -> None:
    grader, _ = lane_of(1, SHORT)
    order: list[str] = []

    async def ask(client: str, answer: str) -> None:
        set_caller(Caller(client))
        await grader.grade(math_of(answer))
        order.append(client)

    asked = [asyncio.create_task(ask("a", SLOW[0])) for _ in range(4)]
    await until(lambda: grader.unfinished == len(asked))
    await asyncio.create_task(ask("b", "5"))
    assert order.count("a") <= 2, "one that is compared, and one turn"
    for one in asked:
        one.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await grader.close()


async def test_a_slow_comparison_has_a_low_priority_and_leaves_its_place_to_others(grader: Grader) -> None:
    grader.mathematics = MathLane(1, 100, VerifierMetrics(CollectorRegistry()), ENDLESS)
    process = grader.mathematics.process
    slow = asyncio.create_task(grader.grade(math_of(SLOW[0])))

    def niceness() -> list[int]:
        return [os.getpriority(os.PRIO_PROCESS, child) for child in children_of(process.pid)]

    lowered = min(19, os.getpriority(os.PRIO_PROCESS, 0) + ENDLESS.niceness)
    await until(lambda: process.pid is not None and niceness() == [lowered])
    if (idle := Groups().make_idle()) is not None:
        (child,) = children_of(process.pid)
        assert f"nouscoder-{os.getpid()}-" in Path(f"/proc/{child}/cgroup").read_text()
        idle.remove()
    verdict = await within(grader.grade(math_of("5")))
    assert isinstance(verdict, Verdict)
    assert verdict.kind is VerdictKind.ACCEPTED
    assert not slow.done()
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)


async def test_a_slow_comparison_is_idle_for_a_while_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the idle group it has no share of a busy CPU, so its wall time would decide."""
    procs, home = tmp_path / "procs", tmp_path / "home"
    request = math_worker.MathRequest(1, ["5"], SLOW[0], 1000.0, 1000.0, 1000.0, 0, [str(procs), str(home)])
    fork = math_worker._started(request)
    try:
        await until(lambda: procs.exists() and procs.read_text() == str(fork.pid))
        fork.look()
        assert not home.exists()
        monkeypatch.setattr(math_worker, "_IDLE_S", 0.0)
        fork.look()
        assert home.read_text() == str(fork.pid)
        fork.look()  # once only
        assert home.read_text() == str(fork.pid)
    finally:
        os.kill(fork.pid, signal.SIGKILL)
        fork.reap()


async def test_each_gold_answer_gets_a_ruling(process: MathProcess) -> None:
    accepted, wrong = Ruling(VerdictKind.ACCEPTED), Ruling(VerdictKind.WRONG_ANSWER)
    assert await ruled(process, r"so \boxed{0.5}", r"\frac{1}{2}", "0.25", "1/2") == [accepted, wrong, accepted]


async def test_a_gold_answer_in_money_is_a_number(process: MathProcess) -> None:
    """Three of MATH-500's answers are written so; its own dollar sign is no mathematics in dollar signs."""
    accepted, wrong = Ruling(VerdictKind.ACCEPTED), Ruling(VerdictKind.WRONG_ANSWER)
    assert await ruled(process, r"\boxed{\$32,\!348}", r"\$32,\!348", r"\$32,349") == [accepted, wrong]


async def test_a_gold_answer_in_e_notation_is_the_number_that_it_is(process: MathProcess) -> None:
    """A set with answers as floats has 1e-05, which the library reads as Euler's number minus five."""
    accepted, wrong = Ruling(VerdictKind.ACCEPTED), Ruling(VerdictKind.WRONG_ANSWER)
    golds = ("1e-05", "1.2E+19", "2e3", "-2e3", "2e")
    for answers in ((r"0.00001", r"10^{-5}", "1e-05"), (r"1.2 \times 10^{19}", "1.2E+19"), ("2000", "2e3")):
        number = ["0.00001", r"1.2 \times 10^{19}", "2000"].index(answers[0])
        wanted = [accepted if place == number else wrong for place in range(len(golds))]
        assert [await ruled(process, rf"\boxed{{{one}}}", *golds) for one in answers] == [wanted] * len(answers)
    assert (await ruled(process, r"\boxed{6e}", "2e3")) == [wrong]


@pytest.mark.parametrize("answer", ["5 $", "$5", r"5\$", r"\boxed{5 \$}", r"\boxed{\$5}", "5 dollars"])
async def test_an_amount_of_money_is_its_number_as_for_math_verify(process: MathProcess, answer: str) -> None:
    accepted, wrong = Ruling(VerdictKind.ACCEPTED), Ruling(VerdictKind.WRONG_ANSWER)
    assert await ruled(process, answer, "5", r"\$5", "5 $", "6", r"\$6") == [*[accepted] * 3, wrong, wrong]


async def test_what_was_compared_before_a_late_comparison_counts(process: MathProcess) -> None:
    rulings = await ruled(process, "5", "5", r"9^{9^{9}}", "5", limits=SHORT)
    late = VerdictKind.TIME_LIMIT_EXCEEDED
    assert [one.outcome for one in rulings] == [VerdictKind.ACCEPTED, late, late]


async def test_a_slow_comparison_goes_on_where_the_quick_one_has_ended() -> None:
    grader, lane = lane_of(1, SHORT)
    verdict = await grader.grade(replace(math_of("5", "5", r"9^{9^{9}}", "5"), stop_on_first_failure=False))
    late = VerdictKind.TIME_LIMIT_EXCEEDED
    assert [one.outcome for one in verdict.tests] == [VerdictKind.ACCEPTED, late, late]
    assert lane.unfinished == 0
    await grader.close()


async def test_the_comparisons_of_a_submission_have_a_limit_together(process: MathProcess) -> None:
    limits = replace(ENDLESS, total_s=0.1, niceness=0)
    assert [one.outcome for one in await ruled(process, SLOW[0], limits=limits)] == [VerdictKind.TIME_LIMIT_EXCEEDED]


async def test_a_killed_process_is_an_infrastructure_failure_and_is_replaced(process: MathProcess) -> None:
    waiting = asyncio.create_task(ruled(process, SLOW[0]))
    await until(lambda: process.pid is not None and bool(children_of(process.pid)))
    assert process.pid is not None
    (child,) = children_of(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match="its process has ended"):
        await waiting
    await until(lambda: not Path(f"/proc/{child}").exists())
    assert await ruled(process, "5") == [Ruling(VerdictKind.ACCEPTED)]


async def test_a_comparison_that_the_kernel_kills_twice_needs_too_much_memory(process: MathProcess) -> None:
    waiting = asyncio.create_task(ruled(process, SLOW[0]))
    killed: set[int] = set()
    for _ in range(2):
        await until(lambda: process.pid is not None and bool(set(children_of(process.pid)) - killed))
        (child,) = set(children_of(process.pid)) - killed
        killed.add(child)
        await until(lambda one=child: Path(f"/proc/{one}/oom_score_adj").read_text().strip() == "1000")  # type: ignore[misc]
        os.kill(child, signal.SIGKILL)
    (ruling,) = await waiting
    assert ruling.outcome is VerdictKind.MEMORY_LIMIT_EXCEEDED


def test_a_comparison_that_fails_is_a_ruling_on_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    import math_verify

    def fail(error: Exception) -> Callable[..., bool]:
        def raising(*_: object, **__: object) -> bool:
            raise error

        return raising

    assert list(math_worker.compare(["5", "6"], "5")) == [Code.EQUAL, Code.DIFFERENT]
    monkeypatch.setattr(math_verify, "verify", fail(MemoryError()))
    assert list(math_worker.compare(["5"], "5")) == [Code.NO_MEMORY]
    monkeypatch.setattr(math_verify, "verify", fail(RecursionError()))
    assert list(math_worker.compare(["5"], "5")) == [Code.FAILED]


async def test_the_process_starts_with_the_first_answer_and_stops_with_the_grader(grader: Grader) -> None:
    pids = [grader.mathematics.process.pid]
    for kind in (VerdictKind.ACCEPTED, VerdictKind.INTERNAL_ERROR):
        assert (await grader.grade(math_of("5"))).kind is kind
        pids.append(grader.mathematics.process.pid)
        await grader.close()
    assert pids[0] is pids[2] is None
    assert pids[1] is not None
    assert not Path(f"/proc/{pids[1]}").exists()
