"""SandboxFusion's client package can parse the answers of POST /run_code, with the real sandbox."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest
import sandbox_fusion
from sandbox_fusion.models import (
    EvalResult,
    GetPromptByIdRequest,
    GetPromptsRequest,
    RunCodeRequest,
    RunCodeResponse,
    RunJupyterRequest,
    SubmitRequest,
    SummaryMapping,
    TestConfig,
)


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
        ({"fetch_files": ["../out"]}, "fetch_files"),
        ({"fetch_files": ["out"] * 65}, "fetch_files"),
        ({"run_timeout": 1e9}, "limits.wall_time_s"),
        ({"code": None}, "code"),
    ],
)
def test_an_invalid_run_is_422_with_its_field(grading_url: str, fields: dict[str, Any], field: str) -> None:
    answer = httpx.post(f"{grading_url}/run_code", json={"code": "1", "language": "python", **fields})
    assert (answer.status_code, answer.json()["field"]) == (422, field)


def test_files_that_a_program_writes_are_fetched(grading_url: str) -> None:
    code = """
import os
open("a.bin", "wb").write(bytes(range(256)))
open("empty", "w").close()
os.mkdir("folder")
os.symlink("/etc/passwd", "link")
os.mkfifo("pipe")
open("locked", "w").write("x")
os.chmod("locked", 0)
open("large", "wb").truncate(7_000_000)
open("larger", "wb").truncate(7_000_001)
open("largest", "wb").truncate(7_000_002)
"""
    names = ["a.bin", "empty", "folder", "link", "pipe", "locked", "none", "large", "larger", "largest", "a.bin"]
    answer = run(grading_url, code, fetch_files=names)
    assert answer.status == "Success", answer
    found = {name: base64.b64decode(text) for name, text in answer.files.items()}
    assert (found["a.bin"], found["empty"], found["locked"]) == (bytes(range(256)), b"", b"x")
    assert {name: len(content) for name, content in found.items()} == {
        "a.bin": 256, "empty": 0, "locked": 1, "large": 7_000_000, "larger": 7_000_001,
    }  # fmt: skip
    assert answer.message.endswith("too large: folder, link, pipe, none, largest")
    again = run(grading_url, "print(1)", fetch_files=["a.bin"])
    assert (again.files, again.message[:11]) == ({}, "not fetched")


def test_files_of_a_compiled_program_are_fetched_and_warnings_told(grading_url: str) -> None:
    code = """
    #include <cstdio>
    #warning look here
    int main() { std::FILE *file = std::fopen("out.txt", "w"); std::fputs("made", file); std::fclose(file); }
    """
    for _ in range(2):  # the second time the program comes from the cache
        answer = run(grading_url, code, language="cpp", fetch_files=["out.txt"])
        assert answer.status == "Success", answer
        assert answer.files == {"out.txt": base64.b64encode(b"made").decode()}
        assert answer.compile_result is not None
        assert "look here" in (answer.compile_result.stderr or "")


def test_a_null_is_the_default(grading_url: str) -> None:
    """As verl sends `memory_limit_MB` when it is not configured. A refusal would be a score of 0."""
    nulls = ("stdin", "compile_timeout", "run_timeout", "memory_limit_MB", "files", "fetch_files")
    body = {"code": "print(6 * 7)", "language": "python", **dict.fromkeys(nulls)}
    answer = httpx.post(f"{grading_url}/run_code", json=body, timeout=60).json()
    assert (answer.get("status"), answer["run_result"]["stdout"]) == ("Success", "42\n")


def test_the_memory_limit_is_enforced(grading_url: str) -> None:
    body = {"code": "x = bytearray(10**9)", "language": "python", "memory_limit_MB": 200}
    result = httpx.post(f"{grading_url}/run_code", json=body, timeout=60).json()
    assert result["status"] == "Failed"
    assert "MemoryError" in result["run_result"]["stderr"] or "memory limit" in result["run_result"]["stderr"]


def test_the_time_of_the_compiler_is_reported(grading_url: str) -> None:
    answer = run(grading_url, "int main() { return 0; }", language="cpp")
    assert answer.status == "Success"
    assert answer.compile_result is not None
    assert (answer.compile_result.status, answer.compile_result.return_code) == ("Finished", 0)
    assert 0.005 < (answer.compile_result.execution_time or 0) < 60
    failed = run(grading_url, "int main() {", language="cpp")
    assert (failed.status, failed.run_result) == ("Failed", None)
    assert failed.compile_result is not None
    assert failed.compile_result.return_code == 1
    assert "error" in (failed.compile_result.stderr or "")
    assert 0.005 < (failed.compile_result.execution_time or 0) < 60
    assert sandbox_fusion.summary_run_code_result(failed, SummaryMapping(CompileFailed="no")) == "no"


ROW = {"test": [{"input": {"stdin": f"{n}"}, "output": {"stdout": f"Twice: {2 * n}.0\n"}} for n in range(3)]}


def submitted(url: str, completion: str, **config: Any) -> EvalResult:
    """What SandboxFusion's own client gets."""
    given = TestConfig(**{"language": "python", "provided_data": ROW, "dataset_type": "CommonOJDataset", **config})
    request = SubmitRequest(dataset="mine", id=7, completion=completion, config=given)
    return sandbox_fusion.submit(request, endpoint=url, max_attempts=1, client_timeout=60)


