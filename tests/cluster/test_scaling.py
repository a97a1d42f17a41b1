"""Scaling on a cluster with real load: runners and verifiers from zero and back.

The figures are printed: time to the first verdict from zero, the highest number of pods, and verdicts lost. KEDA is not
on the test cluster: a stand-in follows the chart's ScaledObject.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from tests.cluster.conftest import CHART, NAME, SMALL_RUN, Release, installed_release
from tests.cluster.keda_stand_in import KedaStandIn

from nouscoder.client import AsyncClient

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

VERIFIER = f"{NAME}-verifier"
TESTS = {"type": "stdin", "cases": [{"input": "4", "output": "8"}]}
PROGRAMS = {"accepted": "print(2 * int(input()))", "wrong_answer": "print(3 * int(input()))"}
IDLE_S = 20
FEW, BURST = 4, 40
POOL = {"size": 3, "min": 0, "idleSeconds": IDLE_S, "spares": 1}


@pytest.fixture
def graded() -> Iterator[Release]:
    """The grading API alone, with a pool by demand."""
    with installed_release() as release:
        values = ("-f", str(CHART / "values-verifier.yaml"), "--set-json", f"verifier.sandbox.pool={json.dumps(POOL)}")
        release.install(*values)
        release.until(lambda: release.all_ready({"verifier"}), "the verifier is ready", 300)
        yield release


def runners(release: Any) -> list[Any]:
    return [pod for pod in release.pods() if pod.component == "sandbox" and not pod.ended]


def verifiers(release: Any) -> list[Any]:
    return [pod for pod in release.pods() if pod.component == "verifier"]


async def grade(client: AsyncClient, number: int, name: str) -> Counter[str]:
    """Verdicts by kind; those that differ from the expected one are `wrong`."""

    async def one(index: int) -> str:
        expected = list(PROGRAMS)[index % len(PROGRAMS)]
        code = f"import time\ntime.sleep(1)\n{PROGRAMS[expected]}  # {name} {index}"
        answer = await client.grade(code=code, tests=TESTS)
        return expected if answer["verdict"] == expected else f"wrong: {answer['verdict']}"

    return Counter(await asyncio.gather(*(one(index) for index in range(number))))


async def test_runners_from_zero_through_a_tenfold_burst_and_back_to_zero(graded: Any) -> None:
    graded.until(lambda: not runners(graded), "no runner is left", 240)
    token = graded.secret("nouscoder-verifier-tokens", "token")
    seen: list[int] = []

    async def watch() -> None:
        while True:
            seen.append(len(await asyncio.to_thread(runners, graded)))
            await asyncio.sleep(0.5)

    with graded.forward("svc/nouscoder-verifier", 8080) as port:
        async with AsyncClient(f"http://127.0.0.1:{port}", token=token) as client:
            watching = asyncio.create_task(watch())
            began_s = time.monotonic()
            assert await grade(client, 1, "first") == {"accepted": 1}
            first_s = time.monotonic() - began_s
            few = await grade(client, FEW, "few")
            began_s = time.monotonic()
            many = await grade(client, BURST, "burst")
            burst_s = time.monotonic() - began_s
            watching.cancel()
    idle_s = time.monotonic()
    graded.until(lambda: not runners(graded), "no runner is left after the burst", 240)
    got = few + many
    print(
        f"\nfirst verdict from zero after {first_s:.1f} s; {FEW} and then {BURST} submissions of 1 s, these in"
        f" {burst_s:.1f} s; at most {max(seen)} runners; none {time.monotonic() - idle_s:.0f} s after the last verdict;"
        f" verdicts lost: {FEW + BURST - got['accepted'] - got['wrong_answer']}"
    )
    assert got == {"accepted": (FEW + BURST) // 2, "wrong_answer": (FEW + BURST) // 2}
    assert max(seen) <= POOL["size"] + POOL["spares"]


BATCHES = 20
SMALL = (
    f"config.run.total_batches={BATCHES}",
    *SMALL_RUN,
    "verifier.sandbox.pool.min=0",
    f"verifier.sandbox.pool.idleSeconds={IDLE_S}",
)
SCALING = {
    "kind": "keda",
    "min": 0,
    "max": 3,
    "cooldownSeconds": 30,
    "keda": {"prometheus": os.environ.get("NOUSCODER_PROMETHEUS", "http://10.244.0.1:9090")},
}


def scaled_object(release: Any) -> dict[str, Any]:
    """The object of the chart for this release; the cluster needs no KEDA for it."""
    shown = "templates/verifier/verifier-scaledobject.yaml"
    words = ("--set-json", f"verifier.autoscaling={json.dumps(SCALING)}", "--show-only", shown)
    spec = yaml.safe_load(release.helm("template", NAME, str(CHART), *words))["spec"]
    assert isinstance(spec, dict)
    return spec


def test_a_run_from_zero_verifiers_and_back_to_zero(release: Release) -> None:
    release.install(*(word for value in SMALL for word in ("--set-json", value)))
    release.kubectl("scale", "deployment", VERIFIER, "--replicas=0")
    release.until(lambda: not verifiers(release), "no verifier is left", 120)
    stand_in = KedaStandIn(
        scaled_object(release), lambda n: release.kubectl("scale", "deployment", VERIFIER, f"--replicas={n}"), 0
    )
    stand_in.start()
    try:
        release.until(lambda: release.status().get("rollouts_graded", 0) > 0, "the first rollout is graded", 600)
        woken_s = next(at for at, pods in stand_in.history if pods)
        print(f"\nfirst rollouts graded {time.monotonic() - woken_s:.0f} s after the first verifier was asked for")
        summary = json.loads(release.until(lambda: release.run_file("summary.json"), "the run ends", 900, every_s=5))
        release.until(lambda: not verifiers(release) and not runners(release), "back to zero", 300)
        peak = max(pods for _, pods in stand_in.history)
        status = release.until(release.status, "the broker answers", 120)
        lost = summary["ledger"]["lost"] + sum(one["dead_letters"] for one in status["streams"])
        print(
            f"at most {peak} verifiers; verdicts lost: {lost}; {status['rollouts_graded']} given; {summary['ledger']}"
        )
        assert summary["balanced"]
        assert summary["ledger"]["trained"] == BATCHES * 64
        assert lost == 0  # those in flight at the end of the run are abandoned
        assert summary["pass_at_1_after"] >= 0, "the evaluation after training got its verdicts, too"
    finally:
        stand_in.stop()
