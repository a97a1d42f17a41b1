"""SandboxFusion's client package can parse the answers of POST /run_code, with the real sandbox."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest
import sandbox_fusion
from sandbox_fusion.models import RunCodeRequest, RunCodeResponse


def run(url: str, code: str, **fields: Any) -> RunCodeResponse:
    """Send one request with the client package, without its retries."""
    request = RunCodeRequest(code=code, language=fields.pop("language", "python"), **fields)
    return sandbox_fusion.run_code(request, endpoint=url, max_attempts=1, client_timeout=60)


def test_a_program_with_exit_code_0_is_success(grading_url: str) -> None:
    answer = run(grading_url, "print(int(input()) + 1)", stdin="41")
    assert (answer.status, answer.message, answer.compile_result, answer.files) == ("Success", "", None, {})
    assert answer.run_result is not None
    assert (answer.run_result.status, answer.run_result.return_code) == ("Finished", 0)
    assert (answer.run_result.stdout, answer.run_result.stderr) == ("42\n", "")
    assert answer.run_result.execution_time is not None
    assert 0 < answer.run_result.execution_time < 10


@pytest.mark.parametrize(
    ("code", "return_code", "stderr"),
    [
        ("import sys\nsys.exit(3)", 3, ""),
        ("1/0", 1, "ZeroDivisionError"),
        ("print(", 1, "SyntaxError"),
        ("import os\nos.kill(os.getpid(), 11)", -11, ""),
    ],
)
def test_a_failing_program_is_failed_and_finished(grading_url: str, code: str, return_code: int, stderr: str) -> None:
    answer = run(grading_url, code)
    assert answer.status == "Failed"
    assert answer.run_result is not None
    assert (answer.run_result.status, answer.run_result.return_code) == ("Finished", return_code)
    assert stderr in (answer.run_result.stderr or "")


def test_a_program_over_its_time_limit_is_reported(grading_url: str) -> None:
    answer = run(grading_url, "print('begun', flush=True)\nwhile True: pass", run_timeout=0.5)
    assert answer.status == "Failed"
    assert answer.run_result is not None
    assert (answer.run_result.status, answer.run_result.stdout) == ("TimeLimitExceeded", "begun\n")


def test_files_can_be_read(grading_url: str) -> None:
    data = {"data.bin": base64.b64encode(b"\x00\xff7").decode(), "nothing": None}
    answer = run(grading_url, "import os\nprint(open('data.bin', 'rb').read(), os.path.exists('nothing'))", files=data)
    assert answer.run_result is not None
    assert answer.run_result.stdout == "b'\\x00\\xff7' False\n"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"language": "cobol"}, "language"),
        ({"files": {"a": "not base64!"}}, "files.a"),
        ({"files": {"../a": "YQ=="}}, "files"),
        ({"fetch_files": ["out"]}, "fetch_files"),
        ({"run_timeout": 1e9}, "limits.wall_time_s"),
        ({"code": None}, "code"),
    ],
)
def test_an_invalid_run_is_422_with_its_field(grading_url: str, fields: dict[str, Any], field: str) -> None:
    answer = httpx.post(f"{grading_url}/run_code", json={"code": "1", "language": "python", **fields})
    assert (answer.status_code, answer.json()["field"]) == (422, field)


def test_the_memory_limit_is_enforced(grading_url: str) -> None:
    body = {"code": "x = bytearray(10**9)", "language": "python", "memory_limit_MB": 200}
    result = httpx.post(f"{grading_url}/run_code", json=body, timeout=60).json()
    assert result["status"] == "Failed"
    assert "MemoryError" in result["run_result"]["stderr"] or "memory limit" in result["run_result"]["stderr"]
