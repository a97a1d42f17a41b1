"""`backup` and `restore`: what the CronJob may do and reach, and which restores are refused before anything is made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helm_python as helm
import pytest
from tests.chart.conftest import CHART, merged

if TYPE_CHECKING:
    from tests.chart.conftest import ChartRig

FILES = {"backup": {"schedule": "0 3 * * *"}}
SNAPSHOTS = {"backup": {"schedule": "0 3 * * *", "volumeSnapshotClass": "csi"}}
NAME = "nouscoder-backup"


def container_of(chart: ChartRig, values: dict[str, Any]) -> dict[str, Any]:
    job = chart.one("CronJob", NAME, values)["spec"]["jobTemplate"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    return dict(container)


def test_nothing_is_backed_up_by_default(chart: ChartRig) -> None:
    assert NAME not in str(chart.documents())


def test_files_go_from_one_claim_to_another_in_a_pod_without_network_or_token(chart: ChartRig) -> None:
    job = chart.one("CronJob", NAME, FILES)["spec"]
    assert job["concurrencyPolicy"] == "Forbid"
    assert job["jobTemplate"]["spec"]["activeDeadlineSeconds"] == 14400
    pod, container = job["jobTemplate"]["spec"]["template"]["spec"], container_of(chart, FILES)
    assert pod["automountServiceAccountToken"] is False
    assert container["resources"]["limits"]
    assert {one["mountPath"]: one.get("readOnly", False) for one in container["volumeMounts"]} == {
        "/etc/nouscoder": True,
        "/runs": True,
        "/backup": False,
    }
    policy = chart.one("NetworkPolicy", NAME, FILES)["spec"]
    assert (policy["ingress"], policy["egress"]) == ([], [])
    assert chart.one("PersistentVolumeClaim", NAME, FILES)["metadata"]["annotations"] == {
        "helm.sh/resource-policy": "keep"
    }
    given = merged(FILES, {"backup": {"persistence": {"existingClaim": "nfs"}}})
    made = [one["kind"] for one in chart.documents(given) if one["metadata"]["name"] == NAME]
    assert sorted(made) == ["CronJob", "NetworkPolicy"]
    assert "'claimName': 'nfs'" in str(chart.one("CronJob", NAME, given))


def test_the_learner_has_the_backups_only_while_one_is_restored(chart: ChartRig) -> None:
    def starts(values: dict[str, Any]) -> dict[str, Any]:
        pod = chart.one("StatefulSet", "nouscoder-learner", values)["spec"]["template"]["spec"]
        return {one["name"]: one for one in pod["initContainers"]}

    assert [*starts(FILES)] == ["prepare"]
    restoring = starts(merged(FILES, {"restore": {"from": "20261129-030000", "setAside": "old"}}))
    assert [*restoring] == ["restore", "prepare"]
    assert "nouscoder-broker:" in restoring["restore"]["image"], "the learner's image has no redis"
    assert restoring["restore"]["args"][2:4] == ["/backup/20261129-030000", "--set-aside=old"]
    assert {"name": "backup", "mountPath": "/backup", "readOnly": True} in restoring["restore"]["volumeMounts"]
    assert [*starts(merged(SNAPSHOTS, {"restore": {"from": "runs-1"}}))] == ["prepare"]


def test_a_snapshot_is_the_source_of_the_runs_claim_and_redis_begins_anew(chart: ChartRig) -> None:
    values = merged(SNAPSHOTS, {"restore": {"from": "runs-1"}})
    claim = chart.one("PersistentVolumeClaim", "nouscoder-runs", values)
    assert claim["spec"]["dataSource"] == {
        "apiGroup": "snapshot.storage.k8s.io",
        "kind": "VolumeSnapshot",
        "name": "runs-1",
    }
    assert "dataSource" not in str(chart.documents(SNAPSHOTS))
    redis = chart.one("ConfigMap", "nouscoder-redis", values)["data"]["start.sh"]
    assert 'restored="/data/restored-runs-1."' in redis


def test_the_pod_of_snapshots_may_only_handle_them(chart: ChartRig) -> None:
    assert chart.one("Role", NAME, SNAPSHOTS)["rules"] == [
        {
            "apiGroups": ["snapshot.storage.k8s.io"],
            "resources": ["volumesnapshots"],
            "verbs": ["get", "list", "create", "delete"],
        }
    ]
    (egress,) = chart.one("NetworkPolicy", NAME, SNAPSHOTS)["spec"]["egress"]
    assert [one["port"] for one in egress["ports"]] == [443, 6443]
    assert [one["mountPath"] for one in container_of(chart, SNAPSHOTS)["volumeMounts"]] == ["/opt/backup"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**FILES, "loop": {"enabled": False}}, "the grading API alone has no runs"),
        (merged(SNAPSHOTS, {"restore": {"from": "a", "setAside": "b"}}), "a snapshot is restored only to a new claim"),
        (
            {**SNAPSHOTS, "restore": {"from": "a"}, "learner": {"persistence": {"existingClaim": "ours"}}},
            r"cannot fill learner\.persistence\.existingClaim: make that claim from the VolumeSnapshot yourself",
        ),
    ],
)
def test_what_cannot_be_is_refused(chart: ChartRig, values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError, match=message):
        chart.documents(values)


class Snapshots(BaseHTTPRequestHandler):
    """VolumeSnapshots as the Kubernetes API answers for them; a new one is ready when it was asked for twice."""

    def answer(self, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        made = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.known[made["metadata"]["name"]] = made | {"status": {}}  # type: ignore[attr-defined]
        self.answer(made)

    def do_GET(self) -> None:
        known, name = self.server.known, self.path.partition("?")[0].rpartition("/")[2]  # type: ignore[attr-defined]
        assert self.headers["Authorization"] == "Bearer secret"
        self.answer(known.get(name, {"items": [*known.values()]}))
        if name in known:
            known[name]["status"] = self.server.then  # type: ignore[attr-defined]

    def do_DELETE(self) -> None:
        self.answer(self.server.known.pop(self.path.rpartition("/")[2]))  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def cluster(then: dict[str, Any]) -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Snapshots) as server:
        server.known, server.then = {}, then  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def snapshot(server: Any, tmp_path: Path, keep: int, limit_s: int = 60) -> subprocess.CompletedProcess[str]:
    """The script as it is, with http in the place of https and no waits."""
    for file, text in {"namespace": "here", "token": "secret", "ca.crt": ""}.items():
        (tmp_path / file).write_text(text)
    text = (CHART / "files" / "snapshot.py").read_text()
    for old, new in {
        "/var/run/secrets/kubernetes.io/serviceaccount": str(tmp_path),
        "https://": "http://",
        "time.sleep(2)": "",
        'cafile=str(ACCOUNT / "ca.crt")': "",
    }.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "snapshot.py").write_text(text)
    address = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.server_port)}
    command = [sys.executable, "-I", str(tmp_path / "snapshot.py"), "nouscoder-runs", "csi", str(keep), str(limit_s)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | address, timeout=60, check=False)


def test_snapshots_are_kept_once_they_are_ready_and_the_oldest_and_unready_go(tmp_path: Path) -> None:
    there = {"nouscoder-runs-1": True, "nouscoder-runs-2": False, "nouscoder-runs-3": True, "zz-later": False}
    with cluster({"readyToUse": True}) as server:
        for name, ready in there.items():
            server.known[name] = {"metadata": {"name": name}, "status": {"readyToUse": ready}}
        done = snapshot(server, tmp_path, keep=2)
        assert done.returncode == 0, done.stderr
        (new,) = (name for name in server.known if name.startswith("nouscoder-runs-20"))
        assert sorted(server.known) == sorted([new, "nouscoder-runs-3", "zz-later"])
        made = server.known[new]
    assert made["spec"] == {
        "volumeSnapshotClassName": "csi",
        "source": {"persistentVolumeClaimName": "nouscoder-runs"},
    }
    assert f"snapshot {new} is whole" in done.stdout


def test_a_snapshot_that_is_never_ready_fails_with_the_reason_and_nothing_is_removed(tmp_path: Path) -> None:
    with cluster({"readyToUse": False, "error": {"message": "no such class: csi"}}) as server:
        server.known["nouscoder-runs-1"] = {"metadata": {"name": "nouscoder-runs-1"}, "status": {"readyToUse": True}}
        done = snapshot(server, tmp_path, keep=1, limit_s=31)
        assert (done.returncode, len(server.known)) == (1, 2)
    assert "is not ready after 1 s: no such class: csi" in done.stderr
