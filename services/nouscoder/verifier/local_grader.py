"""Grading in this process, for the commands that grade without a service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from nouscoder.config import VerifierSection
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import open_sandbox, with_libraries
from nouscoder.verifier.sandbox.base import Sandbox


@asynccontextmanager
async def local_grader(
    section: VerifierSection, decorate: Callable[[Sandbox], Sandbox] = lambda sandbox: sandbox
) -> AsyncIterator[Grader]:
    """A grader with the configured sandbox, which `decorate` may wrap. Raises ConfigError and SandboxUnavailable."""
    sandbox = decorate(open_sandbox(with_libraries(section), section.tools.sessions))
    grader: Grader | None = None
    try:
        await sandbox.start()
        grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()), section)
        yield grader
    finally:
        if grader is not None:
            await grader.close()
        await sandbox.close()
