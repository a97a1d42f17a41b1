"""The calls of the API: paths and bodies, which both clients share."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

GRADE_PATH = "/v1/grade"
STREAM_PATH = "/v1/grade/stream"
TESTS_PATH = "/v1/tests"
RUN_CODE_PATH = "/run_code"
JOBS_PATH = "/v1/jobs"
AHEAD = 4  # grade_many reads at most so many requests for each that is in progress


def run_code_record(
    code: str,
    language: str,
    stdin: str,
    run_timeout_s: float,
    memory_limit_mb: int | None,
    files: Mapping[str, bytes] | None,
    fetch: Sequence[str] = (),
) -> dict[str, Any]:
    """The body of POST /run_code, with SandboxFusion's names. `memory_limit_mb` None is the service's default."""
    return {
        "code": code,
        "language": language,
        "stdin": stdin,
        "run_timeout": run_timeout_s,
        "memory_limit_MB": -1 if memory_limit_mb is None else memory_limit_mb,
        "files": {name: base64.b64encode(content).decode() for name, content in (files or {}).items()},
        "fetch_files": list(fetch),
    }
