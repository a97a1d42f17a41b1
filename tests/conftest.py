"""Fixtures of several folders: the settings of hypothesis, and runner pods for tests marked `cluster`."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from nouscoder.verifier.sandbox import PoolConfig

# No deadline for examples, because times on a busy machine say nothing about the code.
settings.register_profile("no-deadline", settings(), deadline=None)
settings.load_profile("no-deadline")

# Files with the longest tests come first, so that no core is left with one of them at the end.
_LONGEST_FIRST = (
    "tests/e2e/test_loop.py",
    "tests/services/test_attached_run.py",
    "tests/services/test_bench_broker.py",
    "tests/load",
    "tests/e2e",
    "tests/fuzz",
    "tests/services/test_run_services.py",
    "tests/services/test_on_policy.py",
    "tests/services",
)

CHART = Path(__file__).parents[1] / "helm" / "nouscoder"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by _LONGEST_FIRST; the order within a file stays."""

    def rank(item: pytest.Item) -> int:
        places = (place for place, start in enumerate(_LONGEST_FIRST) if item.nodeid.startswith(start))
        return min(places, default=len(_LONGEST_FIRST))

    items.sort(key=rank)


@pytest.fixture(scope="session")
def runner_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolConfig]:
    """Pods of the chart's template in their own namespace, made by a gateway on this machine."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG names no cluster: run make test-cluster")
    namespace = f"nouscoder-pool-{secrets.token_hex(3)}"
    tag = os.environ.get("NOUSCODER_IMAGE_TAG", "")
    command = ["helm", "template", "nouscoder", str(CHART), "-s", "templates/sandbox/sandbox-configmap.yaml"]
    rendered = _output(*command, "--set", "verifier.sandbox.backend=gvisor", "--set", f"image.tag={tag}")
    pod = json.loads(rendered.partition("runner-pod.json: |")[2])
    pod["metadata"]["namespace"] = namespace
    key = secrets.token_hex(32)
    (variable,) = pod["spec"]["containers"][0]["env"]
    secret, field = (variable["valueFrom"]["secretKeyRef"][name] for name in ("name", "key"))
    folder = tmp_path_factory.mktemp("pool")
    (folder / "runner-pod.json").write_text(json.dumps(pod))
    (folder / "key").write_text(key)
    _output("kubectl", "create", "namespace", namespace)
    try:
        _output("kubectl", "-n", namespace, "create", "secret", "generic", secret, f"--from-literal={field}={key}")
        template, key_file = str(folder / "runner-pod.json"), str(folder / "key")
        yield PoolConfig(template=template, key_file=key_file, spares=0, start_s=120)
    finally:
        _output("kubectl", "delete", "namespace", namespace, "--wait=true", "--timeout=120s")


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    if done.returncode:
        pytest.fail(f"{' '.join(command)} exited with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout
