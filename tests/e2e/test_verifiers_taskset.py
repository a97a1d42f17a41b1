"""The taskset `nouscoder-code` in the evaluator of verifiers, with a stub of the model: make test-trainers.

The configurations are those of the package's README.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.openai_mock import MockServer, completion, serving

from nouscoder.data.problem_parquet import read_problems
from nouscoder.data.problems import EXAMPLES, save_problems

ROOT = Path(__file__).parents[2]
README = ROOT / "integrations" / "nouscoder-code" / "README.md"
BIN = ROOT / ".venv-trainers" / "bin"
RIGHT = {
    "Read two integers": "```python\nprint(sum(map(int, input().split())))\n```",
    "Write double(x)": "```python\ndef double(x):\n    return x + x\n```",
    "Read n": "```python\nprint(input(), 0)\n```",
    "one half of one half": "It is $\\boxed{0.25}$.",
}
pytestmark = pytest.mark.trainers


def block(kind: str, number: int = 0) -> str:
    """A block of the README."""
    found = re.findall(rf"```{kind}\n(.*?)^```", README.read_text("utf8"), re.DOTALL | re.MULTILINE)
    return str(found[number])


def answer(request: dict[str, Any]) -> dict[str, Any]:
    asked = request["messages"][-1]["content"]
    return completion(next((text for begin, text in RIGHT.items() if begin in asked), "```python\nprint(-1)\n```"))


def evaluated(folder: Path, service: str, *flags: str) -> dict[str, dict[str, Any]]:
    """The trace of each problem, as vf-eval writes it with the README's configuration."""
    with serving(MockServer(answer=answer)) as model:
        text = block("toml").replace("http://127.0.0.1:8000/v1", model.url).replace("http://127.0.0.1:8080", service)
        (folder / "eval.toml").write_text(text)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # it needs uv
        command = [str(BIN / "vf-eval"), "@", "eval.toml", "--no-rich", "--run.dir", "run", *flags]
        environment = {**os.environ, "OPENAI_API_KEY": "none", "PATH": path}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    lines = (folder / "outputs" / "run" / "traces.jsonl").read_text("utf8").splitlines()
    traces = [trace for line in lines for trace in json.loads(line).get("traces", [json.loads(line)])]
    return {trace["task"]["key"]: trace for trace in traces}


def test_the_evaluator_gives_the_rewards_of_the_service_and_its_traces_hold_no_hidden_test(
    grading_url: str, tmp_path: Path
) -> None:
    source = tmp_path / "source.jsonl"
    source.write_text("".join(json.dumps(example) + "\n" for example in EXAMPLES))
    save_problems(tmp_path / "problems.jsonl", read_problems(source))
    traces = evaluated(tmp_path, grading_url)
    verdicts = {name: trace["info"]["grading"]["verdict"] for name, trace in traces.items()}
    print(f"verifiers {traces['sum']['verifiers']['version']}: {verdicts}")
    rewards = {name: trace["rewards"]["accepted"]["score"] for name, trace in traces.items()}
    assert rewards == {"sum": 1.0, "double": 1.0, "split": 1.0, "half": 1.0, "two-sum": 0.0, "guess": 0.0}
    assert all(trace["ok"] and not trace["errors"] for trace in traces.values())
    assert traces["double"]["metrics"] == {"tests_passed": 1.0}
    assert traces["two-sum"]["info"]["grading"]["passed"] == 0
    assert all("tests" not in trace["task"]["data"] for trace in traces.values())
    text = json.dumps(traces)
    assert "You are an expert Python programmer" in text  # the form livecodebench
    for hidden in ("math.isnan", "sys.argv", "testlib", '"cases"'):
        assert hidden not in text


def test_without_a_service_the_evaluator_records_an_error_and_no_reward(tmp_path: Path) -> None:
    (tmp_path / "problems.jsonl").write_text(block("json"))
    traces = evaluated(tmp_path, "http://127.0.0.1:1", "--env.taskset.task.patience-s", "0")
    assert traces["sum"]["ok"] is False
    assert traces["sum"]["rewards"] == {"accepted": None}
    (error,) = traces["sum"]["errors"]
    assert error["type"] == "TaskError"
    assert "does not answer" in json.dumps(error)


def test_the_configuration_of_prime_rl_names_keys_that_verifiers_knows() -> None:
    """prime-rl is not on the package index: its own part of the configuration is not checked, only `env`."""
    script = (
        "import sys, tomllib; from verifiers.v1.utils.loaders import resolve_env_config as read;"
        "source, = tomllib.loads(sys.stdin.read())['orchestrator']['train']['source'];"
        "env = read(source['env']); print(env.taskset.id, env.taskset.task.url, env.agent.harness.id)"
    )
    done = subprocess.run(
        [str(BIN / "python"), "-c", script], input=block("toml", 1), capture_output=True, text=True, check=False
    )
    assert done.stdout == "nouscoder-code http://grading:8080 null\n", done.stderr[-2000:]


def test_a_problem_file_that_is_none_is_refused_in_one_sentence_with_the_line(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from nouscoder_code.taskset import *\n"
        "for name in sys.argv[1:]:\n"
        "    config = CodeTasksetConfig(task=CodeTaskConfig(problems=Path(name) if name else None))\n"
        "    try: print(len(list(CodeTaskset(config))))\n"
        "    except ProblemFault as fault: print(fault)\n"
    )
    lines = {"a": block("json"), "b": "\n", "c": "PAR1", "d": '\n{"problem_id": 1, "prompt": "x"}', "e": "[]"}
    for name, text in lines.items():
        (tmp_path / name).write_text(text)
    command = [str(BIN / "python"), "-c", script, *lines, "f", ""]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "1",
        "b holds no problem",
        "c, line 1: not JSON; a problem file has JSON lines",
        "d, line 2: tests is missing",
        "e, line 1: not an object",
        "f cannot be read: No such file or directory",
        "no problem file: set task.problems of the taskset, --env.taskset.task.problems FILE",
    ], done.stderr[-2000:]
