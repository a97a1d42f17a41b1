"""The rights of the chart's pods: the restricted Pod Security Standard, API tokens, and network connections."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helm_python as helm
import pytest
from tests import userns_runners
from tests.chart.conftest import pod_specs
from tests.runsc_runners import CHART_CAPABILITIES

if TYPE_CHECKING:
    from tests.chart.conftest import ChartRig

RUNNERS = "here-sandbox"  # the namespace of the runner pods
NO_PODS = ("local", "modal")  # variants without runner pods
# What the standard's level `baseline` lets a container add (Kubernetes 1.29).
BASELINE = {"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP"}
BASELINE |= {"SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"}
CLUSTER_WIDE = {"Namespace", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "ClusterRole"}
CLUSTER_WIDE |= {"ClusterRoleBinding", "PriorityClass", "RuntimeClass", "MutatingAdmissionPolicy", "PersistentVolume"}
Pod = dict[str, Any]
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def containers_of(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for key in ("initContainers", "containers", "ephemeralContainers") for one in spec.get(key, [])]


def violations(pod: Pod) -> list[str]:
    """A pod's violations of the standard's level `restricted` (Kubernetes 1.29); empty when it is admitted."""
    spec = pod["spec"]
    found = [f"{key}: true" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    for volume in spec.get("volumes", []):
        found += [f"volume {volume['name']}: {kind}" for kind in volume if kind != "name" and kind not in VOLUMES]
    found += [f"sysctl {one['name']}" for one in spec.get("securityContext", {}).get("sysctls", [])]
    for container in containers_of(spec):
        found += [f"{container['name']}: {fault}" for fault in _faults(container, spec.get("securityContext", {}))]
    return found


def _faults(container: dict[str, Any], of_pod: dict[str, Any]) -> Iterator[str]:
    own = container.get("securityContext", {})
    both = {**of_pod, **own}
    capabilities = own.get("capabilities", {})
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    if "ALL" not in capabilities.get("drop", []):
        yield "capabilities not dropped"
    if set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield "capabilities added"
    if both.get("runAsNonRoot") is not True:
        yield "runAsNonRoot"
    if both.get("runAsUser") == 0:
        yield "runAsUser 0"
    if both.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccompProfile"
    if own.get("procMount", "Default") != "Default":
        yield "procMount"
    if both.get("seLinuxOptions") or both.get("windowsOptions", {}).get("hostProcess"):
        yield "seLinuxOptions or hostProcess"
    if any(port.get("hostPort") for port in container.get("ports", [])):
        yield "hostPort"


def test_every_pod_is_restricted_except_those_that_the_readme_names(pods: dict[str, dict[str, Pod]]) -> None:
    found = {(variant, name): violations(pod) for variant, named in pods.items() for name, pod in named.items()}
    assert len(found) > 50
    for (variant, name), faults in found.items():
        if "sandbox" in name:
            assert faults == ["runner: capabilities added", "runner: runAsNonRoot", "runner: runAsUser 0"]
        elif (variant, name) == ("local", "Deployment/nouscoder-verifier"):
            assert faults == [
                "verifier: privileged",
                "verifier: allowPrivilegeEscalation",
                "verifier: capabilities not dropped",
                "verifier: runAsNonRoot",
                "verifier: runAsUser 0",
                "verifier: seccompProfile",
            ]
        else:
            assert faults == [], f"{variant}: {name}"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda spec: spec.update(hostPID=True), "hostPID"),
        (lambda spec: spec["volumes"].append({"name": "x", "hostPath": {"path": "/"}}), "hostPath"),
        (lambda spec: spec["initContainers"][0]["securityContext"].pop("capabilities"), "prepare: capabilities"),
        (lambda spec: spec["containers"][1]["securityContext"].update(runAsUser=0), "run: runAsUser"),
        (lambda spec: spec["securityContext"].pop("seccompProfile"), "seccompProfile"),
        (lambda spec: spec["containers"][0]["ports"][0].update(hostPort=1), "hostPort"),
    ],
)
def test_the_check_finds(pods: dict[str, dict[str, Pod]], change: Any, fault: str) -> None:
    pod = copy.deepcopy(pods["default"]["StatefulSet/nouscoder-learner"])
    change(pod["spec"])
    assert any(fault in one for one in violations(pod))


def test_only_the_gateway_of_a_managed_pool_has_a_token(pods: dict[str, dict[str, Pod]]) -> None:
    with_token = {
        (variant, name)
        for variant, named in pods.items()
        for name, pod in named.items()
        if pod["spec"]["automountServiceAccountToken"] is not False
    }
    managed = set(pods) - {"unmanaged", "local", "modal"}
    assert with_token == {
        ("snapshots", "CronJob/nouscoder-backup"),
        *((variant, "Deployment/nouscoder-verifier") for variant in managed),
    }


def test_the_account_of_a_pod_is_always_named(pods: dict[str, dict[str, Pod]]) -> None:
    """Without a name, an upgrade that deletes an account would keep its name in the pod, and no pod could start."""
    for variant, named in pods.items():
        own = {"Deployment/nouscoder-verifier": "nouscoder-verifier"}
        own |= {"CronJob/nouscoder-backup": "nouscoder-backup"} if variant == "snapshots" else {}
        own |= {"StatefulSet/nouscoder-learner": "nouscoder-learner"} if variant == "released" else {}
        for name, pod in named.items():
            if name != "Pod/nouscoder-test" and "sandbox" not in name:
                assert pod["spec"]["serviceAccountName"] == own.get(name, "default")


def test_the_gateway_may_handle_pods_and_leases_in_the_namespace_of_the_runners_and_nothing_else(
    chart: ChartRig,
) -> None:
    for variant, values in chart.variants.items():
        documents = chart.documents(values)
        others = ("nouscoder-backup", "nouscoder-learner")
        roles = [one for one in documents if "Role" in one["kind"] and one["metadata"]["name"] not in others]
        if variant in ("unmanaged", "local", "modal"):
            assert roles == []
            continue
        assert [one["kind"] for one in roles] == ["Role", "RoleBinding"]
        verbs = ["get", "list", "watch", "create", "delete", "deletecollection", "patch"]
        leases = ["get", "list", "create", "delete", "patch"]
        runners = [{"apiGroups": [""], "resources": ["pods"], "verbs": verbs}]
        if variant == "agent-sandbox":
            claims = {"apiGroups": ["extensions.agents.x-k8s.io"], "resources": ["sandboxclaims"]}
            reading = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}
            runners = [claims | {"verbs": ["list", "watch", "create", "delete", "patch"]}, reading]
        leasing = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": leases}
        assert roles[0]["rules"] == [*runners, leasing]
        assert {one["metadata"]["namespace"] for one in roles} == {RUNNERS}
        (subject,) = roles[1]["subjects"]
        assert (subject["name"], subject["namespace"]) == ("nouscoder-verifier", "here")


def test_the_policy_fixes_every_variable_and_the_probe_of_the_pod_that_the_chart_makes(chart: ChartRig) -> None:
    seen = 0
    for values in (*chart.variants.values(), {"verifier": {"sandbox": {"pool": {"existingSecret": "ours"}}}}):
        documents = chart.documents(values)
        for policy in (one for one in documents if one["kind"] == "ValidatingAdmissionPolicy"):
            (pod,) = (pod for name, pod in pod_specs(documents).items() if "nouscoder-sandbox" in name)
            (container,) = pod["spec"]["containers"]
            rules = {one["message"]: one["expression"] for one in policy["spec"]["validations"]}
            environment = rules[
                "a runner has the environment of the chart, which reads no other Secret than the pool's key"
            ]
            assert json.dumps([one["name"] for one in container["env"]], separators=(",", ":")) in environment
            for one in container["env"]:
                source = one.get("valueFrom", {}).get("secretKeyRef")
                given = f"'{source['name']}'" if source else f"orValue(\"\") == '{one['value']}' && !has(e.valueFrom)"
                assert given in environment.partition(f"(e.name == '{one['name']}'")[2].partition("||")[0]
            probe = rules["a runner has the readiness probe of the chart and no other probe"]
            assert {name for name in container if name.endswith("Probe")} == {"readinessProbe"}
            assert set(container["readinessProbe"]) == {"tcpSocket", "periodSeconds", "timeoutSeconds"}
            for key in ("periodSeconds", "timeoutSeconds"):
                assert f"{key}.orValue(0) == {container['readinessProbe'][key]} " in probe
            assert f"port.orValue(\"\") == '{container['readinessProbe']['tcpSocket']['port']}'" in probe
            seen += 1
    assert seen > 15


def test_the_namespace_of_the_runners_holds_their_key_and_nothing_else(chart: ChartRig) -> None:
    for variant, values in chart.variants.items():
        there: dict[str, set[str]] = {}
        for one in chart.documents(values):
            if one["metadata"].get("namespace") == RUNNERS:
                there.setdefault(one["kind"], set()).add(one["metadata"]["name"])
        pods = there.keys() & {"Deployment", "Service", "PodDisruptionBudget", "SandboxTemplate", "SandboxWarmPool"}
        assert there.get("Secret", set()) == (set() if variant in NO_PODS else {"nouscoder-sandbox-key"}), variant
        assert there.keys() - pods <= {"Secret", "Role", "RoleBinding", "NetworkPolicy", "ResourceQuota"}, variant
        assert ("ResourceQuota" in there) is (variant not in NO_PODS), variant
        assert bool(pods) is (variant in ("unmanaged", "agent-sandbox")), variant


@pytest.mark.parametrize(
    ("verifier", "pods", "leases"),
    [
        ({}, 20 + 3 * 3, 23),
        ({"replicas": 4, "sandbox": {"pool": {"size": 30, "spares": 2}}}, 20 + 3 * 4 * 32, 32),
        ({"autoscaling": {"kind": "hpa", "max": 10}}, 20 + 3 * 10 * 3, 50),
        ({"sandbox": {"namespace": {"maxPods": 7}}}, 7, 23),
        ({"sandbox": {"namespace": {"name": "ours", "create": False, "maxPods": 7}}}, 7, 23),
        ({"sandbox": {"namespace": {"name": "ours", "create": False}}}, None, None),
    ],
)
def test_a_quota_bounds_what_the_token_of_the_verifier_can_make(
    chart: ChartRig, verifier: dict[str, Any], pods: int | None, leases: int | None
) -> None:
    """The policy bounds each pod. A namespace of somebody else has a quota only with a number of theirs."""
    found = [one["spec"]["hard"] for one in chart.documents({"verifier": verifier}) if one["kind"] == "ResourceQuota"]
    wanted = {"count/pods": str(pods), "count/leases.coordination.k8s.io": str(leases)}
    assert found == ([wanted] if pods else [])


@pytest.mark.parametrize(
    ("resources", "requests", "limits"),
    [
        ({}, {"cpu": "100m", "memory": "128Mi", "ephemeral-storage": "1Gi"}, {"memory": "5Gi"}),
        (
            {"requests": None, "limits": {"cpu": 2, "memory": "8Gi"}},
            {"cpu": "2", "memory": "8Gi", "ephemeral-storage": "1Gi"},
            {"cpu": "2", "memory": "8Gi"},
        ),
    ],
)
def test_the_policy_bounds_the_requests_and_limits_of_a_runner(
    chart: ChartRig, resources: dict[str, Any], requests: dict[str, str], limits: dict[str, str]
) -> None:
    """tests/cluster/test_sandbox_namespace.py tries larger pods."""
    documents = chart.documents({"verifier": {"sandbox": {"pool": {"resources": resources}}}})
    (policy,) = (one for one in documents if one["kind"] == "ValidatingAdmissionPolicy")
    messages = [rule["message"] for rule in policy["spec"]["validations"]]
    (said,) = (one for one in messages if one.startswith("a runner requests at most"))
    assert json.loads(said[len("a runner requests at most ") : said.index("}") + 1]) == requests
    for kind, most in limits.items():
        assert f"a runner has a limit of {kind}, at most {most}" in messages
    assert sum(" has a limit of " in one for one in messages) == len(limits)


def test_what_outlives_the_namespace_of_the_release_has_one_label(chart: ChartRig) -> None:
    """docs/operating.md, "Uninstall, and what is kept", removes it by that label."""
    place = {"enabled": True, "namespace": "monitoring"}
    shared = {"dashboards": place, "prometheusRule": place, "serviceMonitor": place}
    for values in (shared, *chart.variants.values()):
        for one in chart.documents(values):
            where = one["metadata"].get("namespace", "here")
            if one["kind"] in CLUSTER_WIDE or where not in ("here", RUNNERS):
                assert one["metadata"]["labels"]["nouscoder/release-namespace"] == "here", one["kind"]


def test_clients_of_other_namespaces_are_beside_those_of_the_own(chart: ChartRig) -> None:
    team = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "team-a"}}}]
    policies = {"gradingFrom": team, "samplingFrom": team}
    openai = chart.variants["openai"]
    found = connections(chart.documents({**openai, "networkPolicy": policies}))
    usual = connections(chart.documents(openai))
    assert found["verifier"][0] == usual["verifier"][0] | {("team-a", "TCP 8080"), ("team-a", "TCP 50051")}
    assert found["generation"][0] == usual["generation"][0] | {("team-a", "TCP 8000")}


def test_both_namespaces_have_the_same_key(chart: ChartRig) -> None:
    found = [one for one in chart.documents() if one["metadata"]["name"] == "nouscoder-sandbox-key"]
    assert [one["metadata"]["namespace"] for one in found] == ["here", RUNNERS]
    assert found[0]["stringData"] == found[1]["stringData"]


def test_the_namespace_of_the_runners_denies_every_connection_of_every_pod(chart: ChartRig) -> None:
    (deny,) = (
        one["spec"]
        for one in chart.documents()
        if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == "nouscoder-sandbox-default-deny"
    )
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_only_pods_of_this_release_reach_runners(chart: ChartRig) -> None:
    """The peers of both ends are in the other's namespace, because labels alone could be those of another release."""
    ends = {}
    for one in chart.documents():
        for side, rules in (("from", "ingress"), ("to", "egress")):
            for rule in one["spec"].get(rules, []) if one["kind"] == "NetworkPolicy" else []:
                for peer in rule.get(side, []) if {"protocol": "TCP", "port": 7070} in rule["ports"] else []:
                    labels = peer["podSelector"]["matchLabels"]
                    assert labels["app.kubernetes.io/instance"] == "nouscoder"
                    where = peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
                    ends[side] = (where, labels["app.kubernetes.io/component"])
    assert ends == {"from": ("here", "verifier"), "to": (RUNNERS, "sandbox")}


