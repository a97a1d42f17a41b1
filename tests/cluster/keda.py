"""The real KEDA beside a cluster: its operator and its metrics adapter run as processes of this machine.

The cluster gets KEDA's kinds and the API external.metrics.k8s.io. Both are removed afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import make_certificate
from tests.cluster.conftest import output_of
from tests.free_addresses import free_addresses

VERSION = "v2.18.3"
_SPACE = "keda"
_OWN = "KEDA_CLUSTER_OBJECT_NAMESPACE"
_API = "v1beta1.external.metrics.k8s.io"
_START_S = 120.0


def programs() -> Path:
    """The folder of NOUSCODER_KEDA, with keda-operator and keda-adapter. Skips the test without them."""
    folder = Path(os.environ.get("NOUSCODER_KEDA", ""))
    if missing := [name for name in ("keda-operator", "keda-adapter") if not (folder / name).is_file()]:
        pytest.skip(f"set NOUSCODER_KEDA to a folder with KEDA's programs: {', '.join(missing)} missing")
    return folder


@contextlib.contextmanager
def running(folder: Path) -> Iterator[None]:
    """KEDA, once the cluster asks it for metrics. `folder` gets certificates and logs."""
    found, kinds, host = programs(), _kinds(), _address_of_this_machine()
    if "scaledobjects.keda.sh" in output_of("kubectl", "get", "crd", "-o", "name"):
        pytest.skip("this cluster has a KEDA of its own")
    grpc, https, http, health, metrics = (int(one.rpartition(":")[2]) for one in free_addresses(5))
    certificates = make_certificate(folder)
    config = os.environ["KUBECONFIG"]
    operator = [
        *(f"{found}/keda-operator", f"--kubeconfig={config}", f"--cert-dir={certificates}"),
        *(f"--metrics-service-bind-address=:{grpc}", f"--metrics-bind-address=127.0.0.1:{metrics}"),
        f"--health-probe-bind-address=127.0.0.1:{health}",
    ]
    adapter = [
        *(f"{found}/keda-adapter", f"--kubeconfig={config}", f"--cert-dir={certificates}"),
        *(f"--lister-kubeconfig={config}", f"--authentication-kubeconfig={config}"),
        *(f"--authorization-kubeconfig={config}", f"--metrics-service-address=127.0.0.1:{grpc}"),
        *(f"--bind-address={host}", f"--secure-port={https}", f"--port={http}"),
    ]
    objects = json.dumps(_objects(host, https))
    with contextlib.ExitStack() as stack:
        output_of("kubectl", "apply", "-f", "-", given=objects)
        stack.callback(output_of, "kubectl", "delete", "-f", "-", "--ignore-not-found", limit_s=120, given=objects)
        remove_kinds = ("kubectl", "delete", "-f", str(kinds), "--ignore-not-found")
        stack.callback(output_of, *remove_kinds, limit_s=120)
        output_of("kubectl", "create", "-f", str(kinds))
        for command in (operator, adapter):
            stack.enter_context(_process(command, folder / f"{Path(command[0]).name}.log"))
        # Objects of these kinds go only while the operator runs.
        stack.callback(output_of, *remove_kinds, limit_s=120)
        _wait_until_available(folder)
        yield


@contextlib.contextmanager
def _process(command: list[str], log: Path) -> Iterator[None]:
    environment = {"POD_NAMESPACE": _SPACE, "POD_NAME": "keda", "WATCH_NAMESPACE": "", _OWN: _SPACE}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | environment)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


def _kinds() -> Path:
    """KEDA's kinds, from the Go module proxy. Skips the test without it."""
    command = ["go", "mod", "download", "-json", f"github.com/kedacore/keda/v2@{VERSION}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"KEDA's kinds come from the Go module proxy: {error}")
    return Path(json.loads(done.stdout)["Dir"]) / "config" / "crd" / "bases"


def _address_of_this_machine() -> str:
    """An address that the API server reaches: its own, because the cluster of the tests is this machine."""
    found = output_of("kubectl", "get", "endpointslices", "-l", "kubernetes.io/service-name=kubernetes", "-o", "json")
    return str(json.loads(found)["items"][0]["endpoints"][0]["addresses"][0])


def _objects(host: str, port: int) -> dict[str, Any]:
    """The API of external metrics, which the adapter at this address serves."""
    service = {"name": "keda-metrics-apiserver", "namespace": _SPACE}
    ports = [{"name": "https", "port": port, "protocol": "TCP"}]
    api = {
        "group": "external.metrics.k8s.io",
        "version": "v1beta1",
        "service": {**service, "port": port},
        "insecureSkipTLSVerify": True,
        "groupPriorityMinimum": 100,
        "versionPriority": 100,
    }
    return {
        "apiVersion": "v1",
        "kind": "List",
        "items": [
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": _SPACE}},
            {"apiVersion": "v1", "kind": "Service", "metadata": service, "spec": {"ports": ports}},
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {**service, "labels": {"kubernetes.io/service-name": service["name"]}},
                "addressType": "IPv4",
                "ports": ports,
                "endpoints": [{"addresses": [host]}],
            },
            {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": _API}, "spec": api},
        ],
    }


def _wait_until_available(folder: Path) -> None:
    end_s = time.monotonic() + _START_S
    while time.monotonic() < end_s:
        command = ["kubectl", "wait", "--for=condition=Available", f"apiservice/{_API}", "--timeout=5s"]
        if subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0:
            return
    logs = "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in folder.glob("keda-*.log"))
    pytest.fail(f"KEDA does not serve {_API} within {_START_S:.0f} s\n{logs}")
