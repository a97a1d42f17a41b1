"""`nouscoder doctor --cluster --values FILE` on the chart's own objects, with recorded answers of a cluster.

tests/cluster/test_doctor_cluster.py has tests with a real one, from whose answers the messages here are copied.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.recorded_cluster import GIB, RecordedCluster, amount

from nouscoder.doctor import Finding, report
from nouscoder.doctor.cluster.client import ClusterError, Document, Node, NotAllowed, PodRefused, StorageClass
from nouscoder.doctor.cluster.install import examine_install, fix_for
from nouscoder.doctor.cluster.rendered import Release, RenderError, planned_pods, read_objects

from .conftest import CHART, NAMESPACE, ChartRig


@dataclass
class DoctorRig:
    """Examines an install of the chart with given values."""

    chart: ChartRig
    known: dict[str, list[Document]] = field(default_factory=dict)

    def objects(self, values: dict[str, Any]) -> list[Document]:
        key = json.dumps(values, sort_keys=True)
        if key not in self.known:
            texts = [text for name, text in sorted(self.chart.templates(values).items()) if name.endswith(".yaml")]
            self.known[key] = read_objects("\n---\n".join(texts), NAMESPACE)
        return self.known[key]

    def findings(self, values: dict[str, Any], cluster: RecordedCluster | None = None) -> dict[str, Finding]:
        release = Release("nouscoder", NAMESPACE, CHART, ())
        found = examine_install(cluster or RecordedCluster(), release, lambda release, version: self.objects(values))
        assert all(one.fix for one in found if not one.ok), [one for one in found if not one.ok and not one.fix]
        assert len({(one.name, one.detail) for one in found}) == len(found)
        return {one.name: one for one in sorted(found, key=lambda one: not one.ok)[::-1]}


@pytest.fixture(scope="module")
def doctor(chart: ChartRig) -> DoctorRig:
    return DoctorRig(chart)


@pytest.mark.parametrize("name", ["default", "verifier-only", "openshift"])
def test_an_install_into_a_cluster_with_all_that_it_needs_can_run(doctor: DoctorRig, name: str) -> None:
    cluster = RecordedCluster()
    findings = doctor.findings(doctor.chart.variants[name], cluster)
    text, code = report(list(findings.values()), "release nouscoder in here", as_json=False)
    assert code == 0, text
    assert text.endswith("release nouscoder in here can run here")
    # The pod of each maker was tried, the runner too.
    assert {pod["kind"] for pod in cluster.tried} == {"Pod"}
    assert any(pod["spec"].get("runtimeClassName") == "gvisor" for pod in cluster.tried)
    assert findings["pods"].detail == f"{len(cluster.tried)} of {len(cluster.tried)} are admitted"


@pytest.mark.parametrize(
    ("variant", "counts"),
    [
        ("default", {"redis": 1, "broker": 1, "verifier": 1, "generation": 1, "learner": 1, "sandbox": 3, "test": 0}),
        ("verifier-only", {"verifier": 1, "sandbox": 3, "test": 0}),
        ("unmanaged", {"sandbox": 2}),
        ("agent-sandbox", {"sandbox": 3}),
        ("lws", {"learner": 1, "learner-worker": 1}),
        ("jobset", {"learner": 1, "learner-worker": 1}),
        ("ranks", {"learner": 1, "learner-worker": 1}),
    ],
)
def test_the_number_of_pods_is_that_of_the_release(doctor: DoctorRig, variant: str, counts: dict[str, int]) -> None:
    pods = planned_pods(doctor.objects(doctor.chart.variants[variant]))
    label = "app.kubernetes.io/component"
    found = {pod.document["metadata"].get("labels", {}).get(label): pod.count for pod in pods}
    assert {component: found[component] for component in counts} == counts


REFUSALS = [
    (
        'pods "x" is forbidden: violates PodSecurity "restricted:latest": privileged (container "verifier" must not set'
        " securityContext.privileged=true)",
        "label the namespace",
    ),
    (
        'pods "x" is forbidden: exceeded quota: q, requested: limits.memory=2Gi, used: limits.memory=0, limited:'
        " limits.memory=1Gi",
        "that quota",
    ),
    ('pods "x" is forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi', "LimitRange of here"),
    ('pods "x" is forbidden: pod rejected: RuntimeClass "kata" not found', "runtimeClassName"),
    ('pods "x" is forbidden: error looking up service account here/a: serviceaccount "a" not found', "serviceAccount"),
    ('namespaces "here" not found', "kubectl create namespace here"),
    ('admission webhook "validate.example.org" denied the request: no tag latest', "owner of that policy"),
]


@pytest.mark.parametrize(("message", "fix"), REFUSALS)
def test_a_refused_pod_is_named_with_the_reason_and_what_to_change(doctor: DoctorRig, message: str, fix: str) -> None:
    def answer(pod: Document) -> Document:
        if pod["metadata"]["name"] == "nouscoder-broker":
            raise PodRefused(message)
        return pod

    findings = doctor.findings({}, RecordedCluster(answers=answer))
    found = findings["pod of Deployment/nouscoder-broker"]
    assert (found.ok, found.needed, found.known) == (False, True, True)
    assert message.partition(" (")[0] in found.detail
    assert fix.replace("here", NAMESPACE) in found.fix
    assert "pods" not in findings
    assert report(list(findings.values()), "it", as_json=True)[1] == 1


def test_every_pattern_of_a_refusal_is_reached_by_one_of_the_messages() -> None:
    assert len({fix_for(message, "here") for message, _ in REFUSALS}) == len(REFUSALS)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ClusterError('admission webhook "w" does not support dry run'), "owner of that webhook"),
        (NotAllowed('pods is forbidden: User "u" cannot create resource "pods"'), "administrator"),
    ],
)
def test_what_the_cluster_does_not_decide_is_unknown(doctor: DoctorRig, error: ClusterError, said: str) -> None:
    def answer(pod: Document) -> Document:
        raise error

    findings = doctor.findings({}, RecordedCluster(answers=answer))
    found = findings["pod of Deployment/nouscoder-broker"]
    assert (found.ok, found.known) == (False, False)
    assert str(error) in found.detail
    assert said in found.fix
    assert report(list(findings.values()), "it", as_json=True)[1] == 1


def test_pods_of_a_namespace_that_the_install_makes_cannot_be_tried_before(doctor: DoctorRig) -> None:
    def answer(pod: Document) -> Document:
        if pod["spec"].get("runtimeClassName"):
            raise PodRefused(f'namespaces "{NAMESPACE}-sandbox" not found')
        return pod

    findings = doctor.findings({}, RecordedCluster(answers=answer))
    found = findings["pod of runner of the verifier"]
    assert (found.ok, found.needed, found.known) == (False, False, False)
    assert findings["pods"].ok
    assert report(list(findings.values()), "it", as_json=True)[1] == 0


OWN_POLICY = (
    "pods \"x\" is invalid: : ValidatingAdmissionPolicy 'here-sandbox' with binding 'here-sandbox' denied request:"
    " a runner has the image nouscoder/nouscoder-sandbox:0.1.0"
)


@pytest.mark.parametrize(
    ("refusal", "admits_its_own", "can_run"),
    [
        (OWN_POLICY, True, True),
        (OWN_POLICY, False, False),  # something changes the pods of this cluster
        (OWN_POLICY.replace("here-sandbox", "other"), True, False),
        ('pods "x" is forbidden: exceeded quota: nouscoder-sandbox, requested: count/pods=1', True, True),
        ('pods "x" is forbidden: exceeded quota: of-the-team, requested: count/pods=1', True, False),
    ],
)
def test_the_policy_of_the_release_that_is_there_refuses_no_upgrade(
    doctor: DoctorRig, refusal: str, admits_its_own: bool, can_run: bool
) -> None:
    """It admits the image of its own runners only, and an upgrade changes it with the image."""

    def answer(pod: Document) -> Document:
        is_new = pod["spec"]["containers"][0]["image"].endswith(":2.0.0")
        if pod["spec"].get("runtimeClassName") and (is_new or not admits_its_own):
            raise PodRefused(refusal)
        return pod

    (there,) = [one for one in doctor.objects({}) if "runner-pod.json" in (one.get("data") or {})]
    cluster = RecordedCluster(answers=answer, there={there["metadata"]["name"]: there})
    findings = doctor.findings({"image": {"tag": "2.0.0"}}, cluster)
    text, code = report(list(findings.values()), "release nouscoder in here", as_json=False)
    assert code == (0 if can_run else 1), text
    assert ("can run here" in text) is can_run
    found = findings["pod of runner of the verifier"]
    assert (found.known, found.needed) == ((False, False) if can_run else (True, True))
    absent = doctor.findings({"image": {"tag": "2.0.0"}}, RecordedCluster(answers=answer))
    assert absent["pod of runner of the verifier"].needed, "no release is there"


@pytest.mark.parametrize(
    ("said", "known"),
    [
        ("config.broker.group_size is 16, but it was 8 when the run demo began", True),
        ('pods is forbidden: User "u" cannot list resource "pods"', False),
    ],
)
def test_what_the_chart_refuses_in_this_cluster_is_found_beside_the_rest(
    doctor: DoctorRig, said: str, known: bool
) -> None:
    def renders(release: Release, version: str) -> list[Document]:
        if not version:
            raise RenderError(f"helm refuses the values: {said}", "change the value that this message names")
        return doctor.objects({})

    found = examine_install(RecordedCluster(), Release("nouscoder", NAMESPACE, CHART, ()), renders)
    text, code = report(found, "release nouscoder in here", as_json=False)
    assert code == 1
    assert said in text
    assert ("cannot run: values in this cluster" in text) is known
    assert "pods" in {one.name for one in found if one.ok}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"generation": {"environment": {"kind": "agent"}}}, "environment.kind agent needs openai.http"),
        ({"broker": {"reward": {"rule": "callable"}}}, "entry_point is for rule callable"),
    ],
)
def test_a_configuration_that_the_services_refuse_at_their_start_is_found(
    doctor: DoctorRig, config: dict[str, Any], said: str
) -> None:
    found = doctor.findings({"config": config})["configuration"]
    assert (found.ok, found.needed) == (False, True)
    assert said in found.detail


def test_a_pod_whose_account_the_install_makes_is_tried_with_the_default_one(doctor: DoctorRig) -> None:
    cluster = RecordedCluster()
    doctor.findings({}, cluster)
    accounts = {pod["spec"].get("serviceAccountName") for pod in cluster.tried}
    made = {one["metadata"]["name"] for one in doctor.objects({}) if one["kind"] == "ServiceAccount"}
    assert made
    assert not accounts & made


def test_a_missing_runtime_class_names_the_pods_and_those_that_are_there(doctor: DoctorRig) -> None:
    found = doctor.findings({}, RecordedCluster(runtime={"kata": "kata"}))["RuntimeClass gvisor"]
    assert not found.ok
    assert "kata" in found.detail
    assert "runner" in found.fix


@pytest.mark.parametrize(
    ("persistence", "classes", "ok", "known"),
    [
        ({}, [StorageClass("local", "rancher.io/local-path", True)], True, True),
        ({}, [StorageClass("local", "rancher.io/local-path", False)], False, True),
        ({"storageClass": "fast"}, [StorageClass("local", "rancher.io/local-path", True)], False, True),
        ({"accessModes": ["ReadWriteMany"]}, [StorageClass("efs", "efs.csi.aws.com", True)], True, True),
        ({"accessModes": ["ReadWriteMany"]}, [StorageClass("local", "rancher.io/local-path", True)], False, False),
    ],
)
def test_claims_need_a_class_with_their_access_modes(
    doctor: DoctorRig, persistence: dict[str, Any], classes: list[StorageClass], ok: bool, known: bool
) -> None:
    values = {"learner": {"persistence": persistence}}
    found = doctor.findings(values, RecordedCluster(storage=classes))["PersistentVolumeClaim/nouscoder-runs"]
    assert (found.ok, found.known) == (ok, known)


@pytest.mark.parametrize("call", ["runtime_classes", "storage_classes", "nodes", "requested"])
def test_a_missing_right_leaves_the_other_findings(doctor: DoctorRig, call: str) -> None:
    findings = doctor.findings({}, RecordedCluster(refuses=frozenset({call})))
    (unknown,) = [one for one in findings.values() if not one.known]
    assert f"may not {call}" in unknown.detail
    assert "pods" in findings


GPU = {"nvidia.com/gpu": 8}
DEVICES = {**GPU, "rdma/ib": 8}
BIG = amount(192, 2048 * GIB, DEVICES)


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (Node("n", amount(192, 2048 * GIB), True), "nvidia.com/gpu"),
        (Node("n", amount(192, 2048 * GIB, GPU), True), "rdma/ib"),
        (Node("n", amount(192, 64 * GIB, DEVICES), True), "memory"),
        (Node("n", amount(2, 2048 * GIB, DEVICES), True), "cpu"),
        (Node("n", BIG, False), "ready"),
        (Node("n", BIG, True, taints=({"key": "dedicated", "value": "other", "effect": "NoSchedule"},)), "taints"),
    ],
    ids=["GPUs", "RDMA", "memory", "cores", "closed", "tainted"],
)
def test_a_pod_that_no_node_can_hold_is_named_with_what_is_short(doctor: DoctorRig, node: Node, said: str) -> None:
    values = {
        "config": {"learner": {"device": "cuda"}},
        "learner": {
            "ranksPerPod": 8,
            "rdma": {"resource": "rdma/ib", "count": 8},
            "resources": {
                "requests": {"cpu": "100", "memory": "1000Gi"},
                "limits": {"memory": "1000Gi", "nvidia.com/gpu": 8},
            },
        },
    }
    requests = values["learner"]["resources"]["requests"]  # type: ignore[index]
    requests["nvidia.com/gpu"] = 8
    findings = doctor.findings(values, RecordedCluster(node_list=[node]))
    # Pods that no node admits at all are one finding.
    found = findings.get("a node for StatefulSet/nouscoder-learner") or findings["nodes"]
    assert not found.ok
    assert "StatefulSet/nouscoder-learner" in f"{found.name} {found.detail}"
    assert said in found.detail, found
    fits = doctor.findings(values, RecordedCluster(node_list=[Node("n", BIG, True)]))
    assert "a node for StatefulSet/nouscoder-learner" not in fits
    assert "8 nvidia.com/gpu" in fits["nodes"].detail


def test_tolerations_and_labels_choose_nodes(doctor: DoctorRig) -> None:
    taint = {"key": "nvidia.com/gpu", "value": "", "effect": "NoSchedule"}
    nodes = [Node("cpu", amount(8, 64 * GIB), True), Node("gpu", BIG, True, {"pool": "gpu"}, (taint,))]
    placed = {"nodeSelector": {"pool": "gpu"}, "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}
    for values, ok in (({"learner": placed}, True), ({"learner": {"nodeSelector": {"pool": "gpu"}}}, False)):
        findings = doctor.findings(values, RecordedCluster(node_list=nodes))
        assert findings["nodes"].ok is ok


def test_all_pods_together_need_room(doctor: DoctorRig) -> None:
    values = {"verifier": {"sandbox": {"pool": {"size": 127}}}}
    found = doctor.findings(values)["room"]
    assert not found.ok
    assert "of 128 pods of runner of the verifier" in found.detail


def test_values_that_the_chart_refuses_are_one_finding(doctor: DoctorRig) -> None:
    def refuse(release: Release, version: str) -> list[Document]:
        raise RenderError("helm refuses the values: learner.pods is 0", "change the value that this message names")

    cluster = RecordedCluster()
    found = examine_install(cluster, Release("nouscoder", NAMESPACE, CHART, ()), refuse)
    assert [one.name for one in found] == ["chart"]
    assert not cluster.tried


def test_an_api_server_that_does_not_answer_is_the_only_finding(doctor: DoctorRig) -> None:
    assert list(doctor.findings({}, RecordedCluster(refuses=frozenset({"version"})))) == ["API server"]


KINDS = tuple(
    f"{kind}.agents.x-k8s.io"
    for kind in ("sandboxes", "sandboxclaims.extensions", "sandboxtemplates.extensions", "sandboxwarmpools.extensions")
)


def crd(name: str, version: str = "v1beta1") -> Document:
    return {"metadata": {"name": name}, "spec": {"versions": [{"name": version, "served": True}]}}


def renewed(minutes_ago: int) -> Document:
    at = datetime.now(UTC) - timedelta(minutes=minutes_ago)
    return {"metadata": {"name": LEADER}, "spec": {"renewTime": at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")}}


LEADER = "a3317529.agent-sandbox.x-k8s.io"


@pytest.mark.parametrize(
    ("crds", "minutes_ago", "name", "said", "known"),
    [
        ([], [], "agent-sandbox", "sandboxes.agents.x-k8s.io, sandboxclaims", True),
        ([*map(crd, KINDS[:3]), crd(KINDS[3], "v1alpha1")], [], "agent-sandbox", ": sandboxwarmpools.ext", True),
        ([*map(crd, KINDS)], [], "controller of agent-sandbox", "nobody has the Lease", False),
        ([*map(crd, KINDS)], [30], "controller of agent-sandbox", "30 minutes ago", True),
        ([*map(crd, KINDS)], [30, 1], "", "", True),
    ],
    ids=["nothing", "an-old-version", "no-controller", "stopped", "runs"],
)
def test_what_of_agent_sandbox_is_missing_is_said_if_runners_are_claimed(
    doctor: DoctorRig, crds: list[Document], minutes_ago: list[int], name: str, said: str, known: bool
) -> None:
    values = doctor.chart.variants["agent-sandbox"]
    leases = [renewed(ago) for ago in minutes_ago]
    findings = doctor.findings(values, RecordedCluster(lists={"customresourcedefinitions": crds, "leases": leases}))
    missing = [one for one in findings.values() if not one.ok]
    assert [one.name for one in missing] == ([name] if name else [])
    if name:
        assert (said in missing[0].detail, missing[0].needed, missing[0].known) == (True, True, known)
        assert "agent-sandbox" in missing[0].fix or "start it" in missing[0].fix
    assert not any("agent-sandbox" in one for one in doctor.findings({}))