def test_roots_are_read_only_and_no_service_links_are_set(pods: dict[str, dict[str, Pod]]) -> None:
    """With service links, the environment of a pod would show every Service of the namespace to candidates."""
    for named in pods.values():
        for pod in named.values():
            assert pod["spec"]["enableServiceLinks"] is False
            for container in containers_of(pod["spec"]):
                assert container["securityContext"]["readOnlyRootFilesystem"] is True
                assert container["resources"]["limits"]["memory"]
                assert not container["image"].endswith(":latest")


def test_a_runner_has_only_its_key(pods: dict[str, dict[str, Pod]]) -> None:
    runners = (
        pods["default"]["ConfigMap/nouscoder-sandbox/runner-pod.json"],
        pods["unmanaged"]["Deployment/nouscoder-sandbox"],
    )
    for pod in runners:
        spec = pod["spec"]
        assert spec["runtimeClassName"] == "gvisor"
        assert (spec["dnsPolicy"], spec["dnsConfig"]) == ("None", {"nameservers": ["127.0.0.1"]})
        assert [sorted(volume) for volume in spec["volumes"]] == [["emptyDir", "name"]]
        assert {one["name"]: "valueFrom" in one for one in env_of(spec)}["NOUSCODER_RUNNER_KEY"]
    # The verifier replaces its runners; the kubelet starts those of a Deployment again.
    assert [pod["spec"].pop("restartPolicy") for pod in runners] == ["Never", "Always"]
    assert env_of(runners[0]["spec"]).pop() == {"name": "NOUSCODER_RUNNER_IDLE_S", "value": "600"}
    assert runners[0]["spec"] == runners[1]["spec"]


