"""Fixtures of the chart's tests: Helm's engine as a library (no cluster, no program), and readers of its output."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate.utils
import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "nouscoder"
EXAMPLES = ROOT / "examples" / "kubernetes"
NAMESPACE = "here"
# The first version of Kubernetes that has these kinds; the chart omits them on an older one.
FIRST_VERSION = {"ValidatingAdmissionPolicy": "1.30", "ValidatingAdmissionPolicyBinding": "1.30"}
# The names of the values with golden files.
KEPT = (
    "default",
    "verifier-only",
    "gpu",
    "tls",
    "external-redis",
    "h200",
    "b200",
    "lws",
    "jobset",
    "openshift",
    "hpa",
    "keda",
    "fetch",
    "backup",
)

Document = dict[str, Any]
SEVERAL_PODS = {"pods": 2, "persistence": {"accessModes": ["ReadWriteMany"]}}
# Kinds of operators: their pods are validated, as pods.
CUSTOM = ("LeaderWorkerSet", "JobSet", "SandboxTemplate")
WITHOUT_PODS = ("ScaledObject", "SandboxWarmPool")


class ChartRig:
    """Renders the chart like `helm install nouscoder` in the namespace `here`."""

    # The values of the golden files, by name.
    kept: dict[str, dict[str, Any]]

    def __init__(self, chart: helm.Chart) -> None:
        self._chart = chart
        self._known: dict[str, list[Document]] = {}
        self.defaults: dict[str, Any] = helm.values_from_yaml((CHART / "values.yaml").read_text("utf8"))
        self.kept = {
            "default": {},
            "verifier-only": self.file("values-verifier.yaml"),
            "gpu": self.file("values-gpu.yaml"),
            "tls": {"tls": {"enabled": True, "existingSecret": "certificates"}},
            "external-redis": {"redis": {"external": {"enabled": True, "existingSecret": "redis-of-ours"}}},
            "h200": self.file("values-h200.yaml"),
            "b200": merged(self.file("values-h200.yaml"), self.file("values-b200.yaml")),
            "lws": {"learner": {"workload": "leaderWorkerSet", **SEVERAL_PODS}},
            "jobset": {"learner": {"workload": "jobSet", **SEVERAL_PODS}},
            "openshift": {
                "podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None},
                "networkPolicy": {"dnsPorts": [5353]},
            },
        }
        scaling = {"min": 0, "max": 8, "keda": {"prometheus": "http://prometheus.monitoring.svc:9090"}}
        self.kept |= {
            "hpa": {"verifier": {"autoscaling": {"kind": "hpa"}}},
            "keda": {"verifier": {"autoscaling": {"kind": "keda", **scaling}, "sandbox": {"pool": {"min": 0}}}},
        }
        self.kept["fetch"] = merged(self.kept["gpu"], self.example("values-fetch.yaml"))
        self.kept["backup"] = {"backup": {"schedule": "0 3 * * *"}, "restore": {"from": "20261129-030000"}}
        assert tuple(self.kept) == KEPT
        self.variants = {
            **self.kept,
            "ranks": {"learner": {**SEVERAL_PODS, "ranksPerPod": 8}},
            "released": {"whenFinished": "release"},
            "dual": {"ipFamily": "Dual", "redis": {"exporter": {"enabled": True}}},
            "unmanaged": {"verifier": {"sandbox": {"pool": {"managed": False}}}},
            "agent-sandbox": {"verifier": {"sandbox": {"pool": {"source": "agentSandbox"}}}},
            "local": {"verifier": {"sandbox": {"backend": "local"}}},
            "closed": {"tests": {"enabled": False}, "networkPolicy": {"metricsFrom": [], "gradingFrom": []}},
            "existing": {
                "problems": {"persistence": {"existingClaim": "problems"}},
                "policy": {"existingClaim": "models"},
                "config": {"policy": {"path": "/policy"}},
                "learner": {"persistence": {"existingClaim": "runs"}},
                "verifier": {"tokens": {"existingSecret": "clients"}},
            },
            "openai": {
                "tls": {"enabled": True, "existingSecret": "certificates"},
                "generation": {"openai": {"enabled": True, "existingSecret": "clients"}},
            },
            "modal": {"verifier": {"sandbox": {"backend": "modal", "modal": {"existingSecret": "modal-token"}}}},
            "spill-over": {
                "verifier": {"sandbox": {"modal": {"existingSecret": "modal-token"}}},
                "config": {
                    "verifier": {"sandbox": {"spill_over": {"backend": "modal"}, "modal": {"image": "example.org/s:1"}}}
                },
            },
            "redis-tls": {
                "redis": {"tls": {"enabled": True}, "exporter": {"enabled": True}},
                "tls": {"existingSecrets": {"redis": "certificates"}},
            },
            "snapshots": {
                "backup": {"schedule": "@daily", "volumeSnapshotClass": "csi"},
                "restore": {"from": "nouscoder-runs-20261129-030000"},
            },
            "open": {"verifier": {"tokens": {"create": False}}, "networkPolicy": {"enabled": False}},
        }

    def file(self, name: str) -> dict[str, Any]:
        """A values file of the chart."""
        values: dict[str, Any] = helm.values_from_yaml((CHART / name).read_text("utf8"))
        return values

    def example(self, name: str) -> dict[str, Any]:
        """A values file of examples/kubernetes."""
        values: dict[str, Any] = helm.values_from_yaml((EXAMPLES / name).read_text("utf8"))
        return values

    def templates(
        self, values: dict[str, Any] | None = None, name: str = "nouscoder", namespace: str = NAMESPACE
    ) -> dict[str, str]:
        """Rendered text by template. Raises helm.HelmError."""
        return self._chart.render(values or {}, name=name, namespace=namespace)

    def documents(self, values: dict[str, Any] | None = None, name: str = "nouscoder") -> list[Document]:
        """Every resource. The caller may change them."""
        key = json.dumps([values, name], sort_keys=True)
        if key not in self._known:
            texts = [text for template, text in self.templates(values, name).items() if template.endswith(".yaml")]
            self._known[key] = [one for text in texts for one in yaml.load_all(text, yaml.CSafeLoader) if one]
        return copy.deepcopy(self._known[key])

    def one(self, kind: str, name: str, values: dict[str, Any] | None = None) -> Document:
        """The resource of this kind and name."""
        found = [one for one in self.documents(values) if (one["kind"], one["metadata"]["name"]) == (kind, name)]
        assert len(found) == 1, f"{len(found)} resources {kind}/{name}"
        return found[0]


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Values as Helm merges two files of them."""
    both = {**first}
    for key, value in second.items():
        both[key] = merged(both[key], value) if isinstance(value, dict) and isinstance(both.get(key), dict) else value
    return both


