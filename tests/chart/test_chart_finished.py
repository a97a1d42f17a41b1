"""whenFinished and suspend: what goes, by which right, and what no alert says about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import helm_python as helm
import pytest
from tests.chart.conftest import SEVERAL_PODS, merged, pod_specs
from tests.chart.test_chart_alerts import check, firing, series, up

if TYPE_CHECKING:
    from pathlib import Path

    from tests.chart.conftest import ChartRig

RELEASE: dict[str, Any] = {"whenFinished": "release", "ttlSeconds": 600}
OBJECTS = {
    "statefulset": [("apps", "statefulsets", f"nouscoder-{name}") for name in ("learner-worker", "learner")],
    "leaderWorkerSet": [("leaderworkerset.x-k8s.io", "leaderworkersets", "nouscoder-learner-group")],
    "jobSet": [("jobset.x-k8s.io", "jobsets", "nouscoder-learner")],
}
PAGES = ["nouscoder-pages", "nouscoder-pages-again"]


@pytest.mark.parametrize("workload", OBJECTS)
def test_the_role_is_for_exactly_the_objects_of_the_configuration(chart: ChartRig, workload: str) -> None:
    values = merged(RELEASE, {"learner": {"workload": workload, **SEVERAL_PODS}})
    objects = [("apps", "deployments", "nouscoder-generation"), *OBJECTS[workload]]
    scale = {"apiGroups": ["apps"], "resources": ["deployments/scale"], "resourceNames": PAGES, "verbs": ["patch"]}
    assert chart.one("Role", "nouscoder-learner", values)["rules"] == [
        scale,
        *(
            {"apiGroups": [group], "resources": [kind], "resourceNames": [name], "verbs": ["delete"]}
            for group, kind, name in objects
        ),
    ]
    made = {(one["kind"].lower() + "s", one["metadata"]["name"]) for one in chart.documents(values)}
    assert {(kind, name) for _, kind, name in objects} <= made
    versions = {"apps": "v1", "leaderworkerset.x-k8s.io": "v1", "jobset.x-k8s.io": "v1alpha2"}
    release = config(chart, values)["run"]["release"]
    assert release == {
        "delete": [f"/apis/{group}/{versions[group]}/namespaces/here/{kind}/{name}" for group, kind, name in objects],
        "start": [f"/apis/apps/v1/namespaces/here/deployments/{name}" for name in PAGES],
        "after_s": 600,
        "gpus": 0,
    }


def config(chart: ChartRig, values: dict[str, Any]) -> dict[str, Any]:
    text = chart.one("ConfigMap", "nouscoder-config", values)["data"]["config.json"]
    return dict(helm.values_from_yaml(text))


def test_the_gpus_of_the_preset_are_counted(chart: ChartRig) -> None:
    assert config(chart, merged(chart.file("values-h200.yaml"), RELEASE))["run"]["release"]["gpus"] == 48
    assert "release" not in config(chart, {})["run"]


def test_only_the_container_run_has_a_token_and_only_of_an_account_of_its_own(chart: ChartRig) -> None:
    found = pod_specs(chart.documents(RELEASE))
    learner = found["StatefulSet/nouscoder-learner"]["spec"]
    mounting = {
        name: [one["name"] for one in pod["spec"]["containers"] if "serviceaccount" in str(one["volumeMounts"])]
        for name, pod in found.items()
    }
    assert {name: names for name, names in mounting.items() if names} == {"StatefulSet/nouscoder-learner": ["run"]}
    assert learner["automountServiceAccountToken"] is False
    assert learner["serviceAccountName"] == "nouscoder-learner"
    assert chart.one("ServiceAccount", "nouscoder-learner", RELEASE)
    (subject,) = chart.one("RoleBinding", "nouscoder-learner", RELEASE)["subjects"]
    assert (subject["name"], subject["namespace"]) == ("nouscoder-learner", "here")
    given = merged(RELEASE, {"learner": {"serviceAccount": {"name": "ours"}}})
    assert pod_specs(chart.documents(given))["StatefulSet/nouscoder-learner"]["spec"]["serviceAccountName"] == "ours"
    assert not [one for one in chart.documents(given) if one["kind"] == "ServiceAccount" and "learner" in str(one)]
    kept = chart.documents({})
    assert "serviceAccountToken" not in str(kept)
    assert not [one for one in kept if one["kind"] in ("Role", "Deployment") and "learner" in one["metadata"]["name"]]


def test_only_the_learner_of_a_run_that_releases_reaches_the_kubernetes_api(chart: ChartRig) -> None:
    def opened(values: dict[str, Any]) -> set[str]:
        policies = [one for one in chart.documents(values) if one["kind"] == "NetworkPolicy"]
        return {one["metadata"]["name"] for one in policies if "6443" in str(one["spec"].get("egress"))}

    assert opened({}) == {"nouscoder-verifier"}
    assert opened(RELEASE) == {"nouscoder-verifier", "nouscoder-learner"}


def test_the_pod_of_the_pages_takes_no_gpu_no_node_and_no_queue_of_the_learner(chart: ChartRig) -> None:
    values = merged(chart.file("values-h200.yaml"), RELEASE)
    values["learner"] |= {"workloadLabels": {"kueue.x-k8s.io/queue-name": "q"}, "nodeSelector": {"gpu": "h200"}}
    pages = chart.one("Deployment", "nouscoder-pages", values)
    assert pages["spec"]["replicas"] == 0
    for word in ("gpu", "queue-name", "rdma", "prometheus.io/scrape"):
        assert word not in str(pages), word
    pod = pages["spec"]["template"]
    assert [one["name"] for one in pod["spec"]["containers"]] == ["run"]
    selector = chart.one("Service", "nouscoder-learner", values)["spec"]["selector"]
    assert selector.items() <= pod["metadata"]["labels"].items()


def test_a_change_of_the_release_restarts_only_the_learner(chart: ChartRig) -> None:
    def checksums(values: dict[str, Any]) -> dict[str, str]:
        pods = pod_specs(chart.documents(values))
        return {name: pod["metadata"].get("annotations", {}).get("checksum/config", "") for name, pod in pods.items()}

    before, after = checksums(RELEASE), checksums({**RELEASE, "ttlSeconds": 60})
    assert {name for name in before if before[name] != after[name]} == {"StatefulSet/nouscoder-learner"}


@pytest.mark.parametrize("name", ["default", "ranks", "lws", "jobset", "hpa", "keda", "unmanaged", "verifier-only"])
def test_a_suspended_release_has_no_pods_and_keeps_its_volumes(chart: ChartRig, name: str) -> None:
    values = chart.variants[name]
    kept = ("PersistentVolumeClaim", "Secret", "ConfigMap", "Service")
    before, after = chart.documents(values), chart.documents({**values, "suspend": True})

    def names(documents: list[dict[str, Any]]) -> list[tuple[str, str]]:
        return [(one["kind"], one["metadata"]["name"]) for one in documents if one["kind"] in kept]

    assert names(before) == names(after)
    for one in after:
        if one["kind"] in ("Deployment", "StatefulSet", "LeaderWorkerSet"):
            assert one["spec"]["replicas"] == 0, one["metadata"]["name"]
        assert one["kind"] not in ("JobSet", "Pod", "HorizontalPodAutoscaler", "ScaledObject")


def test_the_chart_never_writes_the_suspension_of_a_jobset_which_is_the_queues(chart: ChartRig) -> None:
    queue = {"kueue.x-k8s.io/queue-name": "team"}
    values = merged(RELEASE, {"learner": {"workload": "jobSet", "workloadLabels": queue, **SEVERAL_PODS}})
    jobs = chart.one("JobSet", "nouscoder-learner", values)
    assert "suspend" not in jobs["spec"]
    assert queue.items() <= jobs["metadata"]["labels"].items()


def test_a_released_or_suspended_release_raises_no_alert_and_one_that_is_not_released_does(
    chart: ChartRig, tmp_path: Path
) -> None:
    services = ("verifier", "broker", "generation", "learner")
    ends = series("nouscoder_broker_run_finished", "0x10 1x90")
    stays = [ends, *map(up, services)]
    goes = [ends, *map(up, services[:2]), *(up(name, "1x25 stale") for name in services[2:])]
    (tmp_path / "a").mkdir()
    tests = [
        firing("released", goes, "", 0),
        firing("within its time", stays, "", 0, "30m"),
        firing("not released", stays, 'alertname="NousCoderRunFinished",', 1),
        firing("a broker is missing", [one for one in goes if 'broker"' not in one["series"]], "", 1),
        firing("lost before the end", [{**ends, "values": "0x100"}, *goes[1:]], 'alertname="NousCoderPodsMissing",', 1),
    ]
    check(chart, tmp_path / "a", tests, RELEASE)
    (tmp_path / "b").mkdir()
    check(chart, tmp_path / "b", [firing("suspended", [], "", 0)], {"suspend": True})


def test_the_gpus_that_a_finished_run_has_given_back_are_a_series(chart: ChartRig, tmp_path: Path) -> None:
    given = [series("nouscoder_broker_run_finished", "0x10 1x90"), up("broker"), up("generation", "1x25 stale")]
    name = "nouscoder:run_gpus_released"
    labels = f'{name}{{namespace="here",app_kubernetes_io_instance="nouscoder"}}'
    expected = [
        {"expr": name, "eval_time": f"{minute}m", "exp_samples": [{"labels": labels, "value": gpus}]}
        for minute, gpus in ((5, 0), (20, 0), (40, 48))
    ]
    test = {"name": "released", "interval": "1m", "input_series": given, "promql_expr_test": expected}
    check(chart, tmp_path, [test], merged(chart.file("values-h200.yaml"), RELEASE))


def test_values_that_are_none_are_refused(chart: ChartRig) -> None:
    for wrong in ({"whenFinished": "delete"}, {"ttlSeconds": -1}, {"suspend": "yes"}):
        with pytest.raises(helm.HelmError, match=next(iter(wrong))):
            chart.documents(wrong)
