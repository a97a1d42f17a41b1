"""A finished run goes on with more batches of an upgrade, and over a Redis whose file a power cut has damaged."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.cluster.conftest import CHART, NAME, SMALL_RUN

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(2400)]

BATCHES = (4, 60)


def test_more_batches_continue_a_finished_run_also_while_the_end_of_redis_file_is_damaged(release: Any) -> None:
    def summary() -> dict[str, Any]:
        return dict(json.loads(release.run_file("summary.json") or "{}"))

    def trains(batches: int) -> tuple[str, str]:
        return ("--set", f"config.run.total_batches={batches}")

    release.install(*trains(BATCHES[0]), *(word for value in SMALL_RUN for word in ("--set-json", value)))
    first = release.until(summary, "the run ends", 900)
    assert first["ledger"]["trained"] == 64 * BATCHES[0]

    release.helm("upgrade", NAME, str(CHART), "--reset-then-reuse-values", *trains(BATCHES[1]))
    release.until(lambda: release.step() > BATCHES[0], "a further batch", 600)
    (line,) = release.run_file("config_history.jsonl").splitlines()
    assert json.loads(line)["changes"] == {"run.total_batches": list(BATCHES)}

    in_redis = ("exec", f"{NAME}-redis-0", "-c", "redis", "--", "sh", "-c")
    damage = "f=$(ls /data/appendonlydir/*.incr.aof | tail -1); head -c 4096 /dev/zero >> $f"
    release.kubectl(*in_redis, damage)
    old = release.pod("redis")
    release.kubectl("delete", "pod", old.name, "--wait=false", "--grace-period=0", "--force", limit_s=120)
    release.until(
        lambda: any(pod.uid != old.uid and pod.ready for pod in release.pods_of("redis")), "a new Redis is ready", 120
    )
    assert release.pod("redis").num_restarts <= 1, "the first start finds the damage"
    assert "appendonlydir" in release.kubectl(*in_redis, "ls -d /data/damaged /data/appendonlydir")
    step = release.step()
    last = release.until(summary, "the continued run ends", 1200)
    # Back to fewer batches than are trained: the run stays finished, and no pod fails.
    old = {pod.component: pod.uid for pod in release.pods()}
    release.helm("rollback", NAME, "1")
    parts = {"redis", "broker", "verifier", "generation", "learner"}
    release.until(
        lambda: release.all_ready(parts) and release.pod("learner").uid != old["learner"], "every pod is back", 300
    )
    assert sum(pod.num_restarts for pod in release.pods() if pod.component in ("broker", "generation", "learner")) == 0
    assert summary()["ledger"]["trained"] == 64 * BATCHES[1]
    print(f"\nRedis came back at batch {step}; {last['ledger']}")
    assert last["balanced"]
    assert last["ledger"]["trained"] == 64 * BATCHES[1]