def test_a_claimed_runner_is_the_pod_that_the_verifier_would_make(chart: ChartRig) -> None:
    """It alone waits in the pool until its first verifier comes. Neither a claim nor the controller changes it."""
    values = chart.variants["agent-sandbox"]
    own = pod_specs(chart.documents())["ConfigMap/nouscoder-sandbox/runner-pod.json"]
    claimed = pod_specs(chart.documents(values))["SandboxTemplate/nouscoder-sandbox/runner"]
    assert env_of(claimed["spec"]).pop() == {"name": "NOUSCODER_RUNNER_WAITS", "value": "1"}
    assert claimed["spec"] == own["spec"]
    made_by = {"app.kubernetes.io/managed-by": "nouscoder-verifier"}
    assert claimed["metadata"]["labels"] | made_by == own["metadata"]["labels"]
    spec = chart.one("SandboxTemplate", "nouscoder-sandbox", values)["spec"]
    assert {spec[key] for key in ("envVarsInjectionPolicy", "volumeClaimTemplatesPolicy")} == {"Disallowed"}
    assert (spec["networkPolicyManagement"], spec["service"]) == ("Unmanaged", False)


def test_a_verifier_claims_its_runners_from_the_warm_pool_of_the_release(chart: ChartRig) -> None:
    values = {"verifier": {"replicas": 2, "sandbox": {"pool": {"source": "agentSandbox", "size": 4, "spares": 3}}}}
    pool = chart.one("SandboxWarmPool", "nouscoder-sandbox", values)
    template = chart.one("SandboxTemplate", "nouscoder-sandbox", values)
    claim = json.loads(chart.one("ConfigMap", "nouscoder-sandbox", values)["data"]["runner-claim.json"])
    assert (claim["apiVersion"], claim["kind"]) == (pool["apiVersion"], "SandboxClaim")
    assert claim["spec"]["warmPoolRef"] == {"name": pool["metadata"]["name"]}
    assert pool["spec"]["sandboxTemplateRef"] == {"name": template["metadata"]["name"]}
    assert {one["metadata"]["namespace"] for one in (claim, pool, template)} == {RUNNERS}
    assert pool["spec"]["replicas"] == 2 * 3
    text = chart.one("ConfigMap", "nouscoder-config", values)["data"]["config.json"]
    sandbox = json.loads(text)["verifier"]["sandbox"]
    assert (sandbox["pool_spares"], Path(sandbox["pool_template"]).name) == (0, "runner-claim.json")
    hard = chart.one("ResourceQuota", "nouscoder-sandbox", values)["spec"]["hard"]
    assert hard["count/pods"] == hard["count/sandboxclaims.extensions.agents.x-k8s.io"] == str(20 + 3 * (2 * 4 + 6))


