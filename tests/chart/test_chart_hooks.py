"""The hooks of the values: images, accounts, security contexts, placement, extra parts of pods, ways in, Secrets."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helm_python as helm
import kubernetes_validate
import pytest
from tests.chart.conftest import FIRST_VERSION, pod_specs

if TYPE_CHECKING:
    from tests.chart.conftest import ChartRig

ROOT = Path(__file__).parents[2]
OLDEST = "1.29"
# Where the images of the project are published.
REGISTRY = "nouscoder"
# Component -> its pod.
PODS = {
    "broker": "Deployment/nouscoder-broker",
    "verifier": "Deployment/nouscoder-verifier",
    "generation": "Deployment/nouscoder-generation",
    "learner": "StatefulSet/nouscoder-learner",
    "redis": "StatefulSet/nouscoder-redis",
}
RUNNER = "ConfigMap/nouscoder-sandbox/runner-pod.json"
GIVEN = {
    "redis": {"existingSecret": "redis-of-ours"},
    "verifier": {"tokens": {"existingSecret": "clients"}, "sandbox": {"pool": {"existingSecret": "pool"}}},
}

Document = dict[str, Any]


def checked(chart: ChartRig, values: dict[str, Any]) -> dict[str, Document]:
    """Every pod, by kind/name, after Kubernetes' schema has accepted every resource that differs from the defaults."""
    documents = chart.documents(values)
    usual = {text_of(one) for one in chart.documents()}  # checked by test_chart_renders
    found = pod_specs(documents)
    for one in [*documents, found[RUNNER]]:
        if text_of(one) not in usual:
            kubernetes_validate.validate(one, FIRST_VERSION.get(one["kind"], OLDEST), strict=True)
    return found


def text_of(document: Document) -> str:
    return json.dumps(document, sort_keys=True)


def containers(pod: Document) -> list[Document]:
    spec = pod["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def test_the_runners_can_have_the_image_with_the_libraries_of_judges(chart: ChartRig) -> None:
    values: dict[str, Any] = {"image": {"tag": "7"}, "verifier": {"sandbox": {"libraries": "judge"}}}
    pods = checked(chart, values)
    assert containers(pods[RUNNER])[0]["image"] == f"{REGISTRY}/nouscoder-sandbox:7-judge"
    assert containers(pods[PODS["verifier"]])[0]["image"] == f"{REGISTRY}/nouscoder-verifier:7"
    (policy,) = (one for one in chart.documents(values) if one["kind"] == "ValidatingAdmissionPolicy")
    assert f"'{REGISTRY}/nouscoder-sandbox:7-judge'" in json.dumps(policy)
    values["verifier"]["sandbox"]["image"] = {"digest": "sha256:" + "0" * 64}
    assert containers(checked(chart, values)[RUNNER])[0]["image"].endswith("nouscoder-sandbox@sha256:" + "0" * 64)


def for_each(values: dict[str, Any], components: tuple[str, ...] = tuple(PODS)) -> dict[str, Any]:
    return {name: dict(values) for name in components}


def test_a_digest_replaces_the_tag_of_its_component_only(chart: ChartRig) -> None:
    places = [place for name, place in PODS.items() if name != "generation"] + [RUNNER]
    digests = {place: f"sha256:{number:064x}" for number, place in enumerate(places)}
    values: dict[str, Any] = {
        name: {"image": {"digest": digests[place]}} for name, place in PODS.items() if place in digests
    }
    values["verifier"]["sandbox"] = {"image": {"digest": digests[RUNNER]}}
    digests["Pod/nouscoder-test"] = digests[PODS["verifier"]]  # it runs in the verifier's image
    for name, pod in checked(chart, values).items():
        for container in containers(pod):
            assert re.fullmatch(r"(nouscoder|library)/[a-z-]+(:[a-z0-9.]+|@sha256:[0-9a-f]{64})", container["image"])
            assert container["image"].partition("@")[2] == digests.get(name, ""), name


def test_every_pod_pulls_with_the_same_credentials(chart: ChartRig) -> None:
    for pod in checked(chart, {"imagePullSecrets": ["registry"]}).values():
        assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]


