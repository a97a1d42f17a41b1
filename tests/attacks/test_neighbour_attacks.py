"""Hostile programs in one slot change no verdict of honest programs in the other, and delay them by a bounded time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from nouscoder.config import SandboxSection
from nouscoder.domain.submission import Limits, StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import SandboxUnavailable, open_sandbox

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.alone]
TESTS = StdinTests((StdinCase("41\n", "42"),))
HONEST = """import time
number = int(input())
while time.process_time() < 0.2: pass
print(number + 1)  # {number}
"""
NEIGHBOURS = {
    "sixty sessions that spin": (
        "import os\nfor _ in range(60):\n    if os.fork() == 0:\n        os.setsid()\n        break\n"
        "while True: pass\n",
        Limits(3.0, 3.0, 256 << 20, processes=64),
    ),
    "threads that spin": (
        "import threading\ndef spin():\n    while True: pass\n"
        "for _ in range(30): threading.Thread(target=spin).start()\n",
        Limits(3.0, 100.0, 256 << 20, processes=64),
    ),
    "a sleeper just beyond its limit": ("import time\ntime.sleep(1.05)\n", Limits(1.0, 1.0, 256 << 20)),
    "signals without end": (
        "import os, signal\nsignal.signal(signal.SIGUSR1, lambda *a: None)\nfor _ in range(8):\n"
        "    if os.fork() == 0: break\nwhile True: os.kill(0, signal.SIGUSR1)\n",
        Limits(3.0, 3.0, 256 << 20),
    ),
    "system calls without end": (
        "import os\nfor _ in range(12):\n    if os.fork() == 0: break\nwhile True:\n"
        "    os.close(os.open('/tmp/x', os.O_CREAT | os.O_WRONLY)); os.rename('/tmp/x', '/tmp/y')\n",
        Limits(3.0, 3.0, 256 << 20),
    ),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def grader() -> AsyncIterator[Grader]:
    sandbox = open_sandbox(SandboxSection(slots=2))
    try:
        await sandbox.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield Grader(sandbox, VerifierMetrics(CollectorRegistry()))
    await sandbox.close()


@pytest.mark.heavy
@pytest.mark.parametrize("name", NEIGHBOURS)
async def test_a_neighbour_changes_no_verdict(grader: Grader, name: str) -> None:
    """The honest program needs 0.2 s of CPU time. It may take six times as long as without a neighbour; as a share of
    the CPUs among sixty processes it would get less than a tenth of that.
    """
    code, limits = NEIGHBOURS[name]
    patient = Limits(60.0, 60.0, 256 << 20)
    alone = await grader.grade(Submission(TESTS, HONEST.format(number=-1), limits=patient))
    limit_s = max(1.0, 6 * alone.tests[0].wall_time_s)
    print(f"{name}: alone {alone.tests[0].wall_time_s:.2f} s, limit {limit_s:.2f} s")

    async def disturb() -> None:
        while True:
            verdict = await grader.grade(Submission(TESTS, code, limits=limits))
            assert verdict.kind not in (VerdictKind.ACCEPTED, VerdictKind.INTERNAL_ERROR), verdict

    disturbing = asyncio.create_task(disturb())
    try:
        for number in range(4):
            async with asyncio.timeout(120):
                verdict = await grader.grade(
                    Submission(TESTS, HONEST.format(number=number), limits=Limits(limit_s, 10.0, 256 << 20))
                )
            assert verdict.kind is VerdictKind.ACCEPTED, verdict
        assert not disturbing.done()
    finally:
        disturbing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await disturbing