@pytest.mark.parametrize("spares", [0, 1])
def test_a_warm_pool_has_at_least_one_runner_unless_the_release_is_suspended(chart: ChartRig, spares: int) -> None:
    values = {"verifier": {"sandbox": {"pool": {"source": "agentSandbox", "spares": spares}}}}
    for suspend in (False, True):
        pool = chart.one("SandboxWarmPool", "nouscoder-sandbox", values | {"suspend": suspend})
        assert pool["spec"]["replicas"] == int(not suspend)


def test_a_runner_has_the_tested_capabilities_which_baseline_admits(chart: ChartRig) -> None:
    """tests/services/test_runner_capabilities.py shows that these suffice, and that none is spare."""
    documents = chart.documents()
    (text,) = (one["data"]["runner-pod.json"] for one in documents if "runner-pod.json" in one.get("data", {}))
    (container,) = json.loads(text)["spec"]["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": list(CHART_CAPABILITIES)}
    assert set(CHART_CAPABILITIES) <= BASELINE
    (labels,) = (one["metadata"]["labels"] for one in documents if one["kind"] == "Namespace")
    assert labels["pod-security.kubernetes.io/enforce"] == "baseline"


def test_a_runner_with_users_of_its_own_needs_the_policy_that_admits_nothing_else(chart: ChartRig) -> None:
    """Its rights act on its own user namespace only. The namespace of the runners has to admit privileged pods."""
    values = {"verifier": {"sandbox": {"backend": "userns"}}}
    documents = chart.documents(values)
    (text,) = (one["data"]["runner-pod.json"] for one in documents if "runner-pod.json" in one.get("data", {}))
    spec = json.loads(text)["spec"]
    assert (spec["hostUsers"], spec.get("runtimeClassName")) == (False, None)
    assert spec["securityContext"]["seccompProfile"] == {"type": "Unconfined"}
    security = spec["containers"][0]["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"], "add": list(userns_runners.CHART_CAPABILITIES)}
    assert (security["procMount"], security["allowPrivilegeEscalation"]) == ("Unmasked", False)
    assert {"name": "NOUSCODER_RUNNER_KERNEL", "value": "linux"} in env_of(spec)
    (labels,) = (one["metadata"]["labels"] for one in documents if one["kind"] == "Namespace")
    assert labels["pod-security.kubernetes.io/enforce"] == "privileged"
    (policy,) = (one for one in documents if one["kind"] == "ValidatingAdmissionPolicy")
    rules = {rule["message"]: rule["expression"] for rule in policy["spec"]["validations"]}
    assert rules["a runner has users of its own (hostUsers is false)"] == "!object.spec.?hostUsers.orValue(true)"
    values["verifier"]["sandbox"]["admissionPolicy"] = "never"
    with pytest.raises(helm.HelmError, match="userns needs the ValidatingAdmissionPolicy"):
        chart.documents(values)


