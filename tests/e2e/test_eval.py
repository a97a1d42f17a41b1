"""`nouscoder eval` over real HTTP: a server with OpenAI's API whose quality is known, and real sandboxes.

The server answers each request by its seed, as a real server does, so what it answers does not depend on the order.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.openai_mock import MockServer, completion, serving

from nouscoder.cli.app import app
from nouscoder.config import Config, load_config
from nouscoder.data.importers.formats import format_named
from nouscoder.data.importers.run import import_files
from nouscoder.domain.estimates import pass_at_k
from nouscoder.domain.submission import Profile
from nouscoder.errors import NousCoderError, Unusable
from nouscoder.evaluation import samples
from nouscoder.evaluation.evaluate import EvaluationRequest, evaluate
from nouscoder.evaluation.samples import EvaluationIncomplete, SamplingSettings, sample_seed
from nouscoder.grade_files.entries import Entry
from nouscoder.openai_server import CompletionFailed
from nouscoder.retry import Retry

LEETCODE = Path(__file__).parents[1] / "data" / "leetcode_200.jsonl.gz"
NUM_SAMPLES = 8
NUM_RIGHT = {"p0": 8, "p1": 3, "p2": 1, "p3": 0}

pytestmark = pytest.mark.timeout(1200)  # on a busy machine


def mixed(request: dict[str, Any]) -> dict[str, Any]:
    """Right for the first NUM_RIGHT samples of a problem; the last sample of each problem is cut off."""
    name = request["messages"][-1]["content"].split()[-1]
    position = [sample_seed(0, name, at) for at in range(NUM_SAMPLES)].index(request["seed"])
    if position < NUM_RIGHT[name]:
        return completion(f"Here:\n```python\nprint('{name}')\n```\n")
    if position == NUM_SAMPLES - 1:
        return completion("I would", "length")
    return completion(f"Here:\n```python\nprint('no', {position})\n```\n")


def write_problems(path: Path) -> Path:
    """The problems of NUM_RIGHT: each wants its name printed."""
    lines = [
        {
            "problem_id": name,
            "prompt": f"Print {name}",
            "tests": {"type": "stdin", "cases": [{"input": "", "output": f"{name}\n"}]},
            "limits": {"wall_time_s": 120, "cpu_time_s": 60},
            "difficulty": "easy" if name in ("p0", "p1") else "hard",
            "metadata": {"contest_date": f"2024-0{8 + number // 2}-15T00:00:00", "platform": "mock"},
        }
        for number, name in enumerate(NUM_RIGHT)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(None, [])


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_problems(tmp_path_factory.mktemp("problems") / "problems.jsonl")


def request_of(problems: Path, out: Path, url: str) -> EvaluationRequest:
    """NUM_SAMPLES samples of each problem from the server."""
    return EvaluationRequest(problems, out, SamplingSettings("mock", NUM_SAMPLES), url, at_once=2)


@pytest.fixture(scope="module")
def whole(problems: Path, config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an evaluation that was not interrupted."""
    out = tmp_path_factory.mktemp("whole")
    with serving(MockServer(mixed)) as mock:
        evaluate(request_of(problems, out, mock.url), config)
        assert {len(mock.requests), len({request["seed"] for request in mock.requests})} == {32}
        assert {(request["temperature"], request["top_p"]) for request in mock.requests} == {(0.6, 0.95)}
    return out


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_server_of_known_quality_gets_its_exact_pass_at_k(whole: Path) -> None:
    record = json.loads((whole / "report.json").read_text())
    found = record["profiles"]["process"]
    values = {int(k): one["value"] for k, one in found["pass_at_k"].items()}
    assert values == {k: sum(pass_at_k(8, c, k) for c in NUM_RIGHT.values()) / 4 for k in (1, 2, 4, 5, 8)}
    assert (values[1], values[8]) == (12 / 32, 3 / 4)
    # Three problems of four have a last sample that was cut off.
    assert found["verdicts"] == {"wrong_answer": 17, "accepted": 12, "no_code": 3}
    assert record["truncated"] == {"samples": 3, "accepted": 0}
    assert [(row["name"], row["value"]) for row in found["by"]["difficulty"]] == [("easy", 11 / 16), ("hard", 1 / 16)]
    assert [row["name"] for row in found["by"]["month"]] == ["2024-08", "2024-09"]
    assert {problem["problem_id"]: problem["accepted"]["process"] for problem in record["problems"]} == NUM_RIGHT
    assert len(lines_of(whole / "samples.jsonl")) == 32


