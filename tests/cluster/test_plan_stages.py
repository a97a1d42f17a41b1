"""A plan of three stages in one release. In each stage the broker, generation and the learner lose their pod."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.conftest import SMALL_RUN

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(3600)]

STAGES = ("01-short", "02-long", "03-measured")
BATCHES = (4, 4, 0)
KILLED = ("broker", "generation", "learner")
# Another context and another temperature than in the training.
EVALUATION = {"samples": 16, "temperature": 0.6, "top_p": 0.95, "max_tokens_total": 224, "max_new_tokens": 96}
PLAN = {
    "config": {
        "run": {"total_batches": BATCHES[0]},
        "evaluation": {"every_batches": 2, **EVALUATION},
        "plan": {
            "stages": [
                {"name": "short"},
                {
                    "name": "long",
                    "from": "best",
                    "set": {"generation": {"max_tokens_total": 192, "sampling": {"max_new_tokens": 80}}},
                },
                {
                    "name": "measured",
                    "from": "best",
                    "set": {"run": {"total_batches": 0}},
                },
            ]
        },
    }
}


def test_one_release_runs_the_stages_of_a_plan_with_pods_lost_in_each(release: Any, tmp_path: Path) -> None:
    values = tmp_path / "plan.json"
    values.write_text(json.dumps(PLAN))
    small = [value for value in SMALL_RUN if not value.startswith("config.evaluation.")]
    release.install("-f", str(values), *(word for value in small for word in ("--set-json", value)))
    for stage in STAGES:
        release.until(lambda name=stage: release.run_file(f"{name}/config.toml"), f"{stage} begins", 1200)
        for component in KILLED:
            pod = release.pod(component)
            release.kubectl("delete", "pod", pod.name, "--wait=false", "--grace-period=0", "--force", limit_s=120)
            release.until(
                lambda uid=pod.uid: uid not in {one.uid for one in release.pods()}, f"{pod.name} is gone", 120
            )
            release.until(lambda name=component: release.pods_of(name), f"a new pod of {component}", 120)
    summaries = [
        json.loads(release.until(lambda name=stage: release.run_file(f"{name}/summary.json"), f"{stage} ends", 1800))
        for stage in STAGES
    ]
    assert [summary["ledger"]["trained"] for summary in summaries] == [64 * batches for batches in BATCHES]
    assert all(summary["balanced"] for summary in summaries)
    record = json.loads(release.until(lambda: _finished(release), "the plan is finished", 300))
    best = [stage["pass_at_1_best"] for stage in record["stages"]]
    print(json.dumps(record))
    for stage, later in pairwise(STAGES):
        begun = json.loads(release.run_file(f"{later}/evaluation_before.json"))
        assert begun["policy_version"] == 0, f"{later} measures its own first policy, which came from {stage}"
    assert best[0] >= record["stages"][0]["pass_at_1_first"]
    for stage in STAGES:
        measured = json.loads(release.run_file(f"{stage}/evaluation_before.json"))
        assert EVALUATION.items() <= {**measured["sampling"], "samples": samples_of(measured)}.items()
    assert release.pod("verifier").num_restarts == 0, "the verifier serves all stages"


def samples_of(evaluation: dict[str, Any]) -> int:
    """The number of samples, which is the same for each problem."""
    (number,) = {problem["sampled"] for problem in evaluation["problems"]}
    return int(number)


def _finished(release: Any) -> str:
    text: str = release.run_file("plan.json")
    return text if text and all(stage["finished"] for stage in json.loads(text)["stages"]) else ""
