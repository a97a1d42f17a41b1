"""`nouscoder doctor --cluster --values FILE` on the chart's own objects, with recorded answers of a cluster.

tests/cluster/test_doctor_cluster.py has tests with a real one, from whose answers the messages here are copied.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.recorded_cluster import RecordedFacts

from nouscoder.doctor.cluster.facts import Amount, ClusterError, Node, StorageClass, Taint
from nouscoder.doctor.cluster.install import examine_install
from nouscoder.doctor.cluster.redis_facts import RedisFacts, RedisSilent, judge_redis
from nouscoder.doctor.cluster.refusals import fix_for
from nouscoder.doctor.cluster.release_objects import Release, RenderError, planned_pods, read_objects
from nouscoder.doctor.cluster.target import Document, DryRun, Kind, Outcome
from nouscoder.doctor.finding import Finding, report

from .conftest import CHART, NAMESPACE, ChartRig

GIB = 1024**3
OPERATORS = ("leaderworkerset.x-k8s.io/v1/LeaderWorkerSet", "jobset.x-k8s.io/v1alpha2/JobSet")
CLUSTER_WIDE = ("Namespace", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
SILENT = RedisFacts("7.4.1", "noeviction", True, GIB)


def admit(document: Document) -> DryRun:
    return DryRun(Outcome.ADMITTED, document=document)


@dataclass(kw_only=True)
class RecordedTarget(RecordedFacts):
    """A `Target` with recorded answers, into which a release fits."""

    served: Mapping[str, Kind]
    answers: Callable[[Document], DryRun] = admit
    objects: dict[tuple[str, str, str], Document] = field(default_factory=dict)
    namespaces: set[str] = field(default_factory=lambda: {NAMESPACE, f"{NAMESPACE}-sandbox"})
    storage: list[StorageClass] = field(default_factory=lambda: [StorageClass("local", "rancher.io/local-path", True)])
    node_list: list[Node] = field(default_factory=lambda: [Node("node1", Amount(8, 64 * GIB), True)])
    quota_list: list[Document] = field(default_factory=list)
    tried: list[Document] = field(default_factory=list)

    def has_resource(self, name: str) -> bool:
        raise AssertionError(f"kinds() has it: {name}")

    def kinds(self) -> Mapping[str, Kind]:
        self.ask("kinds")
        return self.served

    def has_namespace(self, name: str) -> bool:
        self.ask("has_namespace")
        return name in self.namespaces

    def dry_run(self, document: Document, kind: Kind, namespace: str) -> DryRun:
        assert not kind.namespaced or namespace in self.namespaces
        self.tried.append(document)
        return self.answers(document)

    def read(self, plural: str, namespace: str, name: str) -> Document | None:
        self.ask(plural)
        return self.objects.get((plural, namespace, name))

    def quotas(self, namespace: str) -> list[Document]:
        self.ask("quotas")
        return self.quota_list if namespace == NAMESPACE else []


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

    def target(self, values: dict[str, Any], **more: Any) -> RecordedTarget:
        served = {
            f"{one['apiVersion']}/{one['kind']}": Kind(f"{one['kind'].lower()}s", one["kind"] not in CLUSTER_WIDE)
            for one in self.objects(values)
        }
        return RecordedTarget(served={"v1/Pod": Kind("pods", True), **served}, **more)

    def findings(
        self,
        values: dict[str, Any],
        target: RecordedTarget | None = None,
        ask_redis: Callable[[str, str], RedisFacts] = lambda url, authority: SILENT,
    ) -> dict[str, Finding]:
        release = Release("nouscoder", NAMESPACE, CHART, ())
        target = target or self.target(values)
        found = examine_install(target, release, lambda release, version: self.objects(values), ask_redis)
        assert all(one.fix for one in found if not one.ok), [one for one in found if not one.ok and not one.fix]
        assert len({(one.name, one.detail) for one in found}) == len(found)
        return {one.name: one for one in sorted(found, key=lambda one: not one.ok)[::-1]}


@pytest.fixture(scope="module")
def doctor(chart: ChartRig) -> DoctorRig:
    return DoctorRig(chart)


def secret(*keys: str) -> Document:
    return {"data": {key: base64.b64encode(b"x").decode() for key in keys}}


@pytest.mark.parametrize("name", ["default", "verifier-only", "openshift"])
def test_an_install_into_a_cluster_with_all_that_it_needs_can_run(doctor: DoctorRig, name: str) -> None:
    values = doctor.chart.variants[name]
    target = doctor.target(values)
    findings = doctor.findings(values, target)
    text, code = report(list(findings.values()), "release nouscoder in here", as_json=False)
    assert code == 0, text
    assert text.endswith("release nouscoder in here can run here")
    kinds = [one["kind"] for one in target.tried]
    # Every object and the pod of each maker were tried, the runner too.
    assert set(kinds) >= {"Deployment", "Secret", "NetworkPolicy", "ValidatingAdmissionPolicy", "Pod"}
    pods = [one for one in target.tried if one["kind"] == "Pod"]
    assert any(pod["spec"].get("runtimeClassName") == "gvisor" for pod in pods)
    assert findings["pods"].detail.startswith(f"{len(pods)} of {len(pods)}")


@pytest.mark.parametrize(
    ("variant", "counts"),
    [
        ("default", {"redis": 1, "broker": 1, "verifier": 1, "generation": 1, "learner": 1, "sandbox": 3, "test": 0}),
        ("verifier-only", {"verifier": 1, "sandbox": 3, "test": 0}),
        ("unmanaged", {"sandbox": 2}),
        ("lws", {"learner": 1, "learner-worker": 1}),
        ("jobset", {"learner": 1, "learner-worker": 1}),
        ("ranks", {"learner": 1, "learner-worker": 1}),
    ],
)
def test_the_number_of_pods_is_that_of_the_release(doctor: DoctorRig, variant: str, counts: dict[str, int]) -> None:
    found = {pod.component: pod.count for pod in planned_pods(doctor.objects(doctor.chart.variants[variant]))}
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
        "raise that quota",
    ),
    ('pods "x" is forbidden: failed quota: q: must specify limits.cpu for: broker', "LimitRange with defaults"),
    ('pods "x" is forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi', "LimitRange of here"),
    (
        "pods \"x\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no owner label",
        "exception for here",
    ),
    ('admission webhook "validate.example.org" denied the request: no tag latest', "exception for here"),
    ('pods "x" is forbidden: no PriorityClass with name high was found', "priorityClassName"),
    ('pods "x" is forbidden: pod rejected: RuntimeClass "kata" not found', "runtimeClassName"),
    ('pods "x" is forbidden: error looking up service account here/a: serviceaccount "a" not found', "serviceAccount"),
    ('namespaces "here" not found', "kubectl create namespace here"),
    ("something new", "administrator"),
]


@pytest.mark.parametrize(("message", "fix"), REFUSALS)
def test_a_refused_pod_is_named_with_the_reason_and_what_to_change(doctor: DoctorRig, message: str, fix: str) -> None:
    def answer(document: Document) -> DryRun:
        refused = document["kind"] == "Pod" and document["metadata"]["name"] == "nouscoder-broker"
        return DryRun(Outcome.REFUSED, message) if refused else admit(document)

    findings = doctor.findings({}, doctor.target({}, answers=answer))
    found = findings["pod of Deployment/nouscoder-broker"]
    assert (found.ok, found.needed, found.known) == (False, True, True)
    assert message.partition(" (")[0] in found.detail
    assert fix in found.fix
    assert not findings["pods"].ok
    assert report(list(findings.values()), "it", as_json=True)[1] == 1


def test_a_refused_object_is_named(doctor: DoctorRig) -> None:
    def answer(document: Document) -> DryRun:
        service = document["kind"] == "Service"
        return DryRun(Outcome.REFUSED, 'admission webhook "w" denied the request: no') if service else admit(document)

    findings = doctor.findings({}, doctor.target({}, answers=answer))
    assert "w" in findings["Service/nouscoder-verifier"].detail
    assert not findings["objects"].ok


def test_warnings_do_not_prevent_the_install(doctor: DoctorRig) -> None:
    warning = 'would violate PodSecurity "restricted:latest": runAsNonRoot != true'

    def answer(document: Document) -> DryRun:
        return DryRun(Outcome.ADMITTED, warnings=(warning,), document=document)

    findings = doctor.findings({}, doctor.target({}, answers=answer))
    found = findings["pod of StatefulSet/nouscoder-redis"]
    assert (found.ok, found.needed) == (False, False)
    assert warning in found.detail
    # The Deployment's warning about the same template is not repeated.
    assert "Deployment/nouscoder-broker" not in findings
    assert report(list(findings.values()), "it", as_json=True)[1] == 0


def test_what_a_webhook_cannot_decide_is_unknown(doctor: DoctorRig) -> None:
    said = 'admission webhook "w" does not support dry run'
    findings = doctor.findings({}, doctor.target({}, answers=lambda document: DryRun(Outcome.UNDECIDED, said)))
    found = findings["Deployment/nouscoder-broker"]
    assert (found.ok, found.known) == (False, False)
    assert said in found.detail
    assert report(list(findings.values()), "it", as_json=True)[1] == 1


def test_missing_rights_are_one_finding(doctor: DoctorRig) -> None:
    def answer(document: Document) -> DryRun:
        name = f'{document["kind"].lower()}s.apps "x" is forbidden: User "u" cannot patch resource'
        return DryRun(Outcome.MAY_NOT, f'{name} "{document["kind"].lower()}s" in API group "apps" in the namespace "h"')

    findings = doctor.findings({}, doctor.target({}, answers=answer))
    found = findings["rights"]
    assert (found.ok, found.known) == (False, False)
    assert "patch deployments, " in found.detail
    assert (findings["objects"].ok, findings["objects"].known) == (False, False)
    assert "Deployment/nouscoder-broker" not in findings
    assert report(list(findings.values()), "it", as_json=True)[1] == 1


def test_an_absent_namespace_is_named_with_the_command_that_makes_it(doctor: DoctorRig) -> None:
    target = doctor.target({}, namespaces=set())
    findings = doctor.findings({}, target)
    assert f"kubectl create namespace {NAMESPACE}" in findings[f"namespace {NAMESPACE}"].fix
    assert findings[f"namespace {NAMESPACE}"].needed
    # The install makes the namespace of the runners itself.
    assert (findings[f"namespace {NAMESPACE}-sandbox"].needed, findings[f"namespace {NAMESPACE}-sandbox"].known) == (
        False,
        False,
    )
    assert {one["kind"] for one in target.tried} == set(CLUSTER_WIDE)


def test_missing_kinds_name_their_operator_and_the_value_that_needs_none(doctor: DoctorRig) -> None:
    for values, kind, said in (
        ({"serviceMonitor": {"enabled": True}}, "ServiceMonitor", "serviceMonitor.enabled=false"),
        (doctor.chart.variants["lws"], "LeaderWorkerSet", "learner.workload=statefulset"),
        (doctor.chart.variants["jobset"], "JobSet", "learner.workload=statefulset"),
    ):
        target = doctor.target(values)
        target.served = {name: one for name, one in target.served.items() if not name.endswith(f"/{kind}")}
        finding = doctor.findings(values, target)[kind]
        assert (finding.ok, finding.needed) == (False, True)
        assert said in finding.fix


def test_a_missing_runtime_class_names_the_pods_and_those_that_are_there(doctor: DoctorRig) -> None:
    found = doctor.findings({}, doctor.target({}, runtime={"kata": "kata"}))["RuntimeClass gvisor"]
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
    found = doctor.findings(values, doctor.target(values, storage=classes))["PersistentVolumeClaim/nouscoder-runs"]
    assert (found.ok, found.known) == (ok, known)


def test_given_secrets_and_claims_must_exist_with_their_keys(doctor: DoctorRig) -> None:
    values = {
        "imagePullSecrets": ["registry"],
        "tls": {"enabled": True, "existingSecret": "certificates"},
        "learner": {"persistence": {"existingClaim": "runs"}, "extraEnvFrom": [{"secretRef": {"name": "wandb"}}]},
        "verifier": {"tokens": {"existingSecret": "clients"}},
    }
    findings = doctor.findings(values)
    for name in ("Secret/registry", "Secret/certificates", "Secret/clients", "Secret/wandb"):
        assert not findings[name].ok, name
    assert "PersistentVolumeClaim/runs" in findings
    assert "ca.crt, tls.crt, tls.key" in findings["Secret/certificates"].fix

    there = {
        ("secrets", NAMESPACE, "registry"): secret(".dockerconfigjson"),
        ("secrets", f"{NAMESPACE}-sandbox", "registry"): secret(".dockerconfigjson"),
        ("secrets", NAMESPACE, "certificates"): {"data": {**secret("tls.crt", "tls.key")["data"], "ca.crt": ""}},
        ("secrets", NAMESPACE, "wandb"): secret("WANDB_API_KEY"),
        ("secrets", NAMESPACE, "clients"): secret("token", "tokens"),
        ("persistentvolumeclaims", NAMESPACE, "runs"): {"spec": {"accessModes": ["ReadWriteOnce"]}},
    }
    target = doctor.target(values, objects=there)
    broken = {name: one for name, one in doctor.findings(values, target).items() if not one.ok}
    assert set(broken) == {"Secret/certificates"}
    assert broken["Secret/certificates"].fix.startswith("add the key ca.crt")


def test_a_secret_that_may_not_be_read_is_unknown(doctor: DoctorRig) -> None:
    values = {"imagePullSecrets": ["registry"]}
    found = doctor.findings(values, doctor.target(values, refuses=frozenset({"secrets"})))["Secret/registry"]
    assert (found.ok, found.known) == (False, False)


@pytest.mark.parametrize("call", ["kinds", "has_namespace", "runtime_classes", "storage_classes", "nodes", "quotas"])
def test_a_missing_right_leaves_the_other_findings(doctor: DoctorRig, call: str) -> None:
    findings = doctor.findings({}, doctor.target({}, refuses=frozenset({call})))
    (unknown,) = [one for one in findings.values() if not one.known]
    assert f"may not {call}" in unknown.detail
    assert call == "kinds" or "nodes" in findings


GPU = {"nvidia.com/gpu": 8}
BIG = Amount(192, 2048 * GIB, {**GPU, "rdma/ib": 8})


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (Node("n", Amount(192, 2048 * GIB), True), "nvidia.com/gpu"),
        (Node("n", Amount(192, 2048 * GIB, GPU), True), "rdma/ib"),
        (Node("n", Amount(192, 64 * GIB, BIG.devices), True), "memory"),
        (Node("n", Amount(2, 2048 * GIB, BIG.devices), True), "cpu"),
        (Node("n", BIG, False), "ready"),
        (Node("n", BIG, True, taints=(Taint("dedicated", "other", "NoSchedule"),)), "taints"),
    ],
    ids=["GPUs", "RDMA", "memory", "cores", "closed", "tainted"],
)
def test_a_pod_that_no_node_can_hold_is_named_with_what_is_short(doctor: DoctorRig, node: Node, said: str) -> None:
    values = {
        "learner": {
            "ranksPerPod": 8,
            "rdma": {"resource": "rdma/ib", "count": 8},
            "resources": {
                "requests": {"cpu": "100", "memory": "1000Gi"},
                "limits": {"memory": "1000Gi", "nvidia.com/gpu": 8},
            },
        }
    }
    requests = values["learner"]["resources"]["requests"]  # type: ignore[index]
    requests["nvidia.com/gpu"] = 8
    findings = doctor.findings(values, doctor.target(values, node_list=[node]))
    # Pods that no node admits at all are one finding.
    found = findings.get("a node for StatefulSet/nouscoder-learner") or findings["nodes"]
    assert not found.ok
    assert "StatefulSet/nouscoder-learner" in f"{found.name} {found.detail}"
    assert said in found.detail, found
    fits = doctor.findings(values, doctor.target(values, node_list=[Node("n", BIG, True)]))
    assert "a node for StatefulSet/nouscoder-learner" not in fits
    assert "8 nvidia.com/gpu" in fits["nodes"].detail


def test_tolerations_and_labels_choose_nodes(doctor: DoctorRig) -> None:
    taint = Taint("nvidia.com/gpu", "", "NoSchedule")
    nodes = [Node("cpu", Amount(8, 64 * GIB), True), Node("gpu", BIG, True, {"pool": "gpu"}, (taint,))]
    placed = {"nodeSelector": {"pool": "gpu"}, "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}
    for values, ok in (({"learner": placed}, True), ({"learner": {"nodeSelector": {"pool": "gpu"}}}, False)):
        findings = doctor.findings(values, doctor.target(values, node_list=nodes))
        assert findings["nodes"].ok is ok


def test_all_pods_together_need_room(doctor: DoctorRig) -> None:
    values = {"verifier": {"sandbox": {"pool": {"size": 127}}}}
    found = doctor.findings(values)["room"]
    assert not found.ok
    assert "of 128 pods of runner of the verifier" in found.detail


def quota(**hard: str) -> Document:
    names = {name.replace("__", ".").replace("_", "/"): number for name, number in hard.items()}
    return {"metadata": {"name": "team"}, "spec": {"hard": names}, "status": {"used": dict.fromkeys(names, "0")}}


@pytest.mark.parametrize(
    ("given", "ok"),
    [
        (quota(pods="5", persistentvolumeclaims="3", requests__storage="7Gi"), True),
        (quota(pods="4"), False),
        (quota(persistentvolumeclaims="2"), False),
        (quota(requests__storage="6Gi"), False),
        (quota(requests__cpu="500m"), False),
        (quota(limits__memory="6Gi"), False),
        (quota(memory="100Mi"), False),
        (quota(requests__nvidia__com_gpu="0"), True),
    ],
)
def test_a_quota_is_compared_with_the_whole_install(doctor: DoctorRig, given: Document, ok: bool) -> None:
    findings = doctor.findings({}, doctor.target({}, quota_list=[given]))
    assert findings[f"ResourceQuota/team in {NAMESPACE}"].ok is ok, findings[f"ResourceQuota/team in {NAMESPACE}"]


def test_quota_and_room_are_not_asked_again_for_a_release_that_is_there(doctor: DoctorRig) -> None:
    def answer(document: Document) -> DryRun:
        mine = {
            **document,
            "metadata": {**document["metadata"], "annotations": {"meta.helm.sh/release-name": "nouscoder"}},
        }
        return DryRun(Outcome.ADMITTED, exists=document["kind"] != "Pod", document=mine)

    findings = doctor.findings({}, doctor.target({}, answers=answer, quota_list=[quota(pods="1")]))
    assert "room" not in findings
    assert not any("ResourceQuota" in name for name in findings)
    assert report(list(findings.values()), "it", as_json=True)[1] == 0


def test_objects_of_another_owner_are_named(doctor: DoctorRig) -> None:
    def answer(document: Document) -> DryRun:
        there = document["kind"] == "Secret"
        annotations = {"meta.helm.sh/release-name": "other"} if document["metadata"]["name"].endswith("redis") else {}
        changed = {**document, "metadata": {**document["metadata"], "annotations": annotations}}
        return DryRun(Outcome.ADMITTED, exists=there, document=changed)

    findings = doctor.findings({}, doctor.target({}, answers=answer))
    assert "the release other" in findings["Secret/nouscoder-redis"].detail
    assert "no release" in findings["Secret/nouscoder-verifier-tokens"].detail


EXTERNAL = {"redis": {"external": {"enabled": True, "existingSecret": "theirs", "secretKey": "u", "caKey": "ca.pem"}}}


def test_an_external_redis_is_asked_with_the_url_and_authority_of_its_secret(doctor: DoctorRig) -> None:
    asked = []

    def ask(url: str, authority: str) -> RedisFacts:
        asked.append((url, authority))
        return RedisFacts("6.0.1", "allkeys-lru", False, 0)

    stored = {"u": base64.b64encode(b"rediss://u:p@h:1/0").decode(), "ca.pem": base64.b64encode(b"PEM").decode()}
    target = doctor.target(EXTERNAL, objects={("secrets", NAMESPACE, "theirs"): {"data": stored}})
    found = doctor.findings(EXTERNAL, target, ask)["Redis"]
    assert asked == [("rediss://u:p@h:1/0", "PEM")]
    assert not found.ok
    for word in ("6.2", "noeviction", "appendonly"):
        assert word in found.fix
    assert judge_redis(SILENT).ok


def test_a_redis_that_does_not_answer_here_is_unknown_and_the_charts_own_is_not_asked(doctor: DoctorRig) -> None:
    def ask(url: str, authority: str) -> RedisFacts:
        raise RedisSilent("redis://h:1/0 does not answer here: refused")

    data = secret("u", "ca.pem")
    found = doctor.findings(EXTERNAL, doctor.target(EXTERNAL, objects={("secrets", NAMESPACE, "theirs"): data}), ask)
    assert (found["Redis"].ok, found["Redis"].known) == (False, False)
    assert "Redis" not in doctor.findings({}, None, ask)


def test_values_that_the_chart_refuses_are_one_finding(doctor: DoctorRig) -> None:
    def refuse(release: Release, version: str) -> list[Document]:
        raise RenderError("helm refuses the values: learner.pods is 0", "change the value that this message names")

    target = doctor.target({})
    found = examine_install(target, Release("nouscoder", NAMESPACE, CHART, ()), refuse, lambda url, authority: SILENT)
    assert [one.name for one in found] == ["API server", "chart"]
    assert not target.tried


def test_an_api_server_that_does_not_answer_is_the_only_finding(
    doctor: DoctorRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = doctor.target({})

    def silent() -> str:
        raise ClusterError("cannot read the version: the API server does not answer")

    monkeypatch.setattr(target, "version", silent)
    assert list(doctor.findings({}, target)) == ["API server"]


def test_every_pattern_of_a_refusal_is_reached_by_one_of_the_messages() -> None:
    fixes = {fix_for(message, "here") for message, _ in REFUSALS}
    assert len(fixes) == len(REFUSALS)
