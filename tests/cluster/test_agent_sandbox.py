"""Runners that a gateway claims from a SandboxWarmPool of agent-sandbox, whose real controller runs.

Pods are deleted in mid-run and no verdict is wrong. It prints how long a first runner takes, beside own pods.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from tests.cluster.conftest import CHART, NAME, Release

from nouscoder.client import AsyncClient
from nouscoder.config import SandboxSection
from nouscoder.domain.submission import Limits, StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.runners.pods import GvisorSandbox

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(1800)]

NUM_VERDICTS = 60
TESTS = StdinTests(tuple(StdinCase(f"{number}\n", f"{2 * number}") for number in range(3)))
LIMITS = Limits(wall_time_s=20, cpu_time_s=10, memory_bytes=256 << 20, output_bytes=1 << 16, processes=8)
RIGHT, WRONG = "print(2 * int(input()))", "print(3 * int(input()) + 1)"


def kubectl(*words: str) -> str:
    return subprocess.run(["kubectl", *words], capture_output=True, text=True, timeout=60, check=True).stdout


def claimed(namespace: str) -> dict[str, str]:
    """The pod of each claim."""
    items = json.loads(kubectl("-n", namespace, "get", "sandboxclaims", "-o", "json"))["items"]
    return {one["metadata"]["name"]: one.get("status", {}).get("sandbox", {}).get("name", "") for one in items}


async def started(pool: SandboxSection) -> tuple[GvisorSandbox, float]:
    """A sandbox of the pool, and the seconds until it had its first runner, which passed a canary."""
    sandbox, begun_s = GvisorSandbox(pool), time.monotonic()
    await sandbox.start()
    return sandbox, time.monotonic() - begun_s


async def test_no_verdict_is_wrong_while_claimed_runners_are_deleted(claimed_runner_pool: SandboxSection) -> None:
    namespace = json.loads(Path(claimed_runner_pool.pool_template).read_text())["metadata"]["namespace"]
    sandbox, _ = await started(claimed_runner_pool.model_copy(update={"slots": 2}))
    grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()))
    grader.follow(sandbox)
    deleted: list[str] = []
    try:
        for turn in range(NUM_VERDICTS // 4):
            work = [grader.grade(Submission(TESTS, f"{code}  # {turn}", limits=LIMITS)) for code in (RIGHT, WRONG) * 2]
            grading = asyncio.gather(*work)
            if turn % 5 == 2:
                pods = [pod for pod in (await asyncio.to_thread(claimed, namespace)).values() if pod]
                await asyncio.to_thread(
                    kubectl, "-n", namespace, "delete", "pod", pods[0], "--grace-period=0", "--force"
                )
                deleted.append(pods[0])
            kinds = [verdict.kind for verdict in await grading]
            assert kinds == [VerdictKind.ACCEPTED, VerdictKind.WRONG_ANSWER] * 2, (turn, kinds)
        assert len(deleted) == 3
        assert not set(deleted) & set((await asyncio.to_thread(claimed, namespace)).values())
        print(f"\n{NUM_VERDICTS} verdicts, {len(deleted)} pods deleted, replaced: {sandbox.use.replacements}")
    finally:
        await sandbox.close()
    async with asyncio.timeout(60):  # the claims go with the Lease of the gateway
        while await asyncio.to_thread(claimed, namespace):
            await asyncio.sleep(0.5)


async def test_a_release_grades_with_claims_and_its_verifier_may_make_no_pod(
    claimed_runner_pool: SandboxSection, release: Release
) -> None:
    """Its policy admits the pods that agent-sandbox makes. The controller is that of the other fixture."""
    given = ("-f", str(CHART / "values-verifier.yaml"), "--set", "verifier.sandbox.pool.source=agentSandbox")
    await asyncio.to_thread(release.install, *given)
    wanted = {"verifier", "sandbox"}
    await asyncio.to_thread(release.until, lambda: release.all_ready(wanted), "the verifier is ready", 300)
    with release.forward(f"svc/{NAME}-verifier", 8080) as port:
        token = release.secret(f"{NAME}-verifier-tokens", "token")
        async with AsyncClient(f"http://127.0.0.1:{port}", token=token) as client:
            tests = {"type": "stdin", "cases": [{"input": "4", "output": "8"}]}
            answers = [await client.grade(code=code, tests=tests) for code in (RIGHT, WRONG)]
    assert [answer["verdict"] for answer in answers] == ["accepted", "wrong_answer"]
    account = f"--as=system:serviceaccount:{release.namespace}:{NAME}-verifier"
    for verb, kind, answer in (("create", "pods", "no"), ("create", "sandboxclaims", "yes"), ("delete", "pods", "no")):
        words = ["kubectl", "auth", "can-i", verb, kind, account, "-n", release.runners]
        said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert said.stdout.strip() == answer, (verb, kind, said)


async def test_the_time_to_a_first_runner_is_printed_beside_that_of_own_pods(
    claimed_runner_pool: SandboxSection, runner_pool: SandboxSection
) -> None:
    taken: dict[str, list[float]] = {"warm pool": [], "own pods": []}
    for _ in range(5):
        for name, pool in (("warm pool", claimed_runner_pool), ("own pods", runner_pool)):
            if name == "warm pool":
                namespace = json.loads(Path(pool.pool_template).read_text())["metadata"]["namespace"]
                kubectl("-n", namespace, "wait", "sandbox", "--all", "--for=condition=Ready", "--timeout=120s")
            sandbox, seconds = await started(pool)
            await sandbox.close()
            taken[name].append(seconds)
    print("\nseconds to a runner that has passed its canary:", {name: sorted(found) for name, found in taken.items()})
    assert all(len(found) == 5 for found in taken.values())
