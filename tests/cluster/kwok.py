"""Nodes of KWOK: the API server, the scheduler and the garbage collector see pods that run, but no kubelet starts them.

The pods get addresses in 127.64.0.0/10, all of which are this machine's loopback. A taint keeps other pods away. Where
etcd reports no progress (3.4), the API server refuses KWOK's watches. KWOK then lists pods and nodes again at intervals
of up to a minute, and a pod may run that much later.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

VERSION = "v0.7.0"
LABEL = "nouscoder.io/kwok"
_PODS_A_NODE = 250
_BUILD_S = 900


def build(folder: Path) -> Path:
    """The program, built from the Go module proxy (minutes, later seconds). Skips without Go or proxy."""
    if (go := shutil.which("go")) is None:
        pytest.skip("KWOK is built from the Go module proxy, and this machine has no go")
    given = {"CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false -trimpath", "GOTOOLCHAIN": "local", "GOBIN": str(folder)}
    command = [go, "install", f"sigs.k8s.io/kwok/cmd/kwok@{VERSION}"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_BUILD_S, env=os.environ | given, check=False
    )
    if done.returncode:
        pytest.skip(f"KWOK was not built: {done.stderr[-500:]}")
    return folder / "kwok"


def on_its_nodes(pod: dict[str, Any], name: str) -> dict[str, Any]:
    """The pod, so that it is scheduled to the nodes of `nodes(..., name)` only."""
    spec = pod["spec"] | {
        "nodeSelector": {LABEL: name},
        "tolerations": [{"key": LABEL, "operator": "Exists", "effect": "NoSchedule"}],
    }
    return pod | {"spec": spec}


@contextlib.contextmanager
def nodes(program: Path, num_pods: int, name: str) -> Iterator[None]:
    """Nodes for so many pods, which KWOK keeps ready. They are deleted afterwards."""
    names = [f"{name}-{number}" for number in range(-(-num_pods // _PODS_A_NODE))]
    selector = f"{LABEL}={name}"
    made = {"apiVersion": "v1", "kind": "List", "items": [_node(*one, name) for one in enumerate(names)]}
    log = program.parent / "kwok.log"
    command = [str(program), "--kubeconfig", os.environ["KUBECONFIG"]]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--manage-nodes-with-label-selector", selector],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _kubectl("create", "-f", "-", given=json.dumps(made))
        wait = ["kubectl", "wait", "node", "-l", selector, "--for=condition=Ready", "--timeout=90s"]
        done = subprocess.run(wait, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{done.stderr}\n{log.read_text()[-3000:]}"
        yield
    finally:
        _kubectl("delete", "node", "-l", selector, "--ignore-not-found")
        process.terminate()
        process.wait(30)


def _node(number: int, node: str, name: str) -> dict[str, Any]:
    allocatable = {"cpu": "1000", "memory": "4Ti", "pods": str(_PODS_A_NODE)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node, "labels": {LABEL: name, "kubernetes.io/os": "linux"}},
        "spec": {
            "podCIDR": f"127.{64 + number}.0.0/16",
            "taints": [{"key": LABEL, "value": name, "effect": "NoSchedule"}],
        },
        "status": {"allocatable": allocatable, "capacity": allocatable},
    }


def _kubectl(*words: str, given: str | None = None) -> None:
    done = subprocess.run(["kubectl", *words], capture_output=True, text=True, timeout=120, input=given, check=False)
    assert done.returncode == 0, done.stderr
