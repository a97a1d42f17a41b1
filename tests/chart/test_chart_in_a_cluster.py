"""The chart's use of existing objects of a cluster: a RuntimeClass, and Secrets of an earlier install.

The cluster is a small HTTP server that answers Helm's `lookup`.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

CHART = Path(__file__).parents[2] / "helm" / "nouscoder"
SECRETS = "/api/v1/namespaces/here/secrets/"
CONFIG_MAPS = "/api/v1/namespaces/monitoring/configmaps/"


class Cluster:
    """Answers discovery, RuntimeClasses, PriorityClasses and Secrets."""

    def __init__(self, address: str, folder: Path) -> None:
        self.runtime_classes: list[str] = []
        self.priority_classes: dict[str, bool] = {}  # whether it is the global default, by name
        self.secrets: dict[str, dict[str, str]] = {}
        self.pods: dict[str, dict[str, str]] = {}  # labels by name, in the namespace payments
        self.dashboards_of: tuple[str, str] | None = None  # namespace and name of the release that made them
        self.config: dict[str, str] | None = None  # the data of the release's ConfigMap
        self.prepared: dict[str, Any] | None = None  # the state of the learner's container `prepare`
        self.shows_run = 0  # replicas of the Deployment nouscoder-pages
        self.asked: list[str] = []
        self._kubeconfig = folder / "kubeconfig"
        self._kubeconfig.write_text(json.dumps(_kubeconfig(address)), "utf8")

    def texts(self, values: dict[str, Any] | None = None) -> dict[str, str]:
        """The text of every template of an install here. Raises helm.HelmError."""
        with (
            helm.Config(kubeconfig_path=self._kubeconfig, namespace="here") as cluster,
            helm.Chart.load(CHART) as chart,
        ):
            found: dict[str, str] = cluster.render(chart, values or {}, name="nouscoder", namespace="here")
        return found

    def render(self, values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Every resource of an install here. Raises helm.HelmError."""
        texts = self.texts(values)
        return [
            one for name, text in texts.items() if name.endswith(".yaml") for one in yaml.safe_load_all(text) if one
        ]

    def answer(self, path: str) -> tuple[int, Any]:
        """The API's answer to a GET."""
        path = path.partition("?")[0]
        self.asked.append(path)
        if path == "/apis/node.k8s.io/v1/runtimeclasses":
            items = [{"metadata": {"name": name}, "handler": "runsc"} for name in self.runtime_classes]
            return 200, {"kind": "RuntimeClassList", "apiVersion": "node.k8s.io/v1", "metadata": {}, "items": items}
        if path == "/apis/scheduling.k8s.io/v1/priorityclasses":
            classes = self.priority_classes.items()
            listed = [{"metadata": {"name": name}, "globalDefault": is_default} for name, is_default in classes]
            kind = {"kind": "PriorityClassList", "apiVersion": "scheduling.k8s.io/v1", "metadata": {}}
            return 200, {**kind, "items": listed}
        if path == "/api/v1/namespaces/payments/pods":
            pods = [{"metadata": {"name": name, "labels": labels}} for name, labels in self.pods.items()]
            return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": pods}
        if path == "/api/v1/namespaces/here/configmaps/nouscoder-config" and self.config:
            return 200, {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "x"}, "data": self.config}
        if path == "/api/v1/namespaces/here/pods" and self.prepared is not None:
            states = [{"name": "prepare", "state": self.prepared}]
            pod = {"metadata": {"name": "x", "labels": OF_LEARNER}, "status": {"initContainerStatuses": states}}
            return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": [pod]}
        if path.startswith(CONFIG_MAPS) and self.dashboards_of:
            names = ("meta.helm.sh/release-namespace", "meta.helm.sh/release-name")
            metadata = {"name": "x", "annotations": dict(zip(names, self.dashboards_of, strict=True))}
            return 200, {"kind": "ConfigMap", "apiVersion": "v1", "metadata": metadata}
        if path == "/apis/apps/v1/namespaces/here/deployments/nouscoder-pages":
            return 200, {"kind": "Deployment", "apiVersion": "apps/v1", "spec": {"replicas": self.shows_run}}
        if path.startswith(SECRETS):
            data = self.secrets.get(path.removeprefix(SECRETS))
            if data is None:
                return 404, {
                    "kind": "Status",
                    "apiVersion": "v1",
                    "status": "Failure",
                    "reason": "NotFound",
                    "code": 404,
                }
            coded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
            return 200, {"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "x"}, "data": coded}
        return (200, DISCOVERY[path]) if path in DISCOVERY else (404, {})


def _resources(group: str, kinds: dict[str, str], namespaced: bool) -> dict[str, Any]:
    listed = [
        {"name": name, "singularName": "", "kind": kind, "namespaced": namespaced, "verbs": ["get", "list"]}
        for name, kind in kinds.items()
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": listed}


OF_LEARNER = {
    f"app.kubernetes.io/{key}": value
    for key, value in (("name", "nouscoder"), ("instance", "nouscoder"), ("component", "learner"))
}
NODE = {"groupVersion": "node.k8s.io/v1", "version": "v1"}
SCHEDULING = {"groupVersion": "scheduling.k8s.io/v1", "version": "v1"}
APPS = {"groupVersion": "apps/v1", "version": "v1"}
DISCOVERY: dict[str, Any] = {
    "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [
            {"name": "node.k8s.io", "versions": [NODE], "preferredVersion": NODE},
            {"name": "scheduling.k8s.io", "versions": [SCHEDULING], "preferredVersion": SCHEDULING},
            {"name": "apps", "versions": [APPS], "preferredVersion": APPS},
        ],
    },
    "/api/v1": _resources("v1", {"secrets": "Secret", "pods": "Pod", "configmaps": "ConfigMap"}, True),
    "/apis/node.k8s.io/v1": _resources("node.k8s.io/v1", {"runtimeclasses": "RuntimeClass"}, False),
    "/apis/apps/v1": _resources("apps/v1", {"deployments": "Deployment"}, True),
    "/apis/scheduling.k8s.io/v1": _resources("scheduling.k8s.io/v1", {"priorityclasses": "PriorityClass"}, False),
}


