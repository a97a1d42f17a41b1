"""The pool's key changes on a cluster while submissions run: no verdict is lost or wrong, all runners are replaced."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from typing import Any

import pytest

from nouscoder.client import AsyncClient

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

SECRET = "nouscoder-sandbox-key"
TESTS = {"type": "stdin", "cases": [{"input": "4", "output": "8"}]}
PROGRAMS = {"accepted": "print(2 * int(input()))", "wrong_answer": "print(3 * int(input()))"}
LIMIT_S = 420


async def test_a_changed_key_of_the_pool_loses_no_verdict(grader: Any) -> None:
    before = {pod.name for pod in grader.pods() if pod.component == "sandbox"}
    verifier = grader.pod("verifier")
    key = base64.b64encode(secrets.token_hex(24).encode()).decode()
    patch = json.dumps({"data": {"key": key}})
    grader.kubectl("patch", "secret", SECRET, "-p", patch)
    grader.kubectl("patch", "secret", SECRET, "-n", grader.runners, "-p", patch)
    changed_s, done, pods = time.monotonic(), 0, grader.pods()

    def is_over() -> bool:
        names = {pod.name for pod in pods if pod.component == "sandbox" and pod.ready}
        return (not names & before and len(names) >= 3) or time.monotonic() - changed_s > LIMIT_S

    with grader.forward("svc/nouscoder-verifier", 8080) as port:
        token = grader.secret("nouscoder-verifier-tokens", "token")
        async with AsyncClient(f"http://127.0.0.1:{port}", token=token) as client:

            async def grade(number: int) -> None:
                nonlocal done
                while not is_over():
                    for verdict, code in PROGRAMS.items():
                        answer = await client.grade(code=f"{code}  # {number} {done}", tests=TESTS)
                        assert answer["verdict"] == verdict, answer
                        done += 1

            async def look() -> None:
                nonlocal pods
                while not is_over():
                    pods = await asyncio.to_thread(grader.pods)
                    await asyncio.sleep(1)

            await asyncio.gather(look(), *(grade(number) for number in range(3)))
    passed_s = time.monotonic() - changed_s
    print(f"{done} right verdicts until all runners had the new key, {passed_s:.0f} s after its change")
    assert not {pod.name for pod in pods if pod.component == "sandbox"} & before, grader.picture()
    assert grader.pod("verifier").name == verifier.name
    assert done > 0
