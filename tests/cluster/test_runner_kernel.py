"""A RuntimeClass whose handler is runc would put root on the node: its runners are refused by their kernel."""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nouscoder.verifier.sandbox import PoolConfig, SandboxConfig, SandboxUnavailable
from nouscoder.verifier.sandbox.runners.gvisor import GvisorSandbox
from nouscoder.verifier.sandbox.runners.pool import Replaced

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture
def fake_class(runner_pool: PoolConfig, tmp_path: Path) -> Iterator[PoolConfig]:
    """The pool with another RuntimeClass, whose handler is runc."""
    name = f"gvisor-{secrets.token_hex(3)}"
    body = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": "runc"}
    subprocess.run(["kubectl", "create", "-f", "-"], input=json.dumps(body), text=True, check=True, timeout=60)
    pod = json.loads(Path(runner_pool.template).read_text())
    pod["spec"]["runtimeClassName"] = name
    (tmp_path / "pod.json").write_text(json.dumps(pod))
    yield replace(runner_pool, template=str(tmp_path / "pod.json"), start_s=45)
    subprocess.run(["kubectl", "delete", "runtimeclass", name], check=True, timeout=60)


async def test_a_runtime_class_over_runc_is_refused_by_name(
    fake_class: PoolConfig, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox = GvisorSandbox(SandboxConfig(backend="gvisor", slots=1, pool=fake_class))
    with pytest.raises(SandboxUnavailable, match="does not run on gVisor") as refused:
        await sandbox.start()
    print(refused.value)
    assert "Linux version" in str(refused.value)
    assert "acceptUnprovenKernel" in str(refused.value)
    assert "a runner is refused for its kernel" in caplog.text
    assert set(sandbox.pool.replaced) <= {Replaced.KERNEL}


async def test_the_real_class_is_accepted(runner_pool: PoolConfig) -> None:
    sandbox = GvisorSandbox(SandboxConfig(backend="gvisor", slots=1, pool=runner_pool))
    try:
        await sandbox.start()
        assert not sandbox.pool.replaced
    finally:
        await sandbox.close()
