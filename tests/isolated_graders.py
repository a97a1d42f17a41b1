"""A grader with each backend that isolates programs, for tests that every one of them must pass.

`isolated(long=True)` are the parameters of tests that take minutes: soak tests but on the local backend.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from nouscoder.config import SandboxSection, load_config
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import SandboxUnavailable, open_sandbox, with_libraries

_POOLS = {"gvisor": "runner_pool", "userns": "userns_runner_pool"}


def isolated(*, long: bool = False) -> list[Any]:
    """The backends by name, as parameters with their marks."""
    soak = [pytest.mark.soak] if long else []
    return [
        pytest.param("local", marks=pytest.mark.heavy),
        pytest.param("runsc", marks=[pytest.mark.heavy, *soak]),
        pytest.param("gvisor", marks=[pytest.mark.cluster, *soak]),
        pytest.param("userns", marks=[pytest.mark.cluster, pytest.mark.soak]),
    ]


@asynccontextmanager
async def grader_on(request: pytest.FixtureRequest, backend: str) -> AsyncIterator[Grader]:
    """A grader with one slot of a backend, which all submissions use in turn. Skips where it cannot start."""
    section = load_config(None).verifier
    one = SandboxSection(backend=backend, slots=1)
    try:
        if backend in _POOLS:  # pods have the libraries of their image
            config = request.getfixturevalue(_POOLS[backend])
        else:
            config = with_libraries(section.model_copy(update={"sandbox": one}))
        sandbox = open_sandbox(config)
        await sandbox.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()), section)
    try:
        yield grader
    finally:
        await grader.close()
        await sandbox.close()