def test_placement_of_every_component(chart: ChartRig) -> None:
    spread = {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}
    rule = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {"matchFields": []}}]}
    where = {
        "topologySpreadConstraints": [spread],
        "affinity": {"nodeAffinity": rule},
        "tolerations": [{"key": "team", "operator": "Exists"}],
        "nodeSelector": {"disk": "ssd"},
        "priorityClassName": "high",
        "podAnnotations": {"team": "rl"},
    }
    values: dict[str, Any] = for_each(where)
    values["verifier"]["sandbox"] = {"pool": where}
    pods = checked(chart, values)
    for place in (*PODS.values(), RUNNER):
        pod = pods[place]
        labels = pod["metadata"]["labels"]
        (constraint,) = pod["spec"]["topologySpreadConstraints"]
        counted = constraint.pop("labelSelector")["matchLabels"]
        assert constraint == spread
        assert counted.items() <= labels.items()
        assert counted["app.kubernetes.io/component"] == labels["app.kubernetes.io/component"]
        for key in ("affinity", "tolerations", "nodeSelector", "priorityClassName"):
            assert pod["spec"][key] == where[key]
        assert pod["metadata"]["annotations"]["team"] == "rl"


def test_a_spread_keeps_its_own_selector(chart: ChartRig) -> None:
    own = {"matchLabels": {"app": "all"}}
    spread = {"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": own}
    pods = checked(chart, {"generation": {"topologySpreadConstraints": [spread]}})
    assert pods[PODS["generation"]]["spec"]["topologySpreadConstraints"] == [spread]


@pytest.mark.parametrize("name", PODS)
def test_extra_parts_of_a_pod(chart: ChartRig, name: str) -> None:
    volume = {"name": "certificates", "configMap": {"name": "company"}}
    mount = {"name": "certificates", "mountPath": "/etc/company", "readOnly": True}
    sidecar = {"name": "exporter", "image": "registry/exporter:1"}
    sources = [{"secretRef": {"name": "store"}}, {"prefix": "A_", "configMapRef": {"name": "b", "optional": True}}]
    extra: dict[str, Any] = {"extraVolumes": [volume], "extraVolumeMounts": [mount], "sidecars": [sidecar]}
    extra |= {"extraEnvFrom": sources, "extraEnv": {"NCCL_DEBUG": "WARN"}}
    pods = checked(chart, {name: extra})
    for place, pod in pods.items():
        own = place == PODS[name]
        assert (volume in pod["spec"].get("volumes", [])) is own
        assert (sidecar in pod["spec"]["containers"]) is own
        for container in containers(pod):
            if container["name"] != "exporter":
                assert (mount in container["volumeMounts"]) is own
                assert (container.get("envFrom") == sources) is own
                assert ({"name": "NCCL_DEBUG", "value": "WARN"} in container.get("env", [])) is own


def test_each_component_may_have_its_own_account(chart: ChartRig) -> None:
    annotated = {"create": True, "annotations": {"eks.amazonaws.com/role-arn": "arn"}}
    values = for_each({"serviceAccount": annotated})
    accounts = {one["metadata"]["name"]: one for one in chart.documents(values) if one["kind"] == "ServiceAccount"}
    assert set(accounts) == {f"nouscoder-{name}" for name in PODS}
    for account in accounts.values():
        assert account["automountServiceAccountToken"] is False
        assert account["metadata"]["annotations"] == annotated["annotations"]
    pods = checked(chart, values)
    for name, place in PODS.items():
        assert pods[place]["spec"]["serviceAccountName"] == f"nouscoder-{name}"
        assert pods[place]["spec"]["automountServiceAccountToken"] is (name == "verifier")


