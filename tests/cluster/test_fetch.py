"""`fetch` downloads a model from a hub in the cluster, as the NetworkPolicies allow it, and the pods wait for it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.conftest import SMALL_RUN, TAG, Release

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(900)]

HUB = Path(__file__).parents[1] / "hub_stand_in.py"
RESTRICTED: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def hub_objects(image: str) -> list[dict[str, Any]]:
    """The pod of the hub, its Service and its script. The release's default deny does not select them."""
    about = {"name": "hub", "labels": {"app": "hub"}}
    container = {
        "name": "hub",
        "image": image,
        "command": ["python3", "/hub/hub.py"],
        "securityContext": RESTRICTED,
        "volumeMounts": [{"name": "script", "mountPath": "/hub"}],
    }
    spec = {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "script", "configMap": {"name": "hub"}}],
    }
    ports = [{"port": 8000}]
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": {"hub.py": HUB.read_text("utf8")}},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": about,
            "spec": {"selector": {"app": "hub"}, "ports": ports},
        },
        {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec},
    ]


def test_a_model_and_problems_are_on_the_claims_before_the_services_start(release: Release, tmp_path: Path) -> None:
    image = f"localhost/nouscoder-broker:{TAG or '0.1.0'}"
    given = json.dumps({"apiVersion": "v1", "kind": "List", "items": hub_objects(image)})
    release.kubectl("apply", "-f", "-", given=given)
    release.kubectl("create", "secret", "generic", "hub", "--from-literal=HF_TOKEN=secret")
    values = {
        "fetch": {
            "enabled": True,
            "model": "someone/model",
            "commands": [
                "nouscoder --help >/problems/train.jsonl",
                "cp /problems/train.jsonl /problems/held_out.jsonl",
            ],
            "existingSecret": "hub",
            "extraEnv": {"HF_ENDPOINT": f"http://hub.{release.namespace}.svc:8000", "HF_HUB_DISABLE_XET": "1"},
            "egress": [{"to": [{"podSelector": {"matchLabels": {"app": "hub"}}}], "ports": [{"port": 8000}]}],
        },
        "policy": {"persistence": {"size": "1Gi"}},
        "config": {"policy": {"path": "/policy"}},
    }
    (tmp_path / "values.json").write_text(json.dumps(values))
    release.install("-f", str(tmp_path / "values.json"), *(word for one in SMALL_RUN for word in ("--set-json", one)))

    def job() -> dict[str, Any]:
        (found,) = json.loads(release.kubectl("get", "jobs", "-o", "json"))["items"]
        return dict(found["status"])

    release.until(lambda: job().get("succeeded"), "the Job is done", 300)
    print(release.kubectl("logs", "-l", "app.kubernetes.io/component=fetch", "--tail=20"))
    for component, folders in (("broker", ["problems"]), ("learner", ["policy", "problems"])):
        release.until(partial(has_waited, release, component), f"{component} has its files", 120)
        pod = json.loads(release.kubectl("get", "pod", release.pod(component).name, "-o", "json"))
        waiting = pod["spec"]["initContainers"][0]
        assert [mount["name"] for mount in waiting["volumeMounts"]] == folders


def has_waited(release: Release, component: str) -> bool:
    """Whether the container that waits for the files has ended well."""
    pod = json.loads(release.kubectl("get", "pod", release.pod(component).name, "-o", "json"))
    states = {one["name"]: one["state"] for one in pod["status"].get("initContainerStatuses", ())}
    return bool(states.get("fetched", {}).get("terminated", {}).get("exitCode", 1) == 0)