def test_a_killed_evaluation_goes_on_to_the_same_report_and_asks_nothing_twice(
    whole: Path, problems: Path, config: Config, tmp_path: Path
) -> None:
    with serving(MockServer(mixed, limit=10)) as mock:
        command = [sys.executable, "-m", "nouscoder", "eval", str(problems), "--url", mock.url, "--model", "mock"]
        with (tmp_path / "output").open("wb") as output:
            process = subprocess.Popen([*command, "--out", str(tmp_path / "out"), "--at-once", "2"], stderr=output)
        samples = tmp_path / "out" / "samples.jsonl"
        end = time.monotonic() + 200
        while not samples.exists() or samples.read_text().count("\n") < 10:
            assert process.poll() is None, (tmp_path / "output").read_text()
            assert time.monotonic() < end, "the first samples did not come"
            threading.Event().wait(0.02)
        process.kill()
        process.wait(60)
        stored = samples.read_bytes()
        with samples.open("ab") as torn:
            torn.write(b'{"key": "half a li')
        mock.release.set()
        num_asked = len(mock.requests)
        evaluate(request_of(problems, tmp_path / "out", mock.url), config)
        assert len(mock.requests) - num_asked == 32 - stored.count(b"\n")
    assert samples.read_bytes().startswith(stored)
    for name in ("report.json", "report.html"):
        assert (tmp_path / "out" / name).read_bytes() == (whole / name).read_bytes(), name


def test_what_is_stored_is_neither_sampled_nor_graded_again(
    whole: Path, problems: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: (whole / name).read_bytes() for name in ("samples.jsonl", "verdicts.jsonl", "report.json")}
    monkeypatch.setattr(samples.SampleGrading, "_graded", None)  # a grading would raise
    evaluate(request_of(problems, whole, "http://127.0.0.1:9/v1"), config)
    assert {name: (whole / name).read_bytes() for name in before} == before


def test_a_busy_server_is_asked_again_and_a_refusal_is_reported(problems: Path, config: Config, tmp_path: Path) -> None:
    with serving(MockServer(mixed, statuses=[429, 503])) as mock:
        request = replace(request_of(problems, tmp_path / "busy", mock.url), sampling=SamplingSettings("mock", 1))
        assert evaluate(request, config)["num_samples"] == 4
        mock.statuses = [400] * 4
        with pytest.raises(CompletionFailed, match="refused chat/completions: HTTP 400"):
            evaluate(replace(request, out=tmp_path / "refused"), config)