def test_an_existing_account_gets_the_rights_of_the_gateway(chart: ChartRig) -> None:
    values = {"verifier": {"serviceAccount": {"create": False, "name": "graders"}}}
    documents = chart.documents(values)
    assert [one for one in documents if one["kind"] == "ServiceAccount"] == []
    assert chart.one("RoleBinding", "nouscoder-verifier", values)["subjects"] == [
        {"kind": "ServiceAccount", "name": "graders", "namespace": "here"}
    ]
    assert checked(chart, values)[PODS["verifier"]]["spec"]["serviceAccountName"] == "graders"


def test_a_platform_may_choose_the_user(chart: ChartRig) -> None:
    """OpenShift gives each namespace its own users, and refuses pods that name another."""
    users = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}
    for name, pod in checked(chart, {"podSecurityContext": users}).items():
        if name != RUNNER:
            assert not {"runAsUser", "runAsGroup", "fsGroup"} & set(pod["spec"]["securityContext"])
            assert pod["spec"]["securityContext"]["runAsNonRoot"] is True


def test_a_component_overrides_single_fields_of_the_security_contexts(chart: ChartRig) -> None:
    add = {"capabilities": {"add": ["IPC_LOCK"]}}
    values = {
        name: {"podSecurityContext": {"fsGroup": number}, "securityContext": add if name == "learner" else {}}
        for number, name in enumerate(PODS)
    }
    usual, pods = pod_specs(chart.documents()), checked(chart, values)
    for number, (name, place) in enumerate(PODS.items()):
        assert pods[place]["spec"]["securityContext"] == {
            **usual[place]["spec"]["securityContext"],
            "fsGroup": number,
        }
        for container in containers(pods[place]):
            context = container["securityContext"]
            assert context["capabilities"] == {"drop": ["ALL"], **(add["capabilities"] if name == "learner" else {})}
            assert context["readOnlyRootFilesystem"] is True
    assert pods[RUNNER] == usual[RUNNER]


def test_probes_give_the_configured_seconds(chart: ChartRig) -> None:
    probes = {"startupSeconds": 7201, "readinessSeconds": 30, "livenessSeconds": 300}
    pods = checked(chart, for_each({"probes": probes}))
    for name in PODS:
        (container,) = [one for one in pods[PODS[name]]["spec"]["containers"] if one["name"] == name]
        for kind, seconds in probes.items():
            probe = container[f"{kind.removesuffix('Seconds')}Probe"]
            assert 0 <= probe["periodSeconds"] * probe["failureThreshold"] - seconds < probe["periodSeconds"]


def test_the_exporter_of_redis_gets_the_environment_of_its_component(chart: ChartRig) -> None:
    sources = [{"secretRef": {"name": "store"}}]
    values = {"redis": {"exporter": {"enabled": True}, "extraEnv": {"TZ": "UTC"}, "extraEnvFrom": sources}}
    for container in containers(checked(chart, values)[PODS["redis"]]):
        assert {"name": "TZ", "value": "UTC"} in container["env"]
        assert container["envFrom"] == sources


def test_an_ingress_leads_to_the_rest_api(chart: ChartRig) -> None:
    hosts = ["grading.example.com", "grading.example.org"]
    tls = [{"secretName": "grading", "hosts": hosts}]
    ingress = {"enabled": True, "className": "nginx", "annotations": {"a/b": "c"}, "hosts": hosts, "tls": tls}
    values = {"verifier": {"ingress": ingress}}
    checked(chart, values)
    found = chart.one("Ingress", "nouscoder-verifier", values)
    assert found["metadata"]["annotations"] == {"a/b": "c"}
    assert (found["spec"]["ingressClassName"], found["spec"]["tls"]) == ("nginx", tls)
    assert [rule["host"] for rule in found["spec"]["rules"]] == hosts
    for rule in found["spec"]["rules"]:
        (path,) = rule["http"]["paths"]
        backend = path["backend"]["service"]
        assert (path["path"], path["pathType"], backend["name"]) == ("/", "Prefix", "nouscoder-verifier")
        assert backend["port"]["name"] in ports_of(chart)


