"""examples/kubernetes: the values render, and the objects beside them fit what is rendered.

tests/cluster/test_workload_crds.py gives all of them to an API server.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml
from tests.chart.conftest import CHART, EXAMPLES, ROOT, custom_pods, merged, pod_specs
from tests.chart.test_chart_renders import references

if TYPE_CHECKING:
    from tests.chart.conftest import ChartRig

Document = dict[str, Any]
QUEUE, PRIORITY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
GROUP, VOLCANO_QUEUE = "scheduling.k8s.io/group-name", "scheduling.volcano.sh/queue-name"
CHARTS = "registry.example.com/nouscoder/charts"
COMPONENTS = ("broker", "verifier", "generation", "learner", "redis")


def objects(name: str) -> dict[str, Document]:
    """The objects of a file, by kind."""
    found = {one["kind"]: one for one in yaml.safe_load_all((EXAMPLES / name).read_text("utf8"))}
    assert all(one["apiVersion"] and one["metadata"]["name"] for one in found.values())
    return found


def on_gpus(chart: ChartRig, name: str) -> Document:
    """The values of an example, after those for GPUs."""
    return merged(chart.kept["gpu"], chart.example(name))


def test_the_document_names_every_example() -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text("utf8")
    for file in EXAMPLES.iterdir():
        assert file.name in text, file.name
    given = re.findall(r" -f ([\w/.-]+\.yaml)", text)
    assert len(given) >= 6
    assert [name for name in given if not (ROOT / name).is_file()] == []


def test_kueue_has_the_quota_for_what_waits_in_its_queue(chart: ChartRig) -> None:
    values, queue = on_gpus(chart, "values-kueue.yaml"), objects("kueue.yaml")
    waiting = [one for one in chart.documents(values) if QUEUE in one["metadata"]["labels"]]
    assert {one["kind"] for one in waiting} == {"StatefulSet", "Deployment"}
    assert {one["metadata"]["labels"][QUEUE] for one in waiting} == {queue["LocalQueue"]["metadata"]["name"]}
    priorities = {one["metadata"]["labels"].get(PRIORITY) for one in waiting} - {None}
    assert priorities == {queue["WorkloadPriorityClass"]["metadata"]["name"]}
    assert queue["LocalQueue"]["spec"]["clusterQueue"] == queue["ClusterQueue"]["metadata"]["name"]
    (group,) = queue["ClusterQueue"]["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    assert flavor["name"] == queue["ResourceFlavor"]["metadata"]["name"]
    assert [one["name"] for one in flavor["resources"]] == group["coveredResources"]
    asked = {
        name
        for pod in pod_specs(waiting).values()
        for container in pod["spec"]["containers"]
        for name in container["resources"]["requests"]
    }
    assert asked == set(group["coveredResources"])


def test_volcano_places_the_learner_as_one_group(chart: ChartRig) -> None:
    values, queue = on_gpus(chart, "values-volcano.yaml"), objects("volcano.yaml")["Queue"]["metadata"]["name"]
    pods = pod_specs(chart.documents(values))
    placed = {name: pod for name, pod in pods.items() if pod["spec"].get("schedulerName") == "volcano"}
    assert set(placed) == {"StatefulSet/nouscoder-learner", "Deployment/nouscoder-generation"}
    (group,) = [one for one in chart.documents(values) if one["kind"] == "PodGroup"]
    annotations = {name: pod["metadata"]["annotations"] for name, pod in placed.items()}
    assert annotations["StatefulSet/nouscoder-learner"][GROUP] == group["metadata"]["name"]
    assert annotations["Deployment/nouscoder-generation"][VOLCANO_QUEUE] == group["spec"]["queue"] == queue
    assert group["spec"]["minMember"] == values.get("learner", {}).get("pods", chart.defaults["learner"]["pods"])


@pytest.mark.parametrize("workload", ["statefulset", "leaderWorkerSet", "jobSet"])
def test_every_component_has_a_scheduler_labels_and_annotations(chart: ChartRig, workload: str) -> None:
    def of(name: str) -> Document:
        return {
            "schedulerName": f"{name}-scheduler",
            "workloadLabels": {QUEUE: name},
            "workloadAnnotations": {"example.com/team": name},
        }

    values: Document = {name: of(name) for name in COMPONENTS}
    values["learner"] |= {"workload": workload, "pods": 2, "persistence": {"accessModes": ["ReadWriteMany"]}}
    values["verifier"]["sandbox"] = {"pool": {"schedulerName": "runners"}}
    documents = chart.documents(values)
    seen = set()
    for one in documents:
        name = one["metadata"]["labels"]["app.kubernetes.io/component"].removesuffix("-worker")
        if one["kind"] in ("Deployment", "StatefulSet", "JobSet", "LeaderWorkerSet"):
            assert one["metadata"]["labels"][QUEUE] == name
            assert one["metadata"]["annotations"] == {"example.com/team": name}
            pods = pod_specs([one]).values()
            assert {pod["spec"]["schedulerName"] for pod in pods} == {f"{name}-scheduler"}
            assert not any(QUEUE in pod["metadata"]["labels"] for pod in pods)
            seen.add(name)
    assert seen == set(COMPONENTS)
    runner = pod_specs(documents)["ConfigMap/nouscoder-sandbox/runner-pod.json"]
    assert runner["spec"]["schedulerName"] == "runners"
    for one in documents:
        if one["kind"] in ("JobSet", "LeaderWorkerSet"):
            for pod in custom_pods(one).values():
                kubernetes_validate.validate(pod, "1.29", strict=True)


def test_the_learner_reaches_weights_and_biases_with_its_key(chart: ChartRig) -> None:
    values = on_gpus(chart, "values-wandb.yaml")
    pod = chart.one("StatefulSet", "nouscoder-learner", values)["spec"]["template"]["spec"]
    (run,) = [one for one in pod["containers"] if one["name"] == "run"]
    assert run["envFrom"] == [{"secretRef": {"name": "wandb"}}]
    assert '"wandb"' in chart.one("ConfigMap", "nouscoder-config", values)["data"]["config.json"]
    policy = chart.one("NetworkPolicy", "nouscoder-learner", values)
    kubernetes_validate.validate(policy, "1.29", strict=True)
    assert policy["spec"]["egress"][-1] == values["networkPolicy"]["extraEgress"]["learner"][0]
    others = {
        one["metadata"]["name"]
        for one in chart.documents(values)
        if "0.0.0.0/0" in str(one.get("spec", {}).get("egress"))
    }
    assert others == {"nouscoder-learner", "nouscoder-verifier"}  # the verifier reaches the Kubernetes API


def test_argo_cd_renders_without_a_cluster_and_twice_the_same(chart: ChartRig) -> None:
    found = objects("argocd.yaml")
    spec = found["Application"]["spec"]
    assert spec["source"]["repoURL"] == found["Secret"]["stringData"]["url"] == CHARTS
    assert spec["source"]["targetRevision"] == yaml.safe_load((CHART / "Chart.yaml").read_text("utf8"))["version"]
    helm = spec["source"]["helm"]
    values, name = helm["valuesObject"], helm["releaseName"]
    assert chart.templates(values, name) == chart.templates(values, name)
    documents = chart.documents(values, name)
    assert not [one for one in documents if one["kind"] == "Secret"]
    wanted = {secret for kind, secret in references(documents) if kind == "Secret"}
    assert wanted == {"nouscoder-redis-login", "nouscoder-tokens", "nouscoder-runners"}


def test_flux_installs_the_chart_that_its_source_names(chart: ChartRig) -> None:
    found = objects("flux.yaml")
    source, release = found["OCIRepository"], found["HelmRelease"]["spec"]
    assert source["spec"]["url"] == f"oci://{CHARTS}/nouscoder"
    assert release["chartRef"] == {"kind": source["kind"], "name": source["metadata"]["name"]}
    assert len(chart.documents(release["values"], release["releaseName"])) > 30


def test_extra_objects_are_rendered_as_templates(chart: ChartRig) -> None:
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-text'}\n"
    manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": '{{ include "nouscoder.fullname" . }}-x'}}
    made = {one["metadata"]["name"] for one in chart.documents({"extraObjects": [text, manifest]})}
    assert made - {one["metadata"]["name"] for one in chart.documents()} == {"nouscoder-text", "nouscoder-x"}
