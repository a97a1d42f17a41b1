"""Protocols of other projects on the grading service, one module a protocol. Only verifier/service.py adds them.

Each module states the version that it speaks. Its routes are behind the same API keys, allowed Hosts, quotas, queue and
memory budget as all others (access/gatekeeper.py, http_server/), and grade with the same grader.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI

from nouscoder.config import VerifierSection
from nouscoder.http_server.memory_budget import MemoryBudget
from nouscoder.verifier.api.compat.mcp import add_mcp
from nouscoder.verifier.api.compat.nemo_gym import add_nemo_gym
from nouscoder.verifier.api.compat.openenv import add_openenv
from nouscoder.verifier.api.compat.problem_set import ProblemSet
from nouscoder.verifier.api.compat.remote_rm import add_remote_rm
from nouscoder.verifier.api.run_code import CodeRunner
from nouscoder.verifier.grading.grader import Grading


def add_protocols(
    app: FastAPI,
    *,
    grader: Grading,
    runner: CodeRunner,
    problems: ProblemSet,
    budget: MemoryBudget,
    section: VerifierSection,
    enter: Callable[[], None],
) -> None:
    """Add the routes of every protocol to the REST API. `enter` raises Draining when the service drains."""
    add_nemo_gym(app, grader, enter, section.max_body_bytes, section.max_bodies_bytes)
    add_mcp(app, runner, problems, enter, section.max_body_bytes)
    add_openenv(app, problems, budget, enter, section.max_body_bytes)
    add_remote_rm(app, grader, enter, section.max_body_bytes)
