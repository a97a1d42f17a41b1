"""The pool's key changes on a cluster while submissions run: no verdict is lost or wrong, all runners are replaced."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from pathlib import Path
from typing import Any

import pytest

from nouscoder.client import AsyncClient

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

VALUES = Path(__file__).parents[2] / "helm" / "nouscoder" / "values-verifier.yaml"
SECRET = "nouscoder-sandbox-key"
TESTS = {"type": "stdin", "cases": [{"input": "4", "output": "8"}]}
PROGRAMS = {"accepted": "print(2 * int(input()))", "wrong_answer": "print(3 * int(input()))"}
LIMIT_S = 420


async def test_a_changed_key_of_the_pool_loses_no_verdict(release: Any) -> None:
    release.install("-f", str(VALUES))
    release.until(lambda: release.all_ready({"verifier", "sandbox"}), "the verifier is ready", 300)
    before = {pod.name for pod in release.pods() if pod.component == "sandbox"}
    verifier = release.pod("verifier")
    key = base64.b64encode(secrets.token_hex(24).encode()).decode()
    patch = json.dumps({"data": {"key": key}})
    release.kubectl("patch", "secret", SECRET, "-p", patch)
    release.kubectl("patch", "secret", SECRET, "-n", release.runners, "-p", patch)
    changed_s, done, pods = time.monotonic(), 0, release.pods()

    def is_over() -> bool:
        names = {pod.name for pod in pods if pod.component == "sandbox" and pod.ready}
        return (not names & before and len(names) >= 3) or time.monotonic() - changed_s > LIMIT_S

    with release.forward("svc/nouscoder-verifier", 8080) as port:
        token = release.secret("nouscoder-verifier-tokens", "token")
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
                    pods = await asyncio.to_thread(release.pods)
                    await asyncio.sleep(1)

            await asyncio.gather(look(), *(grade(number) for number in range(3)))
    passed_s = time.monotonic() - changed_s
    print(f"{done} right verdicts until all runners had the new key, {passed_s:.0f} s after its change")
    assert not {pod.name for pod in pods if pod.component == "sandbox"} & before, release.picture()
    assert release.pod("verifier").name == verifier.name
    assert done > 0
