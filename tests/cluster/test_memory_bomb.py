"""Programs that use up the memory of their runner pod exceed their memory limit, and are no internal error."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cluster.pod_grader import pod_grader

from nouscoder.config import SandboxSection
from nouscoder.domain.submission import Limits, StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.sandbox.runners.pool import Replaced

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(900)]

POD_LIMIT = "512Mi"
IN_LIMIT, OVER_POD = 256 << 20, 4 << 30  # a program with the second limit meets that of the pod first
IN_FILES = """
import time
for number in range(200):
    with open(f"/tmp/{number}", "wb") as file: file.write(b"x" * (1 << 20))
kept = [bytearray(b"x" * (1 << 20)) for _ in range(200)]
time.sleep(600)
"""
IN_HEAP = "kept = []\nwhile True: kept.append(bytearray(b'x' * (1 << 22)))"
HONEST = Submission(StdinTests((StdinCase("41", "42"),)), "print(int(input()) + 1)", limits=Limits(60.0, 60.0))


@pytest.mark.parametrize(
    ("code", "memory_bytes", "kills_pods"),
    [(IN_FILES, IN_LIMIT, False), (IN_HEAP, IN_LIMIT, False), (IN_HEAP, OVER_POD, True)],
    ids=["files and heap", "heap", "beyond the limit of the pod"],
)
async def test_a_memory_bomb_exceeds_its_limit_and_the_next_submission_is_graded(
    runner_pool: SandboxSection, tmp_path: Path, code: str, memory_bytes: int, kills_pods: bool
) -> None:
    resources = {"requests": {"memory": "128Mi"}, "limits": {"memory": POD_LIMIT}}
    pool = runner_pool.model_copy(update={"pool_spares": 1})
    async with pod_grader(pool, tmp_path, {"resources": resources}) as (grader, sandbox):
        tests = StdinTests((StdinCase("", ""), StdinCase("", "")))
        limits = Limits(60.0, 60.0, memory_bytes, 1 << 20)
        verdict = await grader.grade(Submission(tests, code, limits=limits, stop_on_first_failure=False))
        print(verdict, sandbox.use.replacements)
        assert verdict.kind is VerdictKind.MEMORY_LIMIT_EXCEEDED, verdict
        assert verdict.graded == (0 if kills_pods else 2)
        replaced = sandbox.pool.replaced
        assert (replaced[Replaced.LOST] + replaced[Replaced.SILENT] >= 2) is kills_pods
        assert (await grader.grade(HONEST)).kind is VerdictKind.ACCEPTED
