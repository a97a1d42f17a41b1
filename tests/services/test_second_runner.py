"""Submissions that a second runner repeats: the invariant of second_runner.py, and runner pods of which one lies.

The pods here are real harnesses of the `local` backend, started in place of a connection to a pod.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.services.test_runner_pool import Pods

from nouscoder.domain.submission import Limits, StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.verifier.grading.grader import Grader, OnOutcome, QueueFull
from nouscoder.verifier.grading.second_runner import ACCUSE_EVERY_S, SecondRunnerGrader, with_second_runner
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import PoolConfig, SandboxConfig, SandboxUnavailable
from nouscoder.verifier.sandbox.fake import FakeSandbox
from nouscoder.verifier.sandbox.init_build import HARNESS
from nouscoder.verifier.sandbox.local import _slot_settings, interpreter, python_command
from nouscoder.verifier.sandbox.runners import gvisor
from nouscoder.verifier.sandbox.runners.gvisor import GvisorSandbox
from nouscoder.verifier.sandbox.runners.launch import RunnerLaunch, SecondRun, current_choice
from nouscoder.verifier.sandbox.runners.pool import Replaced, Runner
from nouscoder.verifier.sandbox.slot import LinkEnding, ProcessLink

YES, NO, LATE = VerdictKind.ACCEPTED, VerdictKind.WRONG_ANSWER, VerdictKind.TIME_LIMIT_EXCEEDED
OURS, ERROR = VerdictKind.INTERNAL_ERROR, VerdictKind.RUNTIME_ERROR
SUBMISSION = Submission(StdinTests((StdinCase("", "truth"),)), "print('truth')", limits=Limits(60.0, 60.0))


class Opinions:
    """A grader that gives these verdicts, each from the first runner that it need not avoid; and its runners."""

    backend, num_slots, unfinished = "gvisor", 1, 0
    name = "gvisor"

    def __init__(self, kinds: list[VerdictKind | Exception], runners: int = 3) -> None:
        self._kinds = kinds
        self._names = [f"pod-{number}" for number in range(runners)]
        self.asked: list[str] = []
        self.accused: list[str] = []

    async def grade(self, submission: Submission, on_outcome: OnOutcome | None = None) -> Verdict:
        name = next(name for name in self._names if name not in current_choice().avoided)
        self.asked.append(name)
        current_choice().used.add(name)
        kind = self._kinds.pop(0)
        if isinstance(kind, Exception):
            raise kind
        return Verdict(kind, 0, 1, 1, 0.0, "gvisor")

    def has_other(self, avoided: frozenset[str]) -> bool:
        return bool(set(self._names) - avoided)

    async def accuse(self, name: str) -> None:
        self.accused.append(name)


@pytest.mark.parametrize(
    ("kinds", "runners", "answer", "ended", "accused"),
    [
        ([YES, YES], 3, YES, SecondRun.AGREED, []),
        ([NO, ERROR], 3, NO, SecondRun.AGREED, []),
        ([YES, NO, NO], 3, NO, SecondRun.OVERRULED, ["pod-0"]),
        ([NO, YES, YES], 3, YES, SecondRun.OVERRULED, ["pod-0"]),
        ([YES, NO, YES], 3, YES, SecondRun.CONFIRMED, ["pod-1"]),
        ([LATE, YES, YES], 3, YES, SecondRun.OVERRULED, []),
        ([YES, LATE, YES], 3, YES, SecondRun.CONFIRMED, []),
        ([YES], 1, YES, SecondRun.NO_RUNNER, []),
        ([YES, NO], 2, YES, SecondRun.NO_RUNNER, []),
        ([YES, OURS], 3, YES, SecondRun.NO_RUNNER, []),
        ([YES, QueueFull(1)], 3, YES, SecondRun.NO_RUNNER, []),
        ([YES, NO, OURS], 3, YES, SecondRun.NO_RUNNER, []),
        ([OURS], 3, OURS, None, []),
    ],
)
async def test_the_answer_is_what_two_runners_say(
    kinds: list[VerdictKind | Exception], runners: int, answer: VerdictKind, ended: SecondRun | None, accused: list[str]
) -> None:
    ends: list[SecondRun] = []
    opinions = Opinions(kinds, runners)
    grader = SecondRunnerGrader(opinions, opinions, 1.0, ends.append)
    assert (await grader.grade(SUBMISSION)).kind is answer
    assert (ends, opinions.accused) == ([ended] if ended else [], accused)
    assert len(set(opinions.asked)) == len(opinions.asked), "each time another runner"


@pytest.mark.parametrize("name", ["gvisor", "modal"])
async def test_every_backend_with_runners_is_repeated_also_behind_another(name: str) -> None:
    """`Opinions` stands for the backend as well, because only its runners are asked for."""
    runners, ends = Opinions([YES, NO, NO]), list[SecondRun]()
    runners.name = name
    local: list[Any] = [FakeSandbox()]
    backends: list[Any] = [*local, runners]
    grader = with_second_runner(runners, backends, 1.0, ends.append)
    assert (await grader.grade(SUBMISSION)).kind is NO
    assert (ends, runners.accused) == ([SecondRun.OVERRULED], ["pod-0"])
    assert with_second_runner(runners, local, 1.0, ends.append) is runners


async def test_runners_of_two_backends_overrule_each_other() -> None:
    one, other = Opinions([YES, NO, NO], runners=2), Opinions([], runners=0)
    other.has_other = lambda avoided: True  # type: ignore[method-assign]
    one._names += ["modal-0"]
    backends: list[Any] = [one, other]
    grader = with_second_runner(one, backends, 1.0, lambda _: None)
    assert (await grader.grade(SUBMISSION)).kind is NO
    assert one.asked == ["pod-0", "pod-1", "modal-0"]
    assert one.accused == other.accused == ["pod-0"]


async def test_one_runner_a_minute_is_accused_because_programs_can_print_what_they_like() -> None:
    now_s = 1000.0
    opinions = Opinions([YES, NO, NO] * 3)
    grader = SecondRunnerGrader(opinions, opinions, 1.0, lambda _: None, clock=lambda: now_s)
    for _ in range(2):
        await grader.grade(SUBMISSION)
    assert opinions.accused == ["pod-0"]
    now_s += ACCUSE_EVERY_S
    await grader.grade(SUBMISSION)
    assert opinions.accused == ["pod-0", "pod-0"]


async def test_only_the_configured_share_is_repeated() -> None:
    opinions = Opinions([YES] * 4000)
    grader = SecondRunnerGrader(opinions, opinions, 0.0, lambda _: None)
    for _ in range(100):
        await grader.grade(SUBMISSION)
    assert len(opinions.asked) == 100
    grader = SecondRunnerGrader(opinions, opinions, 0.25, lambda _: None)
    for _ in range(1000):
        await grader.grade(SUBMISSION)
    assert 1150 < len(opinions.asked) - 100 < 1350  # 1250, and 7 standard deviations


class LocalLink(ProcessLink):
    """A harness on this host in place of a pod's. The lying one changes what programs print."""

    closed: Callable[[LinkEnding], Awaitable[None]] | None = None
    lies = False

    async def close(self, ending: LinkEnding) -> None:
        await super().close(ending)
        if self.closed is not None:
            await self.closed(ending)

    def begin_to_lie(self) -> None:
        honest = self.reader.readexactly

        async def lying(n: int) -> bytes:
            return (await honest(n)).replace(b"truth", b"a lie")

        self.reader.readexactly = lying  # type: ignore[method-assign]