def test_a_route_leads_to_the_rest_api(chart: ChartRig) -> None:
    parent = {"name": "edge", "namespace": "gateways", "sectionName": "https"}
    route = {"enabled": True, "parentRefs": [parent], "hostnames": ["grading.example.com"], "requestTimeout": "10m"}
    found = chart.one("HTTPRoute", "nouscoder-verifier", {"verifier": {"httpRoute": route}})
    assert found["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert (found["spec"]["parentRefs"], found["spec"]["hostnames"]) == ([parent], ["grading.example.com"])
    (rule,) = found["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "nouscoder-verifier", "port": ports_of(chart)["http"]}]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/"}}]
    assert rule["timeouts"] == {"request": "10m"}


def test_without_a_request_there_is_no_way_in_from_outside(chart: ChartRig) -> None:
    for values in chart.kept.values():
        assert not {"Ingress", "HTTPRoute"} & {one["kind"] for one in chart.documents(values)}


def ports_of(chart: ChartRig) -> dict[str, int]:
    return {port["name"]: port["port"] for port in chart.one("Service", "nouscoder-verifier")["spec"]["ports"]}


def test_with_given_secrets_the_chart_makes_none_and_two_renders_are_equal(chart: ChartRig) -> None:
    """Tools that render without a cluster would otherwise replace the Secrets at each render."""
    first, second = (chart.templates(GIVEN) for _ in range(2))
    assert first == second
    assert [one for one in chart.documents(GIVEN) if one["kind"] == "Secret"] == []
    assert chart.templates() != chart.templates()


def test_verifier_and_runners_share_the_given_key(chart: ChartRig) -> None:
    for managed in (True, False):
        values: dict[str, Any] = {"verifier": {"sandbox": {"pool": {"existingSecret": "pool", "managed": managed}}}}
        pods = pod_specs(chart.documents(values))
        runner = pods[RUNNER if managed else "Deployment/nouscoder-sandbox"]
        key = runner["spec"]["containers"][0]["env"][0]
        assert key["valueFrom"]["secretKeyRef"] == {"name": "pool", "key": "key"}
        (settings,) = [one for one in pods[PODS["verifier"]]["spec"]["volumes"] if one["name"] == "settings"]
        sources = [one["secret"] for one in settings["projected"]["sources"] if "secret" in one]
        assert {"name": "pool", "items": [{"key": "key", "path": "pool/key"}]} in sources


RESTARTS = [
    ({"verifier": {"sandbox": {"pool": {"size": 5}}}}, {"verifier"}),
    ({"config": {"verifier": {"drain_s": 20}}}, {"verifier"}),
    ({"config": {"learner": {"learning_rate": 1e-5}}}, {"broker", "generation", "learner"}),
    ({"config": {"generation": {"max_running": 32}}}, {"broker", "generation", "learner"}),
    ({"config": {"run": {"total_batches": 81}}}, {"broker", "verifier", "generation", "learner"}),
    ({"config": {"broker": {"lease_s": 6}}}, {"broker", "verifier", "generation", "learner"}),
    ({"redis": {"resources": {"limits": {"memory": "1Gi"}}}}, {"redis"}),
    ({"broker": {"podLabels": {"a": "b"}}}, {"broker"}),
    ({"podDisruptionBudget": {"maxUnavailable": 2}}, set()),
    ({"dashboards": {"enabled": False}}, set()),
]


@pytest.mark.parametrize(("values", "restarted"), RESTARTS, ids=[str(values)[:70] for values, _ in RESTARTS])
def test_a_change_restarts_only_the_pods_that_read_it(
    chart: ChartRig, values: dict[str, Any], restarted: set[str]
) -> None:
    was, now = pod_specs(chart.documents()), pod_specs(chart.documents(values))
    assert {name for name, place in PODS.items() if was[place] != now[place]} == restarted


PACKAGES = ("broker", "generation", "learner", "run", "demo", "evaluation", "rpc", "store")


