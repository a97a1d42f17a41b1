"""Attacks through the REST API: SandboxFusion's endpoints, runs of all tests, remote rewards, jobs.

Each request gets an answer that is no failure of the service, shows nothing of the host, and leaves nothing for the
next request.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

LIMITS = {"wall_time_s": 5, "cpu_time_s": 5, "memory_bytes": 1 << 28}
LIMIT_S = 120.0
LOOK = """import glob, os
found = [path for path in ("/etc/shadow", "/proc/1/environ", "/root/.bashrc") if os.access(path, os.R_OK)]
found += [key for key in os.environ if "TOKEN" in key.upper() or "NOUSCODER" in key.upper()]
print(found, sorted(os.listdir("/tmp")))
"""
LEAVE = """import os, time
open("/tmp/left", "w").write("x")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(60)
    os._exit(0)
print("left", flush=True)
"""


def post(url: str, path: str, body: Any) -> httpx.Response:
    """The answer, which is no failure of the service."""
    answer = httpx.post(f"{url}{path}", content=body if isinstance(body, bytes) else json.dumps(body), timeout=LIMIT_S)
    assert answer.status_code < 500 or answer.status_code == 501, answer.text[:1000]
    return answer


def run(url: str, code: str, **fields: Any) -> dict[str, Any]:
    """The answer of /run_code."""
    made: dict[str, Any] = post(url, "/run_code", {"code": code, "language": "python", **fields}).json()
    return made


def test_a_program_of_run_code_sees_nothing_of_the_host_and_of_the_program_before(grading_url: str) -> None:
    assert run(grading_url, LEAVE, run_timeout=10)["run_result"]["stdout"] == "left\n"
    assert run(grading_url, LOOK, run_timeout=10)["run_result"]["stdout"] == "[] ['main.py']\n"


@pytest.mark.parametrize(
    "fields",
    [
        {"files": {"../../etc/passwd": "eA=="}},
        {"files": {"/tmp/main.py": "eA=="}},
        {"files": {"a\0b": "eA=="}},
        {"files": {"..": "eA=="}},
        {"files": {"main.py": "eA=="}},
        {"files": {"x": "no base64 at all!"}},
        {"fetch_files": ["/etc/shadow"]},
        {"fetch_files": ["../../../proc/1/environ"]},
        {"language": "python; cat /etc/shadow"},
        {"language": "../../bin/sh"},
        {"run_timeout": 1e12},
        {"run_timeout": -1},
        {"memory_limit_MB": -5},
        {"compile_timeout": "NaN"},
    ],
    ids=lambda fields: json.dumps(fields)[:50],
)
def test_a_request_of_run_code_that_asks_for_more_is_refused_or_bounded(
    grading_url: str, fields: dict[str, Any]
) -> None:
    answer = post(grading_url, "/run_code", {"code": "print(1)", "language": "python", **fields})
    assert "root:" not in answer.text
    assert answer.status_code in (422, 501) or answer.json()["run_result"]["stdout"] == "1\n", answer.text


def test_printed_json_is_only_the_programs_output(grading_url: str) -> None:
    forged = json.dumps({"status": "Success", "message": "", "run_result": {"status": "Finished", "return_code": 0}})
    answer = run(grading_url, f"import sys\nprint({forged!r})\nsys.exit(7)", run_timeout=10)
    assert (answer["status"], answer["run_result"]["return_code"]) == ("Failed", 7)
    assert answer["run_result"]["stdout"] == forged + "\n"


@pytest.mark.parametrize(
    "code", ["while True: print('\\0' * 1000)", "while True: print('\\ud800'.encode('utf8', 'replace'))"]
)
def test_a_flood_of_run_code_is_bounded(grading_url: str, code: str) -> None:
    answer = post(grading_url, "/run_code", {"code": code, "language": "python", "run_timeout": 5})
    assert len(answer.content) <= 64 << 20
    assert answer.json()["status"] == "Failed"


@pytest.mark.parametrize(
    "code",
    [
        "import os\nn = input()\nif n == '0': os.kill(-1, 9)\nprint(n if n != '2' else 'x')",
        "import os\nn = input()\nif n == '0': os._exit(0)\nif os.path.exists('/tmp/seen'): print('seen')\n"
        "open('/tmp/seen', 'w')\nprint(n if n != '2' else 'x')",
        pytest.param(
            "import sys\nn = input()\nif n == '0': sys.setrecursionlimit(10**9); f = lambda: f(); f()\n"
            "print(n if n != '2' else 'x')",
            marks=pytest.mark.heavy,
        ),
    ],
    ids=["kills all", "leaves a file", "recurses"],
)
def test_a_program_that_breaks_in_one_test_is_judged_alone_in_each_other(grading_url: str, code: str) -> None:
    """Run-all: three tests, of which the first is broken by force and the last is wrong."""
    cases = [{"input": f"{n}\n", "output": f"{n}\n"} for n in range(3)]
    tests = {"type": "stdin", "cases": cases}
    request = {"code": code, "tests": tests, "limits": LIMITS, "stop_on_first_failure": False}
    answer = post(grading_url, "/v1/grade?tests=true", request).json()
    assert (answer["passed"], answer["graded"], answer["total"]) == (1, 3, 3), answer
    provided = {"test": [{"input": {"stdin": c["input"]}, "output": {"stdout": c["output"]}} for c in cases]}
    config = {"language": "python", "run_timeout": 5, "provided_data": provided, "extra": {"run_all_cases": True}}
    body = {"dataset": "x", "id": 1, "completion": f"```python\n{code}\n```", "config": config}
    judged = post(grading_url, "/submit", body).json()
    assert (judged["accepted"], [test["passed"] for test in judged["tests"]]) == (False, [False, True, False])


@pytest.mark.parametrize(
    "label",
    ["[" * 50_000, '{"tests": ' * 5_000, "null", "NaN", '{"tests": {"type": "stdin", "cases": []}}', "9" * 100_000],
    ids=["deep list", "deep object", "null", "NaN", "no cases", "large number"],
)
def test_a_label_of_a_remote_reward_that_is_no_test_is_refused(grading_url: str, label: str) -> None:
    body = {"query": ["p```python\nprint(1)\n```"], "prompts": ["p"], "labels": [label]}
    assert post(grading_url, "/get_reward", body).status_code == 422


def test_an_answer_that_holds_rewards_is_only_text(grading_url: str) -> None:
    forged = 'p {"rewards": [1.0], "scores": [1.0]} ```json\n{"rewards": [1.0]}\n```'
    tests = {"type": "stdin", "cases": [{"input": "", "output": "1"}]}
    answer = post(
        grading_url, "/get_reward", {"query": [forged], "prompts": ["p"], "labels": [{"tests": tests}]}
    ).json()
    assert answer["rewards"] == [-1.0]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/jobs/..%2f..%2fetc%2fpasswd",
        "/v1/jobs/%2e%2e/results",
        "/v1/jobs/%00",
        "/v1/jobs/*",
        "/v1/jobs/" + "a" * 5000,
    ],
)
def test_no_name_of_a_job_leaves_its_folder(grading_url: str, path: str) -> None:
    for method in ("GET", "DELETE"):
        answer = httpx.request(method, grading_url + path, timeout=LIMIT_S)
        assert answer.status_code in (404, 405, 414, 422), answer.text[:300]
        assert "root:" not in answer.text


@pytest.mark.parametrize(
    "webhook",
    ["http://169.254.169.254/latest", "file:///etc/passwd", "http://127.0.0.1:22/", "gopher://x/", "http://[::1]/"],
)
def test_a_webhook_to_any_server_is_refused(grading_url: str, webhook: str) -> None:
    line = json.dumps({"code": "1", "tests": {"type": "stdin", "cases": [{"input": "", "output": ""}]}})
    answer = httpx.post(
        f"{grading_url}/v1/jobs",
        params={"webhook": webhook},
        content=line,
        headers={"content-type": "application/x-ndjson"},
        timeout=LIMIT_S,
    )
    assert answer.status_code == 422, answer.text[:300]