async def until_two_are_ready(sandbox: GvisorSandbox) -> None:
    """Wait until the pool has two proven runners that no slot has."""
    async with asyncio.timeout(60):
        while (first := sandbox.pool.ready_beside(frozenset())) is None or (
            sandbox.pool.ready_beside(frozenset({first.name})) is None
        ):
            await asyncio.sleep(0.01)


async def test_a_lying_runner_is_overruled_quarantined_and_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def connected(
        launch: RunnerLaunch, runner: Runner, want: str, closed: Callable[[LinkEnding], Awaitable[None]] | None = None
    ) -> LocalLink:
        config = SandboxConfig()
        settings = _slot_settings(config, int(runner.name.removeprefix("pod-")))
        started = await ProcessLink.start(
            [*python_command(interpreter(config), HARNESS / "__main__.py"), settings.to_json()]
        )
        link = LocalLink(started._process, started._end)
        started._log_task.cancel()
        link.closed = closed
        if runner.name == "pod-1":
            link.begin_to_lie()
        return link

    pods = Pods()
    monkeypatch.setattr(gvisor, "open_source", lambda config, key: pods)
    monkeypatch.setattr(RunnerLaunch, "_connect", connected)
    (tmp_path / "key").write_text("0123456789abcdef")
    pool = PoolConfig(key_file=str(tmp_path / "key"), spares=2, start_s=60.0)
    sandbox = GvisorSandbox(SandboxConfig(backend="gvisor", slots=1, pool=pool))
    try:
        await sandbox.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    ends: list[SecondRun] = []
    try:
        grader = SecondRunnerGrader(
            Grader(sandbox, VerifierMetrics(CollectorRegistry())), sandbox, 1.0, ends.append, clock=lambda: 1e9
        )
        for _ in range(6):
            await until_two_are_ready(sandbox)  # one contradicts, another one decides
            assert (await grader.grade(SUBMISSION)).kind is YES
        assert pods.quarantined == ["pod-1"]
        assert sandbox.replacements[Replaced.SECOND_RUNNER] == 1
        assert set(ends) <= {SecondRun.OVERRULED, SecondRun.CONFIRMED, SecondRun.AGREED, SecondRun.NO_RUNNER}
        assert len([end for end in ends if end in (SecondRun.OVERRULED, SecondRun.CONFIRMED)]) == 1
    finally:
        await sandbox.close()
