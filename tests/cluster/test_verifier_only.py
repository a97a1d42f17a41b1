"""The grading API alone: it grades for clients outside the cluster through a port-forward, and needs a token."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nouscoder.client import AsyncClient
from nouscoder.data.importers.formats import read_referenced
from nouscoder.data.problems import ReferencedProblem
from nouscoder.domain.submission import CallTests

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
LEETCODE = ROOT / "tests" / "data" / "leetcode_200.jsonl.gz"
AT_ONCE = 4


def test_only_the_verifier_is_installed(grader: Any) -> None:
    assert {pod.component for pod in grader.pods()} == {"verifier", "sandbox"}


def test_a_request_without_a_token_gets_401(grader: Any) -> None:
    with grader.forward("svc/nouscoder-verifier", 8080) as port:
        body = json.dumps({"language": "python", "code": "print(1)", "tests": {"type": "stdin", "cases": []}}).encode()
        for header in ({}, {"Authorization": "Bearer wrong"}):
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/grade", body, header)
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=60)
            assert refused.value.code == 401


async def test_a_client_outside_the_cluster_gets_the_verdicts_of_local(grader: Any) -> None:
    """The reference solutions of 200 real problems, all of which a bare Python process accepts."""
    token = grader.secret("nouscoder-verifier-tokens", "token")
    started = time.monotonic()
    with grader.forward("svc/nouscoder-verifier", 8080) as port:
        async with AsyncClient(f"http://127.0.0.1:{port}", token=token) as client:
            slots = asyncio.Semaphore(AT_ONCE)

            async def verdict(item: ReferencedProblem) -> tuple[str, str]:
                tests = item.problem.tests
                assert isinstance(tests, CallTests)
                cases = [{"args": list(c.args), "kwargs": c.kwargs, "expected": c.expected} for c in tests.cases]
                record = {"type": "call", "entry_point": tests.entry_point, "setup": tests.setup, "cases": cases}
                async with slots:
                    answer = await client.grade(code=item.references[0].code, tests=record)
                assert answer["backend"] == "gvisor"
                return item.problem.problem_id, answer["verdict"]

            verdicts = await asyncio.gather(*(verdict(item) for item in read_referenced(LEETCODE)))
    print(Counter(kind for _, kind in verdicts), f"in {time.monotonic() - started:.0f} s")
    assert len(verdicts) == 200
    assert not [each for each in verdicts if each[1] != "accepted"]
