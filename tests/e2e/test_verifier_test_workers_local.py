"""One submission on an idle machine, in real sandboxes: its tests run on all slots, isolated from each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from nouscoder.config import SandboxSection
from nouscoder.domain.submission import CheckerTests, JudgeProgram, Limits, StdinCase, StdinTests, Submission, Tests
from nouscoder.domain.verdict import TestOutcome, VerdictKind
from nouscoder.verifier.grading.grader import Grader, GradingPolicy
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import open_sandbox

NUM_TESTS = 24
CASES = tuple(StdinCase(f"{index:02d}", str(index * index)) for index in range(NUM_TESTS))
# Uses CPU for a short time, and gives a wrong answer if an earlier test has left a file.
CODE = """
import os, time
number, clean = int(input()), not os.path.exists("/tmp/left")
open("/tmp/left", "w").close()
end = time.process_time() + 0.01
while time.process_time() < end: pass
print(number * number if clean and number != {wrong} else "no")
"""
CHECKER = JudgeProgram(
    "import sys\nsys.exit(open(sys.argv[2]).read().split() != open(sys.argv[3]).read().split())", "python"
)


@asynccontextmanager
async def local_grader() -> AsyncIterator[tuple[Grader, CollectorRegistry]]:
    """A grader with two slots, whatever the machine has."""
    sandbox, registry = open_sandbox(SandboxSection(backend="local", slots=2)), CollectorRegistry()
    await sandbox.start()
    try:
        yield Grader(sandbox, VerifierMetrics(registry), policy=GradingPolicy(min_worker_left_s=0.0)), registry
    finally:
        await sandbox.close()
        await asyncio.sleep(0.1)  # lets the pipes of the slots' processes close before the loop does


def submission(tests: Tests, wrong: int) -> Submission:
    return Submission(tests, CODE.replace("{wrong}", str(wrong)), limits=Limits(memory_bytes=1 << 30))


@pytest.mark.parametrize("tests", [StdinTests(CASES), CheckerTests(CASES, CHECKER)])
async def test_two_slots_give_the_verdict_of_one_and_both_stay_usable(
    tests: Tests, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine the measured opening time could make a second worker look too expensive.
    monkeypatch.setattr("nouscoder.verifier.grading.case_workers.MIN_LEFT_PER_OPENING", 0.0)
    async with local_grader() as (grader, registry):
        for wrong in (-1, 7, 0):
            reported: list[TestOutcome] = []
            verdict = await grader.grade(submission(tests, wrong), reported.append)
            graded = NUM_TESTS if wrong < 0 else wrong + 1
            kind = VerdictKind.ACCEPTED if wrong < 0 else VerdictKind.WRONG_ANSWER
            assert (verdict.kind, verdict.graded, verdict.total) == (kind, graded, NUM_TESTS), verdict
            assert [one.index for one in reported] == list(range(graded))
        assert registry.get_sample_value("nouscoder_verifier_extra_lanes_total") == 2, "none for the last submission"
        assert grader.unfinished == 0
