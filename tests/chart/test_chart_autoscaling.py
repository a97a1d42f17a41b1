"""Autoscaling of the verifier: objects, their queries, and what an upgrade must not do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helm_python as helm
import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry
from tests.chart.conftest import merged

from nouscoder.broker.metrics import BrokerCollector
from nouscoder.domain.run_status import Ledger, RunStatus, StreamStatus
from nouscoder.generation.metrics import GenerationMetrics
from nouscoder.verifier.observe.metrics import VerifierMetrics

if TYPE_CHECKING:
    from tests.chart.conftest import ChartRig

ROOT = Path(__file__).parents[2]
OWN = 'namespace="here",app_kubernetes_io_instance="nouscoder"'


def keda(chart: ChartRig, **changed: Any) -> dict[str, Any]:
    """The ScaledObject of the variant, with other values under verifier.autoscaling."""
    values = merged(chart.kept["keda"], {"verifier": {"autoscaling": changed}})
    spec: dict[str, Any] = chart.one("ScaledObject", "nouscoder-verifier", values)["spec"]
    return spec


def queries(spec: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["metadata"]["query"] for one in spec["triggers"]}


@pytest.mark.parametrize("name", ["hpa", "keda"])
def test_an_upgrade_does_not_reset_the_number_of_pods(chart: ChartRig, name: str) -> None:
    spec = chart.one("Deployment", "nouscoder-verifier", chart.kept[name])["spec"]
    assert "replicas" not in spec
    assert chart.one("Deployment", "nouscoder-verifier")["spec"]["replicas"] == 1
    kind = {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}
    target = chart.one(kind[name], "nouscoder-verifier", chart.kept[name])["spec"]["scaleTargetRef"]
    assert target == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "nouscoder-verifier"}


def test_without_autoscaling_there_is_no_object_of_it(chart: ChartRig) -> None:
    kinds = {one["kind"] for one in chart.documents()}
    assert not kinds & {"HorizontalPodAutoscaler", "ScaledObject"}


def test_keda_wakes_a_verifier_for_waiting_rollouts_and_for_a_run_in_progress(chart: ChartRig) -> None:
    spec = keda(chart)
    assert (spec["minReplicaCount"], spec["maxReplicaCount"], spec["cooldownPeriod"]) == (0, 8, 300)
    assert spec["fallback"] == {"failureThreshold": 3, "replicas": 1, "behavior": "currentReplicasIfHigher"}
    assert {one["metadata"]["activationThreshold"] for one in spec["triggers"]} == {"0"}
    assert "nouscoder_run_in_progress" in queries(spec)
    assert "nouscoder_run_in_progress" not in queries(keda(chart, min=1))
    asked = {one["name"]: one["metadata"]["ignoreNullValues"] for one in spec["triggers"]}
    assert asked["nouscoder_grading_rollouts"] == "false", "a broker without series is a failure, not an empty queue"
    assert asked["nouscoder_grading_submissions"] == "true", "no verifier has no series"


# Series of a run without a verifier, one sample every 15 s for 5 minutes, and whether one is wanted then.
RUNS = {
    # The evaluation before training sampled all its tokens before the first scrape, and waits for a verifier.
    "waits": (
        {"generation_policy_version": "0x20", "broker_run_finished": "0x20", "generation_tokens_total": "9x20"},
        1,
    ),
    "no policy yet": ({"generation_policy_version": "-1x20", "broker_run_finished": "0x20"}, 0),
    "no generator": ({"broker_run_finished": "0x20"}, 0),
    "finished": (
        {"generation_policy_version": "4x20", "broker_run_finished": "1x20", "generation_tokens_total": "9x20"},
        0,
    ),
    "evaluates after the end": (
        {"generation_policy_version": "4x20", "broker_run_finished": "1x20", "generation_tokens_total": "9x15 80x4"},
        1,
    ),
    "nothing runs": ({}, 0),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is missing: apt-get install prometheus")
def test_a_run_in_progress_keeps_a_verifier_and_a_finished_one_none(chart: ChartRig, name: str, tmp_path: Path) -> None:
    present, wanted = RUNS[name]
    series = [{"series": f"nouscoder_{metric}{{{OWN}}}", "values": values} for metric, values in present.items()]
    query = queries(keda(chart))["nouscoder_run_in_progress"]
    asked = {"expr": query, "eval_time": "5m", "exp_samples": [{"labels": "{}", "value": wanted}]}
    document = {"tests": [{"interval": "15s", "input_series": series, "promql_expr_test": [asked]}]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(document))
    command = ["promtool", "test", "rules", str(tmp_path / "test.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_target_follows_the_slots_of_a_pod(chart: ChartRig) -> None:
    def target(values: dict[str, Any]) -> str:
        spec = chart.one("HorizontalPodAutoscaler", "nouscoder-verifier", merged(chart.kept["hpa"], values))["spec"]
        return str(spec["metrics"][0]["external"]["target"]["averageValue"])

    assert target({}) == "4"
    assert target({"verifier": {"sandbox": {"pool": {"size": 64}}}}) == "128"
    assert target({"verifier": {"autoscaling": {"workPerPod": 30}}}) == "30"


def test_the_grading_api_alone_is_scaled_by_its_own_queue_and_never_to_zero(chart: ChartRig) -> None:
    values = merged(chart.kept["keda"], {"loop": {"enabled": False}})
    with pytest.raises(helm.HelmError, match="nothing would wake a verifier"):
        chart.documents(values)
    alone = merged(values, {"verifier": {"autoscaling": {"min": 1}}})
    spec = chart.one("ScaledObject", "nouscoder-verifier", alone)["spec"]
    assert set(queries(spec)) == {"nouscoder_grading_submissions", "nouscoder_grading_submissions_oldest_seconds"}


def test_every_query_names_series_that_the_services_export(chart: ChartRig) -> None:
    """The names and labels come from the services' own pages."""
    registry = CollectorRegistry()
    VerifierMetrics(registry)
    broker = BrokerCollector()
    streams = (StreamStatus("grading", 0, 0, 0, 0),)
    broker.latest = RunStatus("r", Ledger(0, 0, 0, 0, 0, {}), streams, None, 0, 0, 0, False, 0, 0)
    families = [*broker.collect(), *registry.collect(), *GenerationMetrics().registry.collect()]
    known = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    for query in queries(keda(chart)).values():
        promql_parser.parse(query)
        for name, labels in re.findall(r"(nouscoder_\w+)\{([^}]*)\}", query):
            assert labels.startswith(OWN)
            assert set(re.findall(r"(\w+)=", labels.removeprefix(OWN))) <= known[name], query


