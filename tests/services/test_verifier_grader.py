"""The grader with a scripted sandbox: verdicts, order, early stop, infrastructure failures, queue, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from nouscoder.config import VerifierSection
from nouscoder.domain.submission import CallCase, CallTests, Limits, Profile, StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import TestOutcome, VerdictKind
from nouscoder.verifier.grading.grader import Grader, GradingPolicy, QueueFull
from nouscoder.verifier.grading.time_limits import ExclusiveRunLock
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.base import (
    NO_FILES,
    CompileFailed,
    CompileStarved,
    Dialogue,
    Exit,
    OutOfMemory,
    Program,
    RunResult,
    SandboxError,
    Session,
)

Behaviour = Callable[[bytes], Awaitable[RunResult]]
GOOD = RunResult(Exit.EXITED, 0, 0, 0.01, 0.01, 1000, b"", b"")


async def echo(stdin: bytes) -> RunResult:
    """A program that prints what it reads."""
    return replace(GOOD, stdout=stdin)


class ScriptedSandbox:
    """Runs a coroutine instead of a program, and records programs and inputs."""

    name = "scripted"
    isolation: tuple[str, ...] = ()

    def __init__(self, behaviour: Behaviour = echo, num_slots: int = 1) -> None:
        self.behaviour = behaviour
        self.num_slots = num_slots
        self.programs: list[Program] = []
        self.inputs: list[bytes] = []
        self.open = 0
        self.most_open = 0

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to close."""

    @asynccontextmanager
    async def session(self, program: Program) -> AsyncIterator[Session]:
        """One submission."""
        if program.code == "does not compile":
            raise CompileFailed("line 1")
        self.programs.append(program)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            yield self
        finally:
            self.open -= 1

    def with_partners(
        self, program: Program, partner: Program, checker: Program | None = None
    ) -> AbstractAsyncContextManager[tuple[Session, ...]]:
        """Not used by these tests."""
        raise NotImplementedError

    def dialogue(self, program: Program) -> AbstractAsyncContextManager[Dialogue]:
        """Not used by these tests."""
        raise NotImplementedError

    async def run(
        self, stdin: bytes, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> RunResult:
        """One run."""
        self.inputs.append(stdin)
        return await self.behaviour(stdin)

    async def dialogue_with(
        self, partner: Session, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> tuple[RunResult, RunResult]:
        """Not used by these tests."""
        raise NotImplementedError

    async def announce(
        self, stdin: bytes, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> None:
        """Do nothing ahead."""


def grader_of(sandbox: ScriptedSandbox, policy: GradingPolicy | None = None, **section: float) -> Grader:
    """A grader with its own metrics."""
    registry = CollectorRegistry()
    grader = Grader(sandbox, VerifierMetrics(registry), VerifierSection(**section), policy=policy)  # type: ignore[arg-type]
    grader_registry[id(grader)] = registry
    return grader


grader_registry: dict[int, CollectorRegistry] = {}


def sample(grader: Grader, name: str, **labels: str) -> float | None:
    """A metric's value."""
    return grader_registry[id(grader)].get_sample_value(f"nouscoder_verifier_{name}", labels)


def stdin_submission(*pairs: tuple[str, str], code: str | None = "x", **fields: object) -> Submission:
    """A submission with (input, output) tests."""
    tests = StdinTests(tuple(StdinCase(given, wanted) for given, wanted in pairs))
    return Submission(tests=tests, code=code, **fields)  # type: ignore[arg-type]


async def test_the_hardest_test_runs_first_and_outcomes_keep_the_indices_of_the_request() -> None:
    sandbox = ScriptedSandbox()
    seen: list[TestOutcome] = []
    submission = stdin_submission(("a", "a"), ("ccc", "ccc"), ("bb", "bb"))
    verdict = await grader_of(sandbox).grade(submission, seen.append)
    assert sandbox.inputs == [b"ccc", b"bb", b"a"]
    assert [one.index for one in seen] == [1, 2, 0]
    assert [one.index for one in verdict.tests] == [0, 1, 2]
    assert (verdict.kind, verdict.passed, verdict.total, verdict.graded) == (VerdictKind.ACCEPTED, 3, 3, 3)
    assert verdict.first_failure is None


async def test_grading_stops_at_the_first_failure_unless_the_submission_asks_for_all_tests() -> None:
    submission = stdin_submission(("a", "no"), ("bbb", "bbb"), ("cc", "no"))
    verdict = await grader_of(ScriptedSandbox()).grade(submission)
    assert (verdict.kind, verdict.passed, verdict.graded) == (VerdictKind.WRONG_ANSWER, 1, 2)
    assert verdict.first_failure is not None
    assert (verdict.first_failure.index, verdict.first_failure.expected) == (2, "no")
    whole = await grader_of(ScriptedSandbox()).grade(replace(submission, stop_on_first_failure=False))
    assert (whole.passed, whole.graded) == (1, 3)
    assert whole.first_failure is not None
    assert whole.first_failure.index == 0


class StarvingSandbox(ScriptedSandbox):
    """Other work keeps the compiler from the CPU the first `times` times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    @asynccontextmanager
    async def session(self, program: Program) -> AsyncIterator[Session]:
        """See `Sandbox.session`."""
        async with super().session(program) as session:
            if len(self.programs) <= self.times:
                raise CompileStarved("other work")
            yield session


async def test_a_compiler_without_cpu_is_repeated_alone_and_is_never_a_compile_error() -> None:
    """Each of the two attempts is repeated once."""
    submission = stdin_submission(("a", "a"))
    for times, kind in ((0, VerdictKind.ACCEPTED), (1, VerdictKind.ACCEPTED), (9, VerdictKind.INTERNAL_ERROR)):
        sandbox = StarvingSandbox(times)
        grader = grader_of(sandbox)
        verdict = await grader.grade(submission)
        assert verdict.kind is kind
        assert len(sandbox.programs) == min(times + 1, 4)
        assert (sandbox.open, grader._run_lock._open.is_set()) == (0, True)


async def test_a_compiler_without_cpu_waits_for_the_runs_of_others_when_it_is_repeated() -> None:
    gate, began = asyncio.Event(), asyncio.Event()

    async def other(stdin: bytes) -> RunResult:
        began.set()
        await gate.wait()
        return await echo(stdin)

    busy, starving = ScriptedSandbox(other), StarvingSandbox(1)
    run_lock = ExclusiveRunLock()
    graders = [
        Grader(one, VerifierMetrics(CollectorRegistry()), None, run_lock)  # type: ignore[arg-type]
        for one in (busy, starving)
    ]
    first = asyncio.ensure_future(graders[0].grade(stdin_submission(("a", "a"))))
    async with asyncio.timeout(60):
        await began.wait()
        second = asyncio.ensure_future(graders[1].grade(stdin_submission(("a", "a"))))
        while run_lock._open.is_set():
            await asyncio.sleep(0)
        assert len(starving.programs) == 1, "it is not compiled again while another run is in progress"
        gate.set()
        verdicts = await asyncio.gather(first, second)
    assert [one.kind for one in verdicts] == [VerdictKind.ACCEPTED] * 2
    assert len(starving.programs) == 2


async def test_a_compiler_is_not_repeated_for_longer_than_the_repetitions_of_a_submission(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nouscoder.verifier.grading.time_limits.MAX_REPETITIONS_S", 0.0)
    sandbox = StarvingSandbox(9)
    verdict = await grader_of(sandbox).grade(stdin_submission(("a", "a")))
    assert (verdict.kind, len(sandbox.programs)) == (VerdictKind.INTERNAL_ERROR, 2), "one for each attempt"


async def test_expected_outputs_never_reach_the_sandbox() -> None:
    sandbox = ScriptedSandbox()
    call = CallTests("f", (CallCase((1,), {"k": [2]}, "SECRET"),))
    await grader_of(sandbox).grade(Submission(tests=call, code="def f(): pass"))
    await grader_of(sandbox).grade(stdin_submission(("a", "SECRET")))
    assert "SECRET" not in repr((sandbox.programs, sandbox.inputs))
    assert sandbox.inputs[0] == b'{"args": [1], "kwargs": {"k": [2]}}'


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (replace(GOOD, stdout=b"yes"), VerdictKind.ACCEPTED),
        (replace(GOOD, stdout=b"no"), VerdictKind.WRONG_ANSWER),
        (replace(GOOD, stdout=b"yes", exit_code=1), VerdictKind.RUNTIME_ERROR),
        (replace(GOOD, stdout=b"yes", exit=Exit.SIGNALLED, signal=11), VerdictKind.RUNTIME_ERROR),
        (replace(GOOD, stdout=b"yes", exit=Exit.TIME_LIMIT), VerdictKind.TIME_LIMIT_EXCEEDED),
        (replace(GOOD, stdout=b"yes", exit=Exit.MEMORY_LIMIT), VerdictKind.MEMORY_LIMIT_EXCEEDED),
        (replace(GOOD, stdout=b"yes", exit=Exit.OUTPUT_LIMIT), VerdictKind.OUTPUT_LIMIT_EXCEEDED),
    ],
)
async def test_the_exit_of_the_process_determines_the_outcome(result: RunResult, kind: VerdictKind) -> None:
    async def behaviour(_: bytes) -> RunResult:
        return result

    verdict = await grader_of(ScriptedSandbox(behaviour)).grade(stdin_submission(("", "yes")))
    assert verdict.kind is kind


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (b"[1, 2]", VerdictKind.ACCEPTED),
        (b"[1, true]", VerdictKind.WRONG_ANSWER),
        (b"[1, 2", VerdictKind.WRONG_ANSWER),
        (b"[" * 3000, VerdictKind.WRONG_ANSWER),
        (None, VerdictKind.RUNTIME_ERROR),
    ],
)
async def test_only_the_result_of_a_call_is_judged(result: bytes | None, kind: VerdictKind) -> None:
    async def behaviour(_: bytes) -> RunResult:
        return replace(GOOD, stdout=b"[1, 2]", result=result)

    tests = CallTests("f", (CallCase((), {}, [1, 2]),))
    verdict = await grader_of(ScriptedSandbox(behaviour)).grade(Submission(tests=tests, code="x"))
    assert verdict.kind is kind


async def test_every_exit_has_an_outcome() -> None:
    for exit_kind in Exit:

        async def behaviour(_: bytes, exit_kind: Exit = exit_kind) -> RunResult:
            return replace(GOOD, exit=exit_kind)

        assert not (await grader_of(ScriptedSandbox(behaviour)).grade(stdin_submission(("", "")))).is_ours


async def test_a_completion_without_code_uses_no_sandbox() -> None:
    sandbox = ScriptedSandbox()
    verdict = await grader_of(sandbox).grade(stdin_submission(("a", "a"), code=None, completion="I cannot."))
    assert (verdict.kind, verdict.graded, verdict.total) == (VerdictKind.NO_CODE, 0, 1)
    assert not sandbox.programs
    verdict = await grader_of(sandbox).grade(stdin_submission(("a", "a"), code=None, completion="```\ncat\n```"))
    assert verdict.kind is VerdictKind.ACCEPTED
    assert sandbox.programs[0].code == "cat"


async def test_code_that_does_not_compile_gets_compile_error() -> None:
    verdict = await grader_of(ScriptedSandbox()).grade(stdin_submission(("a", "a"), code="does not compile"))
    assert (verdict.kind, verdict.detail, verdict.graded) == (VerdictKind.COMPILE_ERROR, "line 1", 0)


async def test_an_infrastructure_failure_is_retried_in_a_fresh_sandbox_and_judged_tests_are_kept() -> None:
    async def behaviour(stdin: bytes) -> RunResult:
        if stdin == b"a" and len(sandbox.programs) == 1:
            raise SandboxError("slot died")
        return replace(GOOD, stdout=stdin)

    sandbox = ScriptedSandbox(behaviour)
    grader = grader_of(sandbox)
    verdict = await grader.grade(stdin_submission(("a", "a"), ("bb", "bb")))
    assert (verdict.kind, verdict.graded) == (VerdictKind.ACCEPTED, 2)
    assert sandbox.inputs == [b"bb", b"a", b"a"]
    assert sample(grader, "internal_errors_total", cause="sandbox") == 1


@pytest.mark.parametrize(
    ("error", "cause"),
    [(SandboxError("gone"), "sandbox"), (ZeroDivisionError(), "grader"), (TimeoutError(), "sandbox_silent")],
)
async def test_two_infrastructure_failures_give_internal_error(error: Exception, cause: str) -> None:
    async def behaviour(_: bytes) -> RunResult:
        raise error

    grader = grader_of(ScriptedSandbox(behaviour))
    verdict = await grader.grade(stdin_submission(("a", "a")))
    assert verdict.is_ours
    assert sample(grader, "internal_errors_total", cause=cause) == 2
    assert sample(grader, "submissions_total", verdict="internal_error") == 1
    assert grader.unfinished == 0


LOST, KILLED = SandboxError("gone"), OutOfMemory("killed for lack of memory")
ENDS = {
    "killed twice": ([KILLED, KILLED], VerdictKind.MEMORY_LIMIT_EXCEEDED),
    "killed once": ([KILLED], VerdictKind.ACCEPTED),
    "lost twice": ([LOST, LOST], VerdictKind.INTERNAL_ERROR),
    "lost once in between": ([KILLED, LOST, KILLED], VerdictKind.MEMORY_LIMIT_EXCEEDED),
    "lost before": ([LOST, KILLED, KILLED], VerdictKind.MEMORY_LIMIT_EXCEEDED),
    "lost before and killed once": ([LOST, KILLED], VerdictKind.ACCEPTED),
    "killed once and lost twice": ([KILLED, LOST, LOST], VerdictKind.INTERNAL_ERROR),
}


@pytest.mark.parametrize(("ends", "kind"), ENDS.values(), ids=ENDS.keys())
async def test_a_program_under_which_two_sandboxes_are_killed_for_lack_of_memory_exceeds_its_limit(
    ends: list[SandboxError], kind: VerdictKind
) -> None:
    """One such end may be due to the machine. A lost sandbox without that reason is never the program's fault."""
    left = list(ends)

    async def behaviour(stdin: bytes) -> RunResult:
        if stdin == b"a" and left:
            raise left.pop(0)
        return await echo(stdin)

    sandbox = ScriptedSandbox(behaviour)
    grader = grader_of(sandbox)
    submission = stdin_submission(("a", "a"), ("bb", "bb"), stop_on_first_failure=False)
    verdict = await grader.grade(submission)
    assert (verdict.kind, left, sandbox.open) == (kind, [], 0), verdict
    assert len(sandbox.programs) == len(ends) + (kind is VerdictKind.ACCEPTED)
    assert verdict.graded == (2 if kind is VerdictKind.ACCEPTED else 1)
    blamed = kind is VerdictKind.MEMORY_LIMIT_EXCEEDED
    assert sample(grader, "internal_errors_total", cause="sandbox") == len(ends) - blamed


async def test_a_silent_sandbox_is_abandoned() -> None:
    async def behaviour(_: bytes) -> RunResult:
        await asyncio.sleep(60)
        return GOOD

    limits = Limits(wall_time_s=0.01)
    grader = grader_of(ScriptedSandbox(behaviour), GradingPolicy(run_grace_s=0.01))
    assert (await grader.grade(stdin_submission(("a", "a"), limits=limits))).is_ours


async def test_exceeding_the_total_time_of_all_tests_gives_time_limit_exceeded() -> None:
    async def behaviour(stdin: bytes) -> RunResult:
        return replace(GOOD, stdout=stdin, wall_time_s=4.0)

    grader = grader_of(ScriptedSandbox(behaviour), max_submission_s=10)
    verdict = await grader.grade(stdin_submission(*[("a", "a")] * 5))
    assert (verdict.kind, verdict.graded) == (VerdictKind.TIME_LIMIT_EXCEEDED, 3)


async def test_what_a_test_costs_its_slot_counts_and_not_only_the_run() -> None:
    async def behaviour(stdin: bytes) -> RunResult:
        await asyncio.sleep(0.05)  # as if a checker ran or files were removed: the run says that it took no time
        return replace(GOOD, stdout=stdin, wall_time_s=0.0)

    grader = grader_of(ScriptedSandbox(behaviour), max_submission_s=0.1)
    verdict = await grader.grade(stdin_submission(*[("a", "a")] * 5))
    assert verdict.kind is VerdictKind.TIME_LIMIT_EXCEEDED
    assert verdict.graded <= 2
    assert "took more than 0.1 s in total" in verdict.detail


async def test_the_texts_of_a_failure_are_clipped_and_can_be_hidden() -> None:
    async def behaviour(_: bytes) -> RunResult:
        return replace(GOOD, stdout=b"\xff" * 100_000, stderr=b"x" * 100_000 + b"end")

    submission = stdin_submission(("i" * 100_000, "e" * 100_000))
    failure = (await grader_of(ScriptedSandbox(behaviour)).grade(submission)).first_failure
    assert failure is not None
    assert all(len(text) < 2100 for text in (failure.input, failure.expected, failure.output, failure.stderr))
    assert failure.stderr.endswith("end")
    withheld = await grader_of(ScriptedSandbox(behaviour)).grade(replace(submission, reveal=False))
    assert withheld.first_failure is None
    assert withheld.kind is VerdictKind.WRONG_ANSWER


class Gate:
    """A behaviour that waits until it is opened."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def __call__(self, stdin: bytes) -> RunResult:
        await self.opened.wait()
        return replace(GOOD, stdout=stdin)


async def settled(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_at_most_num_slots_submissions_run_and_a_full_queue_refuses() -> None:
    gate = Gate()
    sandbox = ScriptedSandbox(gate, num_slots=2)
    grader = grader_of(sandbox, max_queue=3)
    tasks = [asyncio.ensure_future(grader.grade(stdin_submission(("a", "a")))) for _ in range(5)]
    await settled(lambda: grader.unfinished == 5)
    with pytest.raises(QueueFull) as refusal:
        await grader.grade(stdin_submission(("a", "a")))
    assert refusal.value.retry_after_s >= 1
    assert sample(grader, "queue_depth") == 3
    assert sample(grader, "sandboxes", state="busy") == 2
    gate.opened.set()
    assert [one.kind for one in await asyncio.gather(*tasks)] == [VerdictKind.ACCEPTED] * 5
    assert sandbox.most_open == 2
    assert sample(grader, "sandboxes", state="free") == 2


async def test_a_cancelled_caller_frees_its_slot_or_its_place_in_the_queue() -> None:
    gate = Gate()
    sandbox = ScriptedSandbox(gate)
    grader = grader_of(sandbox)
    tasks = [asyncio.ensure_future(grader.grade(stdin_submission(("a", "a")))) for _ in range(3)]
    await settled(lambda: sandbox.open == 1)
    tasks[0].cancel()
    tasks[1].cancel()
    gate.opened.set()
    assert (await tasks[2]).kind is VerdictKind.ACCEPTED
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (sandbox.open, grader.unfinished) == (0, 0)


ANSWER = Submission(StdinTests((StdinCase("a", "a"),)), completion="```python\ncat\n```")


@pytest.mark.parametrize(
    ("submission", "field"),
    [
        (stdin_submission(), "tests.cases"),
        (stdin_submission(("a", "a"), language="cobol"), "language"),
        (stdin_submission(("a", "a"), limits=Limits(wall_time_s=1e9)), "limits.wall_time_s"),
        (stdin_submission(("a", "a"), limits=Limits(memory_bytes=2**60)), "limits.memory_bytes"),
        (Submission(tests=CallTests("f()", (CallCase(),)), code="x"), "tests.entry_point"),
        (Submission(tests=CallTests("False", (CallCase(),)), code="x"), "tests.entry_point"),
        (stdin_submission(("a", "a"), other_languages=("cpp",)), "other_languages"),
        (replace(ANSWER, other_languages=("cobol",)), "other_languages"),
        (replace(ANSWER, other_languages=("cpp",), tests=CallTests("f", (CallCase(),))), "language"),
        (replace(ANSWER, other_languages=("cpp",), profile=Profile.LCB), "profile"),
        (replace(ANSWER, other_languages=("cpp",), files={"main.cpp": ""}), "files.main.cpp"),
    ],
)
async def test_an_invalid_submission_is_refused_with_its_field(submission: Submission, field: str) -> None:
    with pytest.raises(InvalidSubmission) as refusal:
        await grader_of(ScriptedSandbox()).grade(submission)
    assert refusal.value.field == field


async def test_extra_workers_use_idle_slots_and_are_counted() -> None:
    gate = Gate()

    async def behaviour(stdin: bytes) -> RunResult:
        if stdin != b"first":
            return await gate(stdin)
        await asyncio.sleep(0.005)
        return replace(GOOD, stdout=stdin)

    sandbox = ScriptedSandbox(behaviour, num_slots=3)
    grader = grader_of(sandbox, GradingPolicy(min_worker_left_s=0.0))
    pairs = [("first", "first"), *[(str(n), str(n)) for n in range(9)]]
    task = asyncio.ensure_future(grader.grade(stdin_submission(*pairs)))
    await settled(lambda: sandbox.open == 3)
    assert (grader.unfinished, sample(grader, "sandboxes", state="busy")) == (1, 3)
    gate.opened.set()
    assert (await task).passed == 10
    assert (grader.unfinished, sample(grader, "sandboxes", state="busy"), sandbox.open) == (0, 0, 0)
    assert sample(grader, "extra_lanes_total") == 2


async def test_a_borderline_run_also_excludes_the_other_tests_of_its_own_submission() -> None:
    running: set[bytes] = set()
    alone: list[set[bytes]] = []
    seen = 0

    async def behaviour(stdin: bytes) -> RunResult:
        nonlocal seen
        running.add(stdin)
        try:
            await asyncio.sleep(0.005)
            if stdin != b"border":
                return replace(GOOD, stdout=stdin)
            seen += 1
            alone.append(set(running))
            return replace(GOOD, stdout=stdin, wall_time_s=10.5 if seen == 1 else 1.0)
        finally:
            running.discard(stdin)

    pairs = [("longest!", "longest!"), ("border", "border"), *[(f"{n:04d}", f"{n:04d}") for n in range(12)]]
    sandbox = ScriptedSandbox(behaviour, num_slots=2)
    submission = stdin_submission(*pairs, limits=Limits(wall_time_s=10, cpu_time_s=20))
    verdict = await grader_of(sandbox, GradingPolicy(min_worker_left_s=0.0)).grade(submission)
    assert (verdict.kind, verdict.graded, sandbox.most_open) == (VerdictKind.ACCEPTED, 14, 2)
    assert len(alone) == 2
    assert alone[1] == {b"border"}


async def test_learned_kill_rates_stop_a_wrong_program_earlier() -> None:
    """Two programs fail on the shortest of ten tests. If they name the problem, the second one fails at once."""
    pairs = [("x" * n, "no" if n == 1 else "x" * n) for n in range(1, 11)]

    async def graded(grader: Grader, **fields: object) -> tuple[int, VerdictKind, int]:
        verdict = await grader.grade(stdin_submission(*pairs, **fields))  # type: ignore[arg-type]
        assert verdict.first_failure is not None
        return verdict.graded, verdict.kind, verdict.first_failure.index

    grader = grader_of(ScriptedSandbox())
    assert await graded(grader, problem_id="p") == (10, VerdictKind.WRONG_ANSWER, 0)
    assert await graded(grader, problem_id="p") == (1, VerdictKind.WRONG_ANSWER, 0)
    assert await graded(grader) == (10, VerdictKind.WRONG_ANSWER, 0), (
        "a submission without a problem id must have the order by length"
    )
    assert await graded(grader, problem_id="another") == (10, VerdictKind.WRONG_ANSWER, 0)
    everything = await grader.grade(stdin_submission(*pairs, problem_id="p", stop_on_first_failure=False))
    assert (everything.graded, everything.passed) == (10, 9)
