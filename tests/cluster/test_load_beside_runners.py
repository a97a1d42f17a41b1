"""Programs near their limits in gVisor pods, beside busy pods without requests, and beside processes of the node."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.cluster.conftest import output_of
from tests.cluster.pod_grader import image_of
from tests.load.floods import service
from tests.load.near_limits import busy, grade_all, honest, table

from nouscoder.config import SandboxSection

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(1800)]

BUSY = "import os\nfor _ in range(4): os.fork()\nwhile True: pass"  # 16 processes
ROUNDS = ("idle", "beside a busy pod", "beside busy processes of the node")


@contextmanager
def busy_pod(image: str) -> Iterator[None]:
    """A pod of quality BestEffort on the node's kernel with 16 busy processes."""
    namespace = f"nouscoder-busy-{secrets.token_hex(3)}"
    kubectl = ("kubectl", "-n", namespace)
    output_of("kubectl", "create", "namespace", namespace)
    try:
        command = ("--command", "--", "python3", "-c", BUSY)
        output_of(*kubectl, "run", "busy", f"--image={image}", "--image-pull-policy=Never", *command)
        output_of(*kubectl, "wait", "--for=condition=Ready", "pod/busy", "--timeout=60s", limit_s=90)
        yield
    finally:
        subprocess.run([*kubectl, "delete", "pod", "busy", "--grace-period=0", "--force"], check=False, timeout=60)
        output_of("kubectl", "delete", "namespace", namespace, "--timeout=120s", limit_s=150)


def test_a_busy_pod_without_requests_changes_no_verdict(runner_pool: SandboxSection) -> None:
    fields = ("backend", "pool_template", "pool_key_file", "pool_spares", "pool_start_s")
    settings = [f"verifier.sandbox.{name}={getattr(runner_pool, name)}" for name in fields]
    ones = [one for one in honest(200, 0) if one.language == "python"]
    with service(False, 2, settings) as (_, ports):
        grade_all(ports["http"], ones, ROUNDS[0], 2)
        with busy_pod(image_of(runner_pool)):
            grade_all(ports["http"], ones, ROUNDS[1], 2)
        with busy(16):
            grade_all(ports["http"], ones, ROUNDS[2], 2)
    table(ones, ROUNDS)
    assert [one for one in ones if one.verdicts[0] != one.verdicts[1]] == []