def _kubeconfig(address: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": address}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "here"}}],
        "current-context": "x",
    }


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = known.answer(self.path)
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    known = Cluster(f"http://127.0.0.1:{server.server_address[1]}", tmp_path)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield known
    server.shutdown()
    server.server_close()
    thread.join(5)


def test_gvisor_is_used_if_its_runtime_class_exists(cluster: Cluster) -> None:
    cluster.runtime_classes = ["kata", "gvisor"]
    assert {one["kind"] for one in cluster.render()} >= {"Role", "RoleBinding"}


@pytest.mark.parametrize("there", [[], ["kata"]])
def test_without_gvisor_the_install_fails_and_names_the_alternative(cluster: Cluster, there: list[str]) -> None:
    cluster.runtime_classes = there
    with pytest.raises(helm.HelmError) as refused:
        cluster.render()
    message = str(refused.value)
    assert 'no RuntimeClass "gvisor"' in message
    assert "the node's own kernel" in message
    assert "--set verifier.sandbox.backend=local" in message


def test_the_weaker_isolation_is_installed_on_request(cluster: Cluster) -> None:
    documents = cluster.render({"verifier": {"sandbox": {"backend": "local"}}})
    assert not [one for one in documents if "Role" in one["kind"]]
    assert "/apis/node.k8s.io/v1/runtimeclasses" not in cluster.asked


def test_the_name_of_the_runtime_class_can_be_changed(cluster: Cluster) -> None:
    cluster.runtime_classes = ["runsc"]
    documents = cluster.render({"verifier": {"sandbox": {"runtimeClassName": "runsc"}}})
    template = next(one for one in documents if "runner-pod.json" in one.get("data", {}))
    assert json.loads(template["data"]["runner-pod.json"])["spec"]["runtimeClassName"] == "runsc"


def kinds(documents: list[dict[str, Any]]) -> set[str]:
    return {one["kind"] for one in documents}