def test_submit_grades_an_answer_with_the_tests_of_the_request(grading_url: str) -> None:
    right = submitted(grading_url, "```python\nprint('twice:', 2 * int(input()))\n```")
    assert (right.id, right.accepted, len(right.tests)) == (7, True, 3)
    assert right.extracted_code == "print('twice:', 2 * int(input()))"
    assert all(test.passed and test.exec_info.status == "Success" for test in right.tests)
    answer = (
        "```python\nprint('twice:', 2 * int(input()))\n```\nRun:\n```bash\npython a.py\n```\n```cpp\nint main() {}\n```"
    )
    in_its_language = submitted(grading_url, answer)
    assert (in_its_language.accepted, in_its_language.extracted_code) == (True, right.extracted_code)
    row = {"test": json.dumps(ROW["test"])}
    as_text = submitted(grading_url, "```\nprint('TWICE:', 2 * int(input()))\n```", provided_data=row)
    assert as_text.accepted
    wrong = submitted(grading_url, "```python\nprint('twice:', int(input()))\n```", extra={"run_all_cases": True})
    assert (wrong.accepted, [test.passed for test in wrong.tests]) == (False, [True, False, False])
    assert wrong.tests[1].exec_info.run_result is not None
    assert wrong.tests[1].exec_info.run_result.stdout == "twice: 1\n"
    crash = submitted(grading_url, "```python\n1/0\n```")
    assert (crash.accepted, len(crash.tests)) == (False, 1)
    ran = crash.tests[0].exec_info.run_result
    assert ran is not None
    assert "ZeroDivisionError" in (ran.stderr or "")
    for bad, outcome in (("```python\nprint(\n```", "compile_error"), ("no program", "no_code")):
        refused = submitted(grading_url, bad)
        assert (refused.accepted, refused.tests[0].test_info) == (False, {"outcome": outcome})
        assert refused.tests[0].exec_info.status == "Failed"


@pytest.mark.parametrize("prompt", ["Go.<think>\n", [{"role": "assistant", "content": "<think>"}]])
def test_a_prompt_that_opens_reasoning_hides_the_code_in_it(grading_url: str, prompt: object) -> None:
    code = "```python\nprint('twice:', 2 * int(input()))\n```"
    assert not submitted(grading_url, code, extra={"prompt": prompt}).accepted
    assert submitted(grading_url, f"so</think>{code}", extra={"prompt": prompt}).accepted
    assert submitted(grading_url, code, extra={"prompt": ["not messages"]}).accepted


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"run_timout": 0.5}, "run_timout"),
        ({"memory_limit_MB": 64}, "memory_limit_MB"),
        ({"extra": {"run_all_case": True}}, "extra.run_all_case"),
        ({"provided_data": ROW | {"special_judge": "int main() {}"}}, "provided_data.special_judge"),
        ({"provided_data": ROW | {"cheker": "int main() {}"}}, "provided_data.cheker"),
    ],
)
def test_what_would_change_the_grading_and_is_not_done_is_refused(
    grading_url: str, config: dict[str, Any], field: str
) -> None:
    body = {"id": 1, "completion": "x", "config": {"language": "python", "provided_data": ROW, **config}}
    answer = httpx.post(f"{grading_url}/submit", json=body)
    assert (answer.status_code, answer.json()["field"]) == (422, f"config.{field}")
    columns = {"content": "Twice.", "labels": {"rating": 800}, "id": 3, "tests_of": None}
    config = {"language": "python", "provided_data": ROW | columns, "locale": "en", "is_fewshot": True}
    assert httpx.post(f"{grading_url}/submit", json={**body, "config": config}).status_code == 200


def test_what_the_service_has_not_is_a_501_that_says_what_to_use(grading_url: str) -> None:
    """Each of the other calls of SandboxFusion's client."""
    with pytest.raises(Exception, match=r"501.*runs no notebooks: send programs to /run_code"):
        sandbox_fusion.run_jupyter(RunJupyterRequest(cells=["1"]), endpoint=grading_url, max_attempts=1)
    with pytest.raises(Exception, match=r"501.*has no data sets"):
        sandbox_fusion.get_prompts(GetPromptsRequest(dataset="x", config=TestConfig()), endpoint=grading_url)
    with pytest.raises(Exception, match=r"501.*has no data sets"):
        sandbox_fusion.get_prompt_by_id(
            GetPromptByIdRequest(dataset="x", id=1, config=TestConfig()), endpoint=grading_url
        )
    with pytest.raises(Exception, match=r"501.*has no data sets"):
        submitted(grading_url, "x", provided_data=None)
    with pytest.raises(Exception, match=r"422.*config.provided_data.test\[0\]"):
        submitted(grading_url, "x", provided_data={"test": [{"input": {"file": "a"}, "output": {"stdout": "b"}}]})