def test_services_read_only_what_restarts_them() -> None:
    """The sections that the chart leaves out of a checksum do not occur in the code of that service.

    `nouscoder eval` runs in no pod, and languages.py, preflight.py and users_code.py read the section for a run whose
    services are on its own machine.
    """
    own_machine = {
        "evaluation/evaluate.py",
        "evaluation/served_policy.py",
        "run/languages.py",
        "run/preflight.py",
        "run/users_code.py",
    }
    for file in (ROOT / "services" / "nouscoder").rglob("*.py"):
        package = file.relative_to(ROOT / "services" / "nouscoder").parts[0]
        text = file.read_text("utf8")
        if package == "verifier":
            assert not re.search(r"\bconfig\.(generation|learner|policy|demo)\b", text), file
        elif package in PACKAGES and file.relative_to(ROOT / "services" / "nouscoder").as_posix() not in own_machine:
            assert not re.search(r"\bconfig\.verifier\b(?!\.(grpc|metrics)\b)", text), file


def test_a_fraction_may_be_given_as_helms_set_gives_it(chart: ChartRig) -> None:
    """`helm --set a=0.4` gives the string "0.4"."""
    given = {"learning_rate": "1e-6", "adam_betas": ["0.9", "0.99"], "objective": {"clip_high": "0.3"}}
    meant = {"learning_rate": 1e-6, "adam_betas": [0.9, 0.99], "objective": {"clip_high": 0.3}}
    rendered = [
        chart.one("ConfigMap", "nouscoder-config", {"config": {"learner": learner, "run": {"name": "0.4"}}})
        for learner in (given, meant)
    ]
    assert rendered[0] == rendered[1]
    assert '"name": "0.4"' in rendered[0]["data"]["config.json"]


def test_a_string_that_is_out_of_bounds_is_named_with_its_bound(chart: ChartRig) -> None:
    with pytest.raises(helm.HelmError, match=r"config.generation.sampling.top_p is 1.5, .*: maximum 1"):
        chart.documents({"config": {"generation": {"sampling": {"top_p": "1.5"}}}})


def test_claims_have_the_configured_access_modes(chart: ChartRig) -> None:
    mode = {"persistence": {"accessModes": ["ReadWriteMany"]}}
    values = {"redis": mode, "learner": mode, "problems": mode}
    claims = [one for one in chart.documents(values) if one["kind"] == "PersistentVolumeClaim"]
    assert [one["spec"]["accessModes"] for one in claims] == [["ReadWriteMany"]] * 3


def test_dns_may_listen_on_another_port(chart: ChartRig) -> None:
    policies = [
        one for one in chart.documents({"networkPolicy": {"dnsPorts": [5353]}}) if one["kind"] == "NetworkPolicy"
    ]
    text = str(policies)
    assert "5353" in text
    assert "'port': 53}" not in text


@pytest.mark.parametrize(("limit", "line"), [("536870912", "maxmemory 402653184"), ("max", None)])
def test_redis_stops_growing_below_the_limit_of_its_pod(
    chart: ChartRig, limit: str, line: str | None, tmp_path: Path
) -> None:
    """It refuses writes at three quarters of the limit, before the kernel kills it, and it evicts nothing."""
    data = chart.one("ConfigMap", "nouscoder-redis")["data"]
    (tmp_path / "redis.conf").write_text(data["redis.conf"])
    (tmp_path / "password").write_text("secret")
    (tmp_path / "memory.max").write_text(limit + "\n")
    script = data["start.sh"].replace("/etc/redis", str(tmp_path)).replace("/sys/fs/cgroup", str(tmp_path))
    script = script.replace("/tmp/redis.conf", str(tmp_path / "made.conf")).replace("redis-server", "cat")
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert [one for one in lines if one.startswith("maxmemory ")] == ([line] if line else [])
    assert "maxmemory-policy noeviction" in lines
    assert "requirepass secret" in lines