def notes(cluster: Cluster, values: dict[str, Any] | None = None) -> str:
    """What the install prints, in one line."""
    return " ".join(cluster.texts(values)["nouscoder/templates/NOTES.txt"].split())


@pytest.mark.parametrize(("replicas", "name"), [(0, "nouscoder-pages"), (1, "nouscoder-pages-again")])
def test_an_upgrade_takes_another_name_for_pages_that_are_shown(cluster: Cluster, replicas: int, name: str) -> None:
    """Helm 4 would refuse to write replicas that the learner's pod has set."""
    cluster.runtime_classes, cluster.shows_run = ["gvisor"], replicas
    deployments = [one for one in cluster.render({"whenFinished": "release"}) if one["kind"] == "Deployment"]
    assert {one["metadata"]["name"]: one["spec"]["replicas"] for one in deployments}[name] == 0
    assert sum("pages" in one["metadata"]["name"] for one in deployments) == 1


@pytest.mark.parametrize(("version", "there"), [("v1.29.0", False), ("v1.30.0", True)])
def test_admission_policies_need_kubernetes_1_30(version: str, there: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """Only lint takes a version. It prints a template's failure instead of failing."""
    for wanted, refused in (("auto", False), ("required", not there)):
        values = {"verifier": {"sandbox": {"admissionPolicy": wanted}}}
        helm.lint(CHART, values, strict=True, kube_version=version)
        assert ("has no ValidatingAdmissionPolicy" in capfd.readouterr().err) is refused


def test_the_install_says_who_may_make_which_pods(cluster: Cluster) -> None:
    cluster.runtime_classes = ["gvisor"]
    assert "ValidatingAdmissionPolicy" in kinds(cluster.render())
    assert "Their namespace is here-sandbox" in notes(cluster)
    assert "A ValidatingAdmissionPolicy admits nothing but runners to it" in notes(cluster)


def test_an_installer_without_rights_to_cluster_wide_objects_needs_none(cluster: Cluster) -> None:
    cluster.runtime_classes = ["gvisor"]
    sandbox = {"admissionPolicy": "never", "namespace": {"name": "runners", "create": False}}
    documents = cluster.render({"verifier": {"sandbox": sandbox}})
    wide = {"Namespace", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    assert not wide & kinds(documents)
    assert {one["metadata"].get("namespace") for one in documents if one["kind"] == "Role"} == {"runners"}
    said = notes(cluster, {"verifier": {"sandbox": sandbox}})
    assert "admissionPolicy is never: whoever has the verifier's token can make any pod there" in said
    assert "You provide that namespace" in said


def test_the_policy_admits_the_priority_that_kubernetes_gives_to_runners_without_one(cluster: Cluster) -> None:
    cluster.runtime_classes = ["gvisor"]
    cluster.priority_classes = {"high": False, "usual": True}

    def admitted(**pool: str) -> str:
        documents = cluster.render({"verifier": {"sandbox": {"pool": pool}}})
        (policy,) = [one for one in documents if one["kind"] == "ValidatingAdmissionPolicy"]
        (rule,) = [one["expression"] for one in policy["spec"]["validations"] if "PriorityClass" in one["message"]]
        return str(rule).rpartition(" in ")[2]

    assert admitted() == '["","usual"]'
    assert admitted(priorityClassName="low") == '["low"]'
    cluster.priority_classes = {}
    assert admitted() == '[""]'


def test_the_runners_do_not_share_the_namespace_of_the_release(cluster: Cluster) -> None:
    cluster.runtime_classes = ["gvisor"]
    with pytest.raises(helm.HelmError, match="must hold nothing else"):
        cluster.render({"verifier": {"sandbox": {"namespace": {"name": "here"}}}})


def test_secrets_are_made_once(cluster: Cluster) -> None:
    """An upgrade keeps the Secrets of the install, with clients that were added and the password of Redis."""
    cluster.runtime_classes = ["gvisor"]
    first = secrets(cluster.render())
    assert first != secrets(cluster.render()), "random values differ between installs"
    cluster.secrets = first
    first["nouscoder-verifier-tokens"]["tokens"] += f"another:{'0' * 64}\n"
    assert secrets(cluster.render()) == first


def secrets(documents: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    return {one["metadata"]["name"]: one["stringData"] for one in documents if one["kind"] == "Secret"}


def test_the_token_opens_the_verifier(cluster: Cluster, tmp_path: Path) -> None:
    from nouscoder.http_server.api_keys import open_api_keys

    cluster.runtime_classes = ["gvisor"]
    made = secrets(cluster.render())["nouscoder-verifier-tokens"]
    file = tmp_path / "tokens"
    file.write_text(made["tokens"], "utf8")
    holder = open_api_keys(str(file)).find(made["token"])
    assert holder is not None
    assert holder.client == "nouscoder"


def test_the_notes_name_the_first_pod_of_the_learner(cluster: Cluster) -> None:
    cluster.runtime_classes = ["gvisor"]
    said = notes(cluster)
    assert "port-forward pod/nouscoder-learner-0 8090:8090" in said
    assert "exec nouscoder-learner-0 -c run" in said
    with helm.Chart.load(CHART) as chart:
        texts = chart.render({"learner": {"workload": "jobSet"}}, name="nouscoder", namespace="here")
    said = " ".join(texts["nouscoder/templates/NOTES.txt"].split())
    assert "port-forward service/nouscoder-learner 8090:8090" in said
    assert "wait --for=condition=Ready" in said
    assert "statefulset/" not in said


def runners_in(name: str) -> dict[str, Any]:
    return {"verifier": {"sandbox": {"namespace": {"name": name, "create": False}}}}


def test_a_namespace_with_pods_of_others_is_refused_for_the_runners(cluster: Cluster) -> None:
    """With create=false the chart once closed it for its owners without a word."""
    cluster.runtime_classes = ["gvisor"]
    cluster.render(runners_in("payments"))
    label = "app.kubernetes.io/"
    own = {f"{label}name": "nouscoder", f"{label}instance": "nouscoder", f"{label}component": "sandbox", "more": "x"}
    cluster.pods = {"runner": own}
    cluster.render(runners_in("payments"))
    for labels in ({}, {"app": "shop"}, {**own, f"{label}instance": "other"}, {**own, f"{label}component": "learner"}):
        cluster.pods = {"runner": own, "shop-1": labels}
        with pytest.raises(helm.HelmError, match="payments, where pod shop-1 is no runner"):
            cluster.render(runners_in("payments"))


@pytest.mark.parametrize("name", ["kube-system", "kube-public", "default"])
def test_a_namespace_of_the_cluster_is_refused_for_the_runners(cluster: Cluster, name: str) -> None:
    cluster.runtime_classes = ["gvisor"]
    with pytest.raises(helm.HelmError, match=f'"{name}", a namespace of the cluster'):
        cluster.render(runners_in(name))


def test_releases_share_a_namespace_for_monitoring(cluster: Cluster) -> None:
    """Rules and monitors have the names of their releases; the dashboards belong to the release that made them."""
    cluster.runtime_classes = ["gvisor"]
    place = {"enabled": True, "namespace": "monitoring"}
    values = {"dashboards": place, "prometheusRule": place, "serviceMonitor": place}

    def there() -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for one in cluster.render(values):
            if one["metadata"].get("namespace") == "monitoring":
                found.setdefault(one["kind"], []).append(one["metadata"]["name"])
        return found

    first = there()
    assert first["PrometheusRule"] == ["here-nouscoder"]
    assert all(name.startswith("here-nouscoder-") for name in first["ServiceMonitor"])
    assert {f"nouscoder-dashboard-{name}" for name in ("run", "verifier", "cost")} <= {*first["ConfigMap"]}
    cluster.dashboards_of = ("here", "nouscoder")
    assert there() == first
    for other in (("elsewhere", "nouscoder"), ("here", "second")):
        cluster.dashboards_of = other
        assert there() == {kind: names for kind, names in first.items() if kind != "ConfigMap"}
