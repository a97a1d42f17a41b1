"""A RuntimeClass whose handler is runc would put root on the node: its runners are refused by their kernel."""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nouscoder.config import SandboxSection
from nouscoder.verifier.sandbox import SandboxUnavailable
from nouscoder.verifier.sandbox.runners.pods import GvisorSandbox
from nouscoder.verifier.sandbox.runners.pool import Replaced

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture
def fake_class(runner_pool: SandboxSection, tmp_path: Path) -> Iterator[SandboxSection]:
    """The pool with another RuntimeClass, whose handler is runc."""
    name = f"gvisor-{secrets.token_hex(3)}"
    body = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": "runc"}
    subprocess.run(["kubectl", "create", "-f", "-"], input=json.dumps(body), text=True, check=True, timeout=60)
    pod = json.loads(Path(runner_pool.pool_template).read_text())
    pod["spec"]["runtimeClassName"] = name
    (tmp_path / "pod.json").write_text(json.dumps(pod))
    yield runner_pool.model_copy(update={"pool_template": str(tmp_path / "pod.json"), "pool_start_s": 45})
    subprocess.run(["kubectl", "delete", "runtimeclass", name], check=True, timeout=60)


async def test_a_runtime_class_over_runc_is_refused_by_name(
    fake_class: SandboxSection, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox = GvisorSandbox(fake_class)
    with pytest.raises(SandboxUnavailable, match="does not run on gVisor") as refused:
        await sandbox.start()
    print(refused.value)
    assert "Linux version" in str(refused.value)
    assert "acceptUnprovenKernel" in str(refused.value)
    assert "a runner is refused for its kernel" in caplog.text
    assert set(sandbox.pool.replaced) <= {Replaced.KERNEL}


async def test_the_real_class_is_accepted(runner_pool: SandboxSection) -> None:
    sandbox = GvisorSandbox(runner_pool)
    try:
        await sandbox.start()
        assert not sandbox.pool.replaced
    finally:
        await sandbox.close()
