"""A learner of several pods: each workload tells every process its rank (learner/parallel/process_rank.py)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helm_python as helm
import kubernetes_validate
import pytest
from tests.redis_process import free_port

from nouscoder.learner.parallel.process_rank import ProcessRank, process_rank

if TYPE_CHECKING:
    from tests.chart.conftest import ChartRig

WORKLOADS = ("statefulset", "leaderWorkerSet", "jobSet")
PODS = 3
ADDRESS = "nouscoder-learner-ranks.here.svc"
PROBE = Path(__file__).parent / "learner_rank_probe.py"
SHARED = {"persistence": {"accessModes": ["ReadWriteMany"]}}

Document = dict[str, Any]


def values(workload: str, pods: int = PODS, **more: Any) -> dict[str, Any]:
    return {"learner": {"workload": workload, "pods": pods, **SHARED, **more}}


def templates(chart: ChartRig, given: dict[str, Any]) -> tuple[Document, Document | None]:
    """Metadata and spec of the first pod, and of the others."""
    documents = {(one["kind"], one["metadata"]["name"]): one.get("spec", {}) for one in chart.documents(given)}
    workload = given["learner"]["workload"]
    if workload == "statefulset":
        others = documents.get(("StatefulSet", "nouscoder-learner-worker"))
        return documents["StatefulSet", "nouscoder-learner"]["template"], others and others["template"]
    assert ("StatefulSet", "nouscoder-learner") not in documents
    if workload == "leaderWorkerSet":
        group = documents["LeaderWorkerSet", "nouscoder-learner-group"]["leaderWorkerTemplate"]
        assert group["size"] == given["learner"]["pods"]
        return group["leaderTemplate"], group["workerTemplate"]
    jobs = {job["name"]: job["template"]["spec"] for job in documents["JobSet", "nouscoder-learner"]["replicatedJobs"]}
    assert [job["parallelism"] for job in jobs.values()] == [1] * len(jobs)
    return jobs["leader"]["template"], jobs["worker"]["template"] if "worker" in jobs else None


def environment(pod: Document, workload: str, number: int, pods: int = PODS) -> dict[str, str]:
    """The variables of the learner's container in pod `number`, with what Kubernetes and the operators fill in."""
    filled = {
        "metadata.labels['apps.kubernetes.io/pod-index']",
        "metadata.labels['jobset.sigs.k8s.io/job-global-index']",
    }
    found: dict[str, str] = {}
    if workload == "leaderWorkerSet":
        leader = "nouscoder-learner-group-0.nouscoder-learner-group.here"
        found = {"LWS_LEADER_ADDRESS": leader, "LWS_GROUP_SIZE": str(pods), "LWS_WORKER_INDEX": str(number)}
    for one in pod["spec"]["containers"][0]["env"]:
        if "valueFrom" in one:
            assert one["valueFrom"]["fieldRef"]["fieldPath"] in filled
        found[one["name"]] = one.get("value", str(number))
    return found


def command(pod: Document, variables: dict[str, str]) -> list[str]:
    """The command of the learner's container; the kubelet replaces $(NAME)."""
    container = pod["spec"]["containers"][0]
    words = [*container["command"], *container["args"]]
    return [re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], word) for word in words]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_pod_knows_its_rank(chart: ChartRig, workload: str) -> None:
    first, others = templates(chart, values(workload))
    assert others is not None
    address = ADDRESS if workload != "leaderWorkerSet" else "nouscoder-learner-group-0.nouscoder-learner-group.here"
    for number in range(PODS):
        pod = others if number else first
        assert process_rank(environment(pod, workload, number)) == ProcessRank(number, PODS, 0, address, 29500)
        assert command(pod, {})[:3] == ["nouscoder", "serve", "learner"]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_torchrun_starts_the_ranks_of_a_pod(chart: ChartRig, workload: str) -> None:
    first, others = templates(chart, values(workload, ranksPerPod=8))
    assert others is not None
    for number in range(PODS):
        variables = environment(others if number else first, workload, number)
        words = command(others if number else first, variables)
        assert words[:3] == ["python3", "-m", "torch.distributed.run"]
        assert {f"--nnodes={PODS}", "--nproc-per-node=8", f"--node-rank={number}", "--master-port=29500"} <= set(words)
        assert not {"WORLD_SIZE", "RANK"} & set(variables)  # torchrun sets them


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_learner_of_one_pod_has_no_other_pod(chart: ChartRig, workload: str) -> None:
    given = values(workload, pods=1)
    first, _ = templates(chart, given)
    assert process_rank(environment(first, "", 0)) is None
    assert "learner-worker" not in str([one for one in chart.documents(given) if one["kind"] != "LeaderWorkerSet"])
    alone = command(templates(chart, values(workload, pods=1, ranksPerPod=8))[0], {})
    assert "--standalone" in alone
    assert "--nproc-per-node=8" in alone


@pytest.mark.parametrize("workload", WORKLOADS)
def test_only_the_first_pod_has_the_containers_of_the_run(chart: ChartRig, workload: str) -> None:
    first, others = templates(chart, values(workload))
    assert others is not None
    assert [one["name"] for one in first["spec"]["containers"]] == ["learner", "run"]
    assert [one["name"] for one in others["spec"]["containers"]] == ["learner"]
    assert "initContainers" not in others["spec"]
    assert "readinessProbe" not in others["spec"]["containers"][0]  # only rank 0 serves
    claims = [
        [volume["persistentVolumeClaim"] for volume in pod["spec"]["volumes"] if volume["name"] == "runs"]
        for pod in (first, others)
    ]
    assert claims[0] == claims[1] == [{"claimName": "nouscoder-runs"}]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_kubernetes_knows_every_field_of_the_pods(chart: ChartRig, workload: str) -> None:
    large: dict[str, Any] = {
        "podSecurityContext": {"runAsUser": 1000660000},
        "rdma": {"resource": "rdma/ib", "count": 8},
    }
    given = values(workload, ranksPerPod=8, topologyKey="example.com/rack", **large)
    for pod in templates(chart, given):
        assert pod is not None
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **pod}, "1.29", strict=True)
        assert pod["spec"]["securityContext"]["runAsUser"] == 1000660000
        learner = pod["spec"]["containers"][0]
        assert learner["resources"]["limits"]["rdma/ib"] == learner["resources"]["requests"]["rdma/ib"] == 8
        assert learner["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        for other in pod["spec"]["containers"][1:]:
            assert "add" not in other["securityContext"]["capabilities"]
        (term,) = pod["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "example.com/rack"
        (kinds,) = term["labelSelector"]["matchExpressions"]
        assert pod["metadata"]["labels"]["app.kubernetes.io/component"] in kinds["values"]
    for one in chart.documents(given):
        if one["kind"] not in ("LeaderWorkerSet", "JobSet") and "learner" in one["metadata"]["name"]:
            kubernetes_validate.validate(one, "1.29", strict=True)


def test_without_ipc_lock_the_pods_stay_restricted(chart: ChartRig) -> None:
    given = values("statefulset", rdma={"resource": "rdma/ib", "ipcLock": False})
    for pod in templates(chart, given):
        assert pod is not None
        assert pod["spec"]["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_numbers_of_the_other_pods_begin_with_one(chart: ChartRig) -> None:
    spec = chart.one("StatefulSet", "nouscoder-learner-worker", values("statefulset", pods=6))["spec"]
    assert (spec["replicas"], spec["ordinals"], spec["podManagementPolicy"]) == (5, {"start": 1}, "Parallel")


def test_the_leader_of_a_jobset_is_first(chart: ChartRig) -> None:
    """The global index of its job is then 0."""
    spec = chart.one("JobSet", "nouscoder-learner", values("jobSet", maxRestarts=7))["spec"]
    assert [(job["name"], job["replicas"]) for job in spec["replicatedJobs"]] == [("leader", 1), ("worker", 2)]
    assert (spec["failurePolicy"], spec["network"]) == ({"maxRestarts": 7}, {"enableDNSHostnames": False})
    for job in spec["replicatedJobs"]:
        assert job["template"]["spec"]["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize("workload", WORKLOADS)
def test_ranks_reach_each_other_and_nothing_else_reaches_them(chart: ChartRig, workload: str) -> None:
    documents = chart.documents(values(workload))
    policies = {one["metadata"]["name"]: one["spec"] for one in documents if one["kind"] == "NetworkPolicy"}
    for name in ("nouscoder-learner", "nouscoder-learner-worker"):
        for direction, side in (("ingress", "from"), ("egress", "to")):
            (rule,) = [rule for rule in policies[name][direction] if "ports" not in rule]
            peers = [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in rule[side]]
            assert peers == ["learner", "learner-worker"]
    assert len(policies["nouscoder-learner-worker"]["ingress"]) == 1
    services = [
        one for one in documents if one["kind"] == "Service" and one["metadata"]["name"] == ADDRESS.split(".")[0]
    ]
    assert len(services) == (0 if workload == "leaderWorkerSet" else 1)
    for service in services:
        assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
        assert service["spec"]["selector"]["app.kubernetes.io/component"] == "learner"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pods": 2}, "learner.persistence.accessModes must be"),
        ({"ranksPerPod": 8, "resources": {"limits": {"nvidia.com/gpu": 4}}}, "learner.ranksPerPod is 8, .* has 4"),
        ({"topologyKey": "rack", "affinity": {"podAffinity": {}}}, "learner.topologyKey sets"),
        ({"pods": 3, **SHARED, "context": 2}, "config.learner.context_parallel is 2, .* 3 ranks"),
    ],
)
def test_values_that_do_not_fit_together_are_refused(chart: ChartRig, given: dict[str, Any], message: str) -> None:
    learner = {**given}
    config = {"learner": {"context_parallel": learner.pop("context", 1)}}
    with pytest.raises(helm.HelmError, match=message):
        chart.documents({"learner": learner, "config": config})


@pytest.mark.parametrize("workload", WORKLOADS)
def test_an_existing_claim_needs_no_access_mode(chart: ChartRig, workload: str) -> None:
    """All pods mount it, and the chart makes no other volume for the run folders."""
    given = {"learner": {"workload": workload, "pods": 2, "persistence": {"existingClaim": "shared"}}}
    for pod in templates(chart, given):
        assert pod is not None
        (runs,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "runs")
        assert runs["persistentVolumeClaim"] == {"claimName": "shared"}
    claims = [one["metadata"]["name"] for one in chart.documents(given) if one["kind"] == "PersistentVolumeClaim"]
    assert not [name for name in claims if "runs" in name]


@pytest.mark.parametrize(
    ("workload", "ranks_per_pod"),
    [
        pytest.param("statefulset", 1, marks=pytest.mark.heavy),
        pytest.param("leaderWorkerSet", 2, marks=pytest.mark.heavy),
        pytest.param("jobSet", 2, marks=pytest.mark.heavy),
        pytest.param("statefulset", 2, marks=pytest.mark.soak),
        pytest.param("leaderWorkerSet", 1, marks=pytest.mark.soak),
        pytest.param("jobSet", 1, marks=pytest.mark.soak),
    ],
)
def test_processes_with_the_rendered_command_form_one_group(chart: ChartRig, workload: str, ranks_per_pod: int) -> None:
    """Two pods as processes of this machine: the command and the variables are those of the chart."""
    given = values(workload, pods=2, ranksPerPod=ranks_per_pod)
    first, others = templates(chart, given)
    assert others is not None
    port = str(free_port())
    started = []
    for number, pod in enumerate((first, others)):
        variables = environment(pod, workload, number, pods=2)
        variables |= {name: "127.0.0.1" for name in ("MASTER_ADDR", "LWS_LEADER_ADDRESS") if name in variables}
        variables["MASTER_PORT"] = port
        words = [word.replace("=29500", f"={port}") for word in command(pod, variables)]
        end = words.index("-m", 2) if ranks_per_pod > 1 else 0
        words = [sys.executable, *words[1:end], str(PROBE)] if end else [sys.executable, str(PROBE)]
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        started.append(subprocess.Popen(words, env={**kept, **variables}, stdout=subprocess.PIPE, text=True))
    lines = [line for process in started for line in process.communicate(timeout=300)[0].splitlines()]
    size = 2 * ranks_per_pod
    assert sorted(lines) == [f"{rank} {size} {float(sum(range(size)))}" for rank in range(size)]
