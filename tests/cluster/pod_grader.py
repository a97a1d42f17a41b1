"""A grader whose only slot is a gVisor pod made from a changed template."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from nouscoder.config import SandboxSection
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.runners.pods import GvisorSandbox


def image_of(pool: SandboxSection) -> str:
    """The image of the pool's runners."""
    (container,) = json.loads(Path(pool.pool_template).read_text())["spec"]["containers"]
    return str(container["image"])


@asynccontextmanager
async def pod_grader(
    pool: SandboxSection, folder: Path, container_changes: Mapping[str, Any]
) -> AsyncIterator[tuple[Grader, GvisorSandbox]]:
    """A started grader and its sandbox. `folder` gets the template, whose container has the changes."""
    pod = json.loads(Path(pool.pool_template).read_text())
    pod["spec"]["containers"][0].update(container_changes)
    template = folder / "runner-pod.json"
    template.write_text(json.dumps(pod))
    sandbox = GvisorSandbox(pool.model_copy(update={"pool_template": str(template)}))
    await sandbox.start()
    grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()))
    grader.follow(sandbox)
    try:
        yield grader, sandbox
    finally:
        await sandbox.close()