def test_a_failure_of_the_grading_is_no_wrong_sample_and_is_tried_again(
    problems: Path, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "samples.jsonl"
    given.write_text(
        "".join(json.dumps({"task_id": name, "solution": f"print('{name}')"}) + "\n" for name in NUM_RIGHT)
    )
    request = EvaluationRequest(problems, tmp_path / "out", SamplingSettings(""), samples=given)

    async def failing(self: samples.SampleGrading, entry: Entry) -> dict[str, Any]:
        raise samples._InternalError("the sandbox is gone")

    with monkeypatch.context() as patched:
        patched.setattr(samples.SampleGrading, "_graded", failing)
        with pytest.raises(EvaluationIncomplete, match=r"4 samples could not be graded.*the sandbox is gone"):
            evaluate(request, config)
    assert not (tmp_path / "out" / "report.json").exists()
    record = evaluate(request, config)
    assert record["profiles"]["process"]["verdicts"] == {"accepted": 4}


def test_both_profiles_side_by_side_list_where_they_disagree(
    problems: Path, config: Config, grading_url: str, tmp_path: Path
) -> None:
    """LiveCodeBench's grader accepts a program that prints the right output and exits with code 1. By a service."""
    lists = [
        [f"print('{name}')\nimport sys\nsys.exit({int(name == 'p1')})", "print(0)  # \ud800"] for name in NUM_RIGHT
    ]
    given = tmp_path / "samples.json"
    given.write_text(
        json.dumps([{"question_id": name, "code_list": own} for name, own in zip(NUM_RIGHT, lists, strict=True)])
    )
    request = EvaluationRequest(problems, tmp_path / "out", SamplingSettings(""), samples=given, verifier=grading_url)
    request = replace(request, profiles=(Profile.LCB, Profile.PROCESS))
    record = evaluate(request, config)
    assert record["disagreements"] == [
        {"problem_id": "p1", "position": 0, "verdicts": {"lcb": "accepted", "process": "runtime_error"}}
    ]
    assert {name: one["pass_at_k"]["2"]["value"] for name, one in record["profiles"].items()} == {
        "lcb": 1.0,
        "process": 0.75,
    }
    assert "1 of 8 samples are accepted by one profile only" in (tmp_path / "out" / "report.html").read_text()


def test_a_window_evaluates_only_its_problems(whole: Path, problems: Path, config: Config, tmp_path: Path) -> None:
    given = tmp_path / "samples.jsonl"
    given.write_text("".join(json.dumps({"task_id": name, "solution": "print(1)"}) + "\n" for name in NUM_RIGHT))
    from nouscoder.evaluation.problems import Window

    request = EvaluationRequest(problems, tmp_path / "out", SamplingSettings(""), samples=given)
    record = evaluate(replace(request, window=Window("2024-09-01", "2024-12-01")), config)
    assert [problem["problem_id"] for problem in record["problems"]] == ["p2", "p3"]
    with pytest.raises(NousCoderError, match="no problem dated from 2030-01-01"):
        evaluate(replace(request, window=Window("2030-01-01")), config)
    given.write_text(json.dumps({"task_id": "p9", "solution": "print(1)"}))
    with pytest.raises(Unusable, match="line 1: the problem file has no problem 'p9'"):
        evaluate(request, config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("P", "give one of --url (with --model), --policy and --samples"),
        ("P --url http://x", "--url needs --model"),
        ("P --url http://x --model m --prompt chat", "--prompt 'chat' is none of plain, livecodebench"),
        ("P --url http://x --model m --extra 3", "--extra '3' is not a JSON object"),
        ("P --url http://x --model m --window lcb-v6 --since 2024-01-01", "give either --window"),
        ("absent.jsonl --url http://x --model m", "absent.jsonl cannot be read"),
    ],
)
def test_what_cannot_be_evaluated_is_reported_in_one_sentence(
    problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [str(problems) if word == "P" else word for word in arguments.split()]
    with pytest.raises(NousCoderError, match=re.escape(message)):
        app(["eval", *words], standalone_mode=False)


def references(num_problems: int | None, folder: Path) -> tuple[Path, dict[str, str], dict[str, str]]:
    """(problem file, reference of each prompt, reference with the data set's own test of each problem)."""
    known = format_named("leetcode")
    rows = [row.value for row in known.rows(LEETCODE, 0)][:num_problems]
    part = folder / "leetcode.jsonl"
    part.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert import_files("leetcode", [part], folder / "problems.parquet", "").problems == len(rows)
    read = [(known.read(row, number), row) for number, row in enumerate(rows)]
    by_prompt = {item.problem.prompt: item.references[0].code for item, _ in read}
    own = {
        item.problem.problem_id: "\n".join(
            (row["prompt"], item.references[0].code, row["test"], f"check({row['entry_point']})\n")
        )
        for item, row in read
    }
    return folder / "problems.parquet", by_prompt, own


async def passes(program: str) -> bool:
    """Whether a bare Python process ends without an error."""
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(sys.executable, "-I", "-", stdin=pipe, stdout=null, stderr=null)
    await process.communicate(program.encode())
    return process.returncode == 0


@pytest.mark.parametrize("num_problems", [4, pytest.param(None, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_the_references_as_the_model_get_the_data_sets_own_pass_count(
    num_problems: int | None, config: Config, tmp_path: Path
) -> None:
    file, by_prompt, own = references(num_problems, tmp_path)

    def reference(request: dict[str, Any]) -> dict[str, Any]:
        return completion(f"```python\n{by_prompt[request['messages'][-1]['content']]}```\n")

    with serving(MockServer(reference)) as mock:
        request = EvaluationRequest(file, tmp_path / "out", SamplingSettings("reference", 1), mock.url, at_once=4)
        record = evaluate(request, config)
    found = {one["problem_id"]: bool(one["accepted"]["process"]) for one in record["problems"]}
    truth = {name: asyncio.run(passes(program)) for name, program in own.items()}
    print(
        f"of {len(truth)}: {sum(found.values())} by the evaluation, {sum(truth.values())} by the data set's own tests"
    )
    assert found == truth
    assert record["profiles"]["process"]["pass_at_k"]["1"]["value"] == sum(truth.values()) / len(truth)
    assert all(len(row["name"]) == len("2024-01") for row in record["profiles"]["process"]["by"]["month"])


def test_retries_of_the_client_and_of_the_grading_are_bounded() -> None:
    from nouscoder import openai_server

    for policy in (openai_server._WHILE_UNAVAILABLE, samples._AFTER_INTERNAL_ERRORS):
        assert isinstance(policy, Retry)
        assert policy.max_tries is not None