def test_the_adapters_rules_in_the_documents_ask_what_keda_asks(chart: ChartRig) -> None:
    """An adapter puts in the namespace and the selector of the HorizontalPodAutoscaler."""
    text = (ROOT / "docs" / "operating.md").read_text("utf8")
    block = re.search(r"```yaml adapter\n(.*?)```", text, re.DOTALL)
    assert block is not None
    rules = {rule["name"]["as"]: rule for rule in yaml.safe_load(block[1])["externalRules"]}
    values = chart.kept["hpa"]
    spec = chart.one("HorizontalPodAutoscaler", "nouscoder-verifier", values)["spec"]
    names = [one["external"]["metric"]["name"] for one in spec["metrics"]]
    assert set(rules) == set(names)
    asked = queries(keda(chart, min=1))
    for name, rule in rules.items():
        assert rule["resources"] == {"overrides": {"namespace": {"resource": "namespace"}}}
        assert rule["metricsQuery"].replace("<<.LabelMatchers>>", OWN) == asked[name]


def test_the_pool_by_demand_is_in_the_configuration(chart: ChartRig) -> None:
    config = json.loads(chart.one("ConfigMap", "nouscoder-config", chart.kept["keda"])["data"]["config.json"])
    assert (config["verifier"]["sandbox"]["pool_min"], config["verifier"]["sandbox"]["pool_idle_s"]) == (0, 120)
    assert "pool_min" not in json.loads(chart.one("ConfigMap", "nouscoder-config")["data"]["config.json"])["verifier"]


def test_a_stopped_verifier_has_time_to_leave_to_finish_and_to_end_its_runners(chart: ChartRig) -> None:
    values = {"config": {"verifier": {"leave_s": 2.5, "drain_s": 60}}}
    pod = chart.one("Deployment", "nouscoder-verifier", values)["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 17 + 3 + 60
    assert "lifecycle" not in pod["containers"][0], "SIGTERM comes at once: the leases go back then"
