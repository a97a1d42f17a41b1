"""The real KEDA follows the chart's ScaledObject: a burst adds verifiers, and they go when it is over."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import pytest
from tests.cluster import keda
from tests.cluster.conftest import CHART, NAME, Release

from nouscoder.client import AsyncClient

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(1800)]

POOL = {"size": 2, "spares": 0}
SCALING = {
    "kind": "keda",
    "min": 1,
    "max": 3,
    "cooldownSeconds": 20,
    "keda": {"prometheus": os.environ.get("NOUSCODER_PROMETHEUS", "http://10.244.0.1:9090"), "pollSeconds": 5},
}
TESTS = {"type": "stdin", "cases": [{"input": "4", "output": "8"}]}
NUM_CLIENTS = 16
SLEEPS = "import time\ntime.sleep(4)\nprint(2 * int(input()))"


def ready(release: Release) -> int:
    """The verifiers that are ready."""
    return sum(pod.ready for pod in release.pods() if pod.component == "verifier")


async def test_a_burst_adds_verifiers_and_they_leave_after_it(release: Release, tmp_path: Path) -> None:
    with keda.running(tmp_path):
        values = {"verifier.sandbox.pool": POOL, "verifier.autoscaling": SCALING}
        words = (word for key, value in values.items() for word in ("--set-json", f"{key}={json.dumps(value)}"))
        release.install("-f", str(CHART / "values-verifier.yaml"), *words)
        release.until(lambda: release.all_ready({"verifier", "sandbox"}), "the verifier is ready", 300)
        assert ready(release) == 1
        verdicts: list[str] = []
        begun_s, peak, second_s = time.monotonic(), 1, 0.0
        with release.forward(f"svc/{NAME}-verifier", 8080) as port:
            token = release.secret(f"{NAME}-verifier-tokens", "token")
            async with AsyncClient(f"http://127.0.0.1:{port}", token=token) as client:

                async def grade(number: int) -> None:
                    count = 0
                    while not second_s and time.monotonic() - begun_s < 600:
                        answer = await client.grade(code=f"{SLEEPS}  # {number} {count}", tests=TESTS)
                        verdicts.append(answer["verdict"])
                        count += 1

                working = [asyncio.create_task(grade(number)) for number in range(NUM_CLIENTS)]
                while not second_s and not all(task.done() for task in working):
                    peak = max(peak, await asyncio.to_thread(ready, release))
                    second_s = time.monotonic() - begun_s if peak > 1 else 0.0
                await asyncio.gather(*working)
        over_s = time.monotonic()
        release.until(lambda: ready(release) == 1, "the added verifiers are gone", 420)
        print(
            f"\n{peak} verifiers ready {second_s:.0f} s after the burst began, one {time.monotonic() - over_s:.0f} s"
            f" after its end; {len(verdicts)} verdicts"
        )
        release.helm("uninstall", NAME, "--wait")
        assert peak > 1
        assert set(verdicts) == {"accepted"}
