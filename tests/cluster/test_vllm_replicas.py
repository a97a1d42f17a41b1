"""Two generation pods with the engine vLLM, on CPUs, make the rollouts of a small run.

Both sample, both take every new policy in flight, the run completes and its ledger balances. The image is that of
`make images ACCELERATOR=cpu NAMES=vllm`; NOUSCODER_IMAGE_TAG says that the cluster has it.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from tests.cluster.conftest import ROOT, SMALL_RUN, TAG, output_of

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(3600)]

BATCHES = 20
ROLLOUTS_A_BATCH = 64
VALUES = (
    f"config.run.total_batches={BATCHES}",
    *SMALL_RUN,
    "generation.replicas=2",
    'generation.image.repository="nouscoder-vllm"',
    'generation.resources={"requests":{"cpu":"200m","memory":"1Gi"},"limits":{"memory":"5Gi"}}',
    'config.generation.engine="vllm"',
    'config.generation.vllm={"enforce_eager":true,"dtype":"float32","kv_cache_memory_bytes":268435456}',
)


@pytest.fixture(scope="module")
def image() -> None:
    """The image of vLLM for CPUs."""
    if not TAG:
        print("\n" + output_of(str(ROOT / "deploy/images/build"), "--accelerator", "cpu", "vllm", limit_s=1800))


@pytest.mark.usefixtures("image")
def test_two_pods_of_vllm_sample_a_run_and_take_its_policies(release: Any) -> None:
    began = time.monotonic()
    release.install(*(word for value in VALUES for word in ("--set-json", value)))
    release.until(lambda: release.step() >= 1, "the run has begun", 1200)
    print(f"\nfirst batch {time.monotonic() - began:.0f} s after the installation")
    release.until(lambda: release.step() >= BATCHES - 5, "the run has nearly ended", 2000)
    names = sorted(pod.name for pod in release.pods_of("generation"))
    assert len(names) == 2
    seen = {name: release.generation_metrics(name) for name in names}
    for name, figure in seen.items():
        print(f"{name}: {figure['tokens_total']:.0f} tokens, policy {figure['policy_version']:.0f}")
    summary = json.loads(release.until(lambda: release.run_file("summary.json"), "the run ends", 1200, every_s=5))
    print(summary)
    assert min(figure["tokens_total"] for figure in seen.values()) > 0
    assert min(figure["policy_version"] for figure in seen.values()) >= BATCHES - 5
    assert all(pod.num_restarts == 0 for pod in release.pods_of("generation"))
    assert summary["balanced"]
    assert summary["ledger"]["lost"] == 0
    assert summary["ledger"]["trained"] == BATCHES * ROLLOUTS_A_BATCH