def custom_pods(document: Document) -> dict[str, Document]:
    """The pod templates of a LeaderWorkerSet, a JobSet or a SandboxTemplate, as pods."""
    if document["kind"] == "SandboxTemplate":
        found = {"runner": document["spec"]["podTemplate"]}
    elif document["kind"] == "LeaderWorkerSet":
        group = document["spec"]["leaderWorkerTemplate"]
        found = {"leader": group["leaderTemplate"], "worker": group["workerTemplate"]}
    else:
        jobs = document["spec"]["replicatedJobs"]
        found = {job["name"]: job["template"]["spec"]["template"] for job in jobs}
    return {name: {"apiVersion": "v1", "kind": "Pod", **pod} for name, pod in found.items()}


def pod_specs(documents: list[Document]) -> dict[str, Document]:
    """The metadata and spec of every rendered pod, by kind/name, including the runner in the verifier's template."""
    found: dict[str, Document] = {}
    for one in documents:
        name = f"{one['kind']}/{one['metadata']['name']}"
        if one["kind"] == "Pod":
            found[name] = one
        elif one["kind"] in ("Deployment", "StatefulSet", "Job"):
            found[name] = one["spec"]["template"]
        elif one["kind"] == "CronJob":
            found[name] = one["spec"]["jobTemplate"]["spec"]["template"]
        elif one["kind"] in CUSTOM:
            found |= {f"{name}/{which}": pod for which, pod in custom_pods(one).items()}
        elif "runner-pod.json" in one.get("data", {}):
            found[f"{name}/runner-pod.json"] = yaml.safe_load(one["data"]["runner-pod.json"])
    return found


@pytest.fixture(scope="session", autouse=True)
def schemas_read_once() -> Iterator[None]:
    """kubernetes-validate reads a version's schema, several megabytes, for each resource: nine tenths of its time."""
    with pytest.MonkeyPatch.context() as patch:
        read = functools.lru_cache(maxsize=64)(kubernetes_validate.utils.schema_contents)
        patch.setattr(kubernetes_validate.utils, "schema_contents", read)
        yield


@pytest.fixture(scope="session")
def chart() -> Iterator[ChartRig]:
    with helm.Chart.load(CHART) as loaded:
        yield ChartRig(loaded)


@pytest.fixture(scope="session")
def pods(chart: ChartRig) -> dict[str, dict[str, Document]]:
    """Every pod of every variant."""
    return {name: pod_specs(chart.documents(values)) for name, values in chart.variants.items()}