def env_of(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The variables of the first container."""
    found: list[dict[str, Any]] = spec["containers"][0]["env"]
    return found


def test_passwords_are_files_and_not_arguments(pods: dict[str, dict[str, Pod]]) -> None:
    """Only the runner's key, Modal's token and the exporter's password are environment variables, from a Secret."""
    from_secrets = {
        one["name"]
        for named in pods.values()
        for pod in named.values()
        for container in containers_of(pod["spec"])
        for one in container.get("env", [])
        if "secretKeyRef" in one.get("valueFrom", {})
    }
    # Modal's client reads its token from the environment. No candidate runs in that container or in its pid namespace.
    # The exporter of Redis has no other way; its container has nothing else.
    assert from_secrets == {"NOUSCODER_RUNNER_KEY", "MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET", "REDIS_PASSWORD"}


DNS = {
    ("kube-system", "TCP 53"),
    ("kube-system", "UDP 53"),
    ("169.254.20.10/32", "TCP 53"),
    ("169.254.20.10/32", "UDP 53"),
}
EVERY_PORT = {"protocol": "every", "port": "port"}  # of a rule that names none
API = {(block, f"TCP {port}") for block in ("0.0.0.0/0", "::/0") for port in (443, 6443)}
METRICS = {("any namespace", "TCP 9090"), ("test", "TCP 9090")}
GRADING = {(who, f"TCP {port}") for who in ("this namespace", "test") for port in (8080, 50051)}
BROKER_CLIENTS = {(who, "TCP 50052") for who in ("verifier", "generation", "learner")}

# All connections: component -> (allowed clients, allowed servers)
CONNECTIONS: dict[str, tuple[set[tuple[str, str]], set[tuple[str, str]]]] = {
    "redis": ({("broker", "TCP 6379")}, set()),
    "broker": (BROKER_CLIENTS | METRICS, {("redis", "TCP 6379")} | DNS),
    "verifier": (
        GRADING | METRICS | {("learner", "TCP 50051"), ("learner", "TCP 9090")},
        {("sandbox", "TCP 7070"), ("broker", "TCP 50052")} | API | DNS,
    ),
    "sandbox": ({("verifier", "TCP 7070")}, set()),
    "generation": ({("learner", "TCP 50053")} | METRICS, {("broker", "TCP 50052"), ("learner", "TCP 50054")} | DNS),
    "learner": (
        {("generation", "TCP 50054")} | METRICS,
        {("broker", "TCP 50052"), ("generation", "TCP 50053"), ("verifier", "TCP 50051"), ("verifier", "TCP 9090")}
        | DNS,
    ),
    "test": (
        set(),
        {(who, "TCP 9090") for who in ("verifier", "broker", "generation", "learner")}
        | {("verifier", "TCP 8080")}
        | DNS,
    ),
}


def test_the_network_policies_allow_only_the_listed_connections(chart: ChartRig) -> None:
    assert connections(chart.documents()) == CONNECTIONS


def test_generation_reaches_the_verifier_only_with_an_environment_that_calls_it(chart: ChartRig) -> None:
    environment = {"config": {"generation": {"environment": {"kind": "feedback"}}}}
    for values, is_open in ((environment, True), ({}, False)):
        documents = chart.documents(values)
        found = connections(documents)
        assert (("verifier", "TCP 50051") in found["generation"][1]) is is_open
        assert (("generation", "TCP 50051") in found["verifier"][0]) is is_open
        (pod,) = [
            one
            for one in documents
            if one["kind"] in ("Deployment", "StatefulSet") and one["metadata"]["name"].endswith("-generation")
        ]
        assert ("tokens/token" in json.dumps(pod)) is is_open


def test_connections_of_the_verifier_alone(chart: ChartRig) -> None:
    assert connections(chart.documents(chart.variants["verifier-only"])) == {
        "verifier": (GRADING | METRICS, {("sandbox", "TCP 7070")} | API | DNS),
        "sandbox": CONNECTIONS["sandbox"],
        "test": (set(), {("verifier", "TCP 8080"), ("verifier", "TCP 9090")} | DNS),
    }


def test_connections_of_other_variants(chart: ChartRig) -> None:
    local = connections(chart.documents(chart.variants["local"]))
    assert local["verifier"][1] == {("broker", "TCP 50052")} | DNS
    unmanaged = connections(chart.documents(chart.variants["unmanaged"]))
    assert unmanaged["verifier"][1] == {("sandbox", "TCP 7070"), ("broker", "TCP 50052")} | DNS
    modal = connections(chart.documents(chart.variants["modal"]))
    cloud = {(block, "TCP 443") for block in ("0.0.0.0/0", "::/0")}
    assert modal["verifier"][1] == {("broker", "TCP 50052")} | cloud | DNS
    assert "sandbox" not in modal
    assert connections(chart.documents(chart.variants["spill-over"]))["verifier"][1] == CONNECTIONS["verifier"][1]
    external = connections(chart.documents(chart.variants["external-redis"]))
    assert external["broker"][1] == {("anybody", "TCP 6379")} | DNS
    assert "redis" not in external
    openai = connections(chart.documents(chart.variants["openai"]))
    assert openai["generation"][0] == CONNECTIONS["generation"][0] | {("this namespace", "TCP 8000")}
    nobody = {**chart.variants["openai"], "networkPolicy": {"samplingFrom": []}}
    assert connections(chart.documents(nobody))["generation"][0] == CONNECTIONS["generation"][0]


def test_ranks_reach_each_other_on_every_port_and_others_do_not(chart: ChartRig) -> None:
    ranks = {(who, "every port") for who in ("learner", "learner-worker")}
    for variant in ("ranks", "lws", "jobset"):
        found = connections(chart.documents(chart.variants[variant]))
        assert found["learner-worker"] == (ranks, ranks | DNS)
        assert found["learner"] == (CONNECTIONS["learner"][0] | ranks, CONNECTIONS["learner"][1] | ranks)


def test_a_rule_without_peers_is_never_rendered(chart: ChartRig) -> None:
    """In a NetworkPolicy a rule without peers allows all peers."""
    closed = connections(chart.documents(chart.variants["closed"]))
    assert closed["verifier"][0] == {("learner", "TCP 50051"), ("learner", "TCP 9090")}
    assert closed["broker"][0] == BROKER_CLIENTS
    assert "test" not in closed


def test_every_pod_is_denied_all_other_connections(chart: ChartRig, pods: dict[str, dict[str, Pod]]) -> None:
    for variant, values in chart.variants.items():
        if variant == "open":
            continue
        deny = next(
            one
            for one in chart.documents(values)
            if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == "nouscoder-default-deny"
        )["spec"]
        assert (deny["policyTypes"], "ingress" in deny, "egress" in deny) == (["Ingress", "Egress"], False, False)
        selected = deny["podSelector"]["matchLabels"].items()
        assert all(selected <= pod["metadata"]["labels"].items() for pod in pods[variant].values())
        # That policy is for the release's namespace. The runners' has one of its own, for every pod.
        (own,) = [
            one["metadata"].get("namespace")
            for one in chart.documents(values)
            if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == "nouscoder-sandbox-default-deny"
        ] or [None]
        assert own == (None if variant in NO_PODS else RUNNERS)


def test_both_ends_of_a_connection_allow_it(chart: ChartRig) -> None:
    """Traffic passes only if the client may connect and the server admits it."""
    for variant in set(chart.variants) - {"open"}:
        found = connections(chart.documents(chart.variants[variant]))
        going = {(name, to, port) for name, (_, out) in found.items() for to, port in out if to in found}
        coming = {(who, name, port) for name, (into, _) in found.items() for who, port in into if who in found}
        assert going - coming == set(), variant
        assert {one for one in coming - going if one[2] != "TCP 50051"} == set(), variant


def connections(documents: list[dict[str, Any]]) -> dict[str, tuple[set[tuple[str, str]], set[tuple[str, str]]]]:
    """The allowed (peer, port) pairs of each component: incoming, outgoing."""
    found = {}
    for one in documents:
        if one["kind"] == "NetworkPolicy" and not one["metadata"]["name"].endswith("default-deny"):
            spec = one["spec"]
            component = spec["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            found[component] = (_ends(spec["ingress"], "from"), _ends(spec["egress"], "to"))
    return found


def _ends(rules: list[dict[str, Any]], side: str) -> set[tuple[str, str]]:
    return {
        (_peer(peer), f"{port['protocol']} {port['port']}")
        for rule in rules
        for peer in rule.get(side) or [None]
        for port in rule.get("ports", [EVERY_PORT])
    }


def _peer(peer: dict[str, Any] | None) -> str:
    if peer is None:
        return "anybody"
    if "ipBlock" in peer:
        return str(peer["ipBlock"]["cidr"])
    if "namespaceSelector" in peer and "podSelector" not in peer:
        labels = peer["namespaceSelector"].get("matchLabels", {})
        return str(labels.get("kubernetes.io/metadata.name", "any namespace"))
    labels = peer["podSelector"].get("matchLabels", {})
    return str(labels.get("app.kubernetes.io/component", "this namespace"))
