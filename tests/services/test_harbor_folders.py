"""Harbor's task folders: what is imported, what is refused and why, and what an export writes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nouscoder.cli.app import app
from nouscoder.config import load_config
from nouscoder.data.harbor import grade
from nouscoder.data.importers import harbor
from nouscoder.data.importers.fields import Rejected
from nouscoder.data.importers.formats import read_referenced
from nouscoder.data.importers.run import rejections_of
from nouscoder.data.packages import packages_at
from nouscoder.data.problem_parquet import read_parquet
from nouscoder.data.problems import ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.prompt import PromptForm, PromptSettings, PromptText
from nouscoder.domain.submission import CheckerTests
from nouscoder.verifier.grading.grader import local_grader
from nouscoder.verifier.grading.validation import Bounds, InvalidSubmission, validate
from nouscoder.verifier.judges.lcb import PRELUDE

TASK = """schema_version = "1.4"
[task]
name = "examples/double"
[verifier]
timeout_sec = 100.0
environment_mode = "shared"
"""
TEST_SH = """#!/bin/bash
mkdir -p /logs/verifier
if python3 /tests/test_outputs.py; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
exit 1
"""
TEST_OUTPUTS = """
import subprocess, sys, unittest

class Outputs(unittest.TestCase):
    def test_doubles(self):
        for number in (1, 20):
            done = subprocess.run([sys.executable, "/app/double.py"], input=str(number), capture_output=True, text=True)
            self.assertEqual(done.stdout.strip(), str(2 * number))

    def test_keeps_the_file(self):
        self.assertEqual(open("given.txt").read(), "given")

unittest.main()
"""
SOLVE = "cp /solution/double.py double.py\n"
DOUBLE = "print(2 * int(input()))\n"
DOCKERFILE = "FROM python:3.12-slim\n\n# the files\nWORKDIR /app\nCOPY given.txt ./\n"
FOLDER = {
    "task.toml": TASK,
    "instruction.md": "Write /app/double.py, which reads a number and prints it doubled.",
    "environment/Dockerfile": DOCKERFILE,
    "environment/given.txt": "given",
    "tests/test.sh": TEST_SH,
    "tests/test_outputs.py": TEST_OUTPUTS,
    "solution/solve.sh": SOLVE,
    "solution/double.py": DOUBLE,
}


def written(folder: Path, files: dict[str, str]) -> Path:
    """A task folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def imported(folder: Path, out: Path) -> tuple[int, str]:
    """The exit code and output of an import."""
    done = CliRunner().invoke(app, ["data", "import", "harbor", str(folder), "--out", str(out)])
    return done.exit_code, done.output + str(done.exception or "")


DOUBLED = "cat > /app/double.py <<'E'\nprint(int(input()) * 2)\nE\n"
ANSWERS = {
    DOUBLED: "accepted",
    "true": "wrong_answer",
    DOUBLED.replace("* 2", "+ 1"): "wrong_answer",
    DOUBLED + "rm given.txt": "wrong_answer",
    # What an answer leaves running is ended before the tests run, and so is what it wrote as a reward.
    "(while true; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; done) &": "wrong_answer",
    "mkdir -p /logs/verifier; echo '{\"reward\": 1}' > /logs/verifier/reward.json": "wrong_answer",
    # A program that ends the tests gets no reward from them, which is its own fault.
    "echo 'import os; os.kill(-1, 9)' > double.py": "wrong_answer",
    "kill -9 $PPID": "wrong_answer",
}


@pytest.fixture(scope="module")
def item(tmp_path_factory: pytest.TempPathFactory) -> ReferencedProblem:
    """The folder, imported."""
    place = tmp_path_factory.mktemp("harbor")
    code, text = imported(written(place / "double", FOLDER), place / "out.parquet")
    assert code == 0, text
    return next(iter(read_parquet(place / "out.parquet")))


async def graded(problem: Problem, answers: Sequence[str]) -> list[str]:
    """The verdicts of answers, each in a block as a policy gives it."""
    async with local_grader(load_config(None).verifier) as grader:
        rules = problem.grading_rules()
        blocks = [f"So:\n```bash\n{answer}\n```" for answer in answers]
        verdicts = [await grader.grade(rules.submission(problem.tests, block)) for block in blocks]
    return [verdict.kind.value for verdict in verdicts]


async def test_rollouts_are_graded_by_the_tests_of_a_folder(item: ReferencedProblem) -> None:
    """The oracle's script gets 1, doing nothing 0, and no answer decides on its own reward."""
    oracle, *others = await graded(item.problem, [item.references[0].code, *ANSWERS])
    assert oracle == "accepted"
    assert dict(zip(ANSWERS, others, strict=True)) == ANSWERS


@pytest.mark.parametrize("end", [". Its text is the checker program", ": a call of `answered` or of `judged` stands"])
def test_a_folder_that_an_earlier_version_imported_is_refused_at_grading(item: ReferencedProblem, end: str) -> None:
    """Its programs are in the problem file, and answers could cheat them: beside the tests, or by a pytest.py."""
    rules, tests = item.problem.grading_rules(), item.problem.tests
    assert isinstance(tests, CheckerTests)
    validate(rules.submission(tests, "```bash\ntrue\n```"), Bounds())
    old = replace(tests, checker=replace(tests.checker, code=f'"""The checker of an imported Harbor folder{end}."""'))
    with pytest.raises(InvalidSubmission, match=r"^tests\.checker: .* earlier version .* \(data import\)$"):
        validate(rules.submission(replace(old, runner=None), "```bash\ntrue\n```"), Bounds())


def test_a_policy_is_asked_for_a_script(item: ReferencedProblem) -> None:
    assert item.problem.problem_id == "double"
    assert item.problem.languages == ("bash",)
    for form in PromptForm:
        asked = PromptSettings(prompt_form=form).text(PromptText.of(item.problem))
        assert asked.startswith("Write /app/double.py, which reads a number")
        assert "one bash script that does this, in a block that begins with ```bash." in asked
        assert "standard input" not in asked
        assert "assertEqual" not in asked


# What cannot be graded here.

REFUSED = {
    "several steps": {"task.toml": 'schema_version = "1.4"\n[[steps]]\nname = "one"\n'},
    "/app/../tests": {"task.toml": TASK + '[environment]\nworkdir = "/app/../tests"\n'},
    "/app/..": {"environment/Dockerfile": DOCKERFILE.replace("WORKDIR /app", "WORKDIR /app/..")},
    "copies ../solution/double.py, which is not in its folder": {
        "environment/Dockerfile": f"{DOCKERFILE}COPY ../solution/double.py /app/x.py\n"
    },
    "copies a/../../tests, which is not in its folder": {
        "environment/Dockerfile": f"{DOCKERFILE}COPY a/../../tests /app/x\n"
    },
    "copies to /etc": {"environment/Dockerfile": f"{DOCKERFILE}COPY given.txt ../etc/\n"},
    "/app/../logs/artifacts": {"task.toml": 'artifacts = ["/app/../logs/artifacts"]\n' + TASK},
    "the artifact ../app/x is not in": {"task.toml": 'artifacts = [{source = "../app/x"}]\n' + TASK},
    "artifact /etc/passwd": {"task.toml": 'artifacts = ["/etc/passwd"]\n' + TASK},
    "docker_image": {"task.toml": TASK + '[environment]\ndocker_image = "example/image"\n'},
    "mcp_servers": {"task.toml": TASK + '[[environment.mcp_servers]]\nname = "m"\nurl = "http://m"\n'},
    "gpus": {"task.toml": TASK + "[environment]\ngpus = 1\n"},
    "allowed_hosts": {"task.toml": TASK + '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.example"]\n'},
    "another system than Linux": {"task.toml": TASK + '[environment]\nos = "windows"\n'},
    "another user": {"task.toml": TASK + '[agent]\nuser = "agent"\n'},
    "verifier.collect": {"task.toml": TASK + '[[verifier.collect]]\ncommand = "ls"\n'},
    "docker-compose.yaml": {"environment/docker-compose.yaml": "services: {}"},
    "comes from the host": {"task.toml": TASK + '[verifier.env]\nKEY = "${KEY}"\n'},
    "must be built, and no image is built here: RUN apt-get": {
        "environment/Dockerfile": "FROM ubuntu:24.04\nRUN apt-get update"
    },
    "no image is built here: FROM example/image": {"environment/Dockerfile": "FROM example/image"},
    "copies to /usr/lib/x": {"environment/Dockerfile": "FROM ubuntu:24.04\nCOPY given.txt /usr/lib/x"},
    "copies absent.txt, which is not there": {"environment/Dockerfile": "FROM ubuntu:24.04\nCOPY absent.txt /app/x"},
    "works in /root": {"task.toml": TASK + '[environment]\nworkdir = "/root"\n'},
    "needs the network: it calls curl": {"tests/test.sh": "curl -LsSf https://example.org/uv | sh"},
    "there is no solution/solve.sh": {"solution/solve.sh": None},
    "version 2.0": {"task.toml": 'schema_version = "2.0"\n'},
    "task.toml: ": {"task.toml": "not = toml = at all"},
    "metadata.nouscoder is 2": {"task.toml": "[metadata]\nnouscoder = 2\n"},
    "an artifact has options": {"task.toml": 'artifacts = [{source = "/app", exclude = ["x"]}]\n' + TASK},
}


@pytest.mark.parametrize(("reason", "changed"), REFUSED.items(), ids=REFUSED)
def test_what_a_sandbox_here_has_not_is_refused_by_name(
    tmp_path: Path, reason: str, changed: dict[str, str | None]
) -> None:
    """Before anything runs, in one sentence that names the folder."""
    files = {name: text for name, text in (FOLDER | changed).items() if text is not None}
    ((name, package),) = packages_at(written(tmp_path / "task", files), "task.toml")
    with pytest.raises(Rejected) as refused:
        harbor.read({"name": name, "files": package}, 1)
    assert str(refused.value).startswith("task: ")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


SEPARATE = """artifacts = ["double.py"]
""" + TASK.replace("shared", "separate")
IN_IMAGE = "FROM ubuntu:24.04\nENV NAME=double.py MORE='a b'\nWORKDIR /workspace\nCOPY . /tests/\nCOPY other.txt note\n"
OWN_TEST = """mkdir -p /logs/verifier
[ "$PWD $MORE" = "/workspace a b" ] && [ -f note ] && [ ! -f /app/given.txt ] && [ ! -d /solution/x ] || exit 1
echo "{\\"reward\\": $([ "$(echo 4 | python3 /app/$NAME)" = 8 ] && echo 1 || echo 0.25)}" > /logs/verifier/reward.json
"""


async def test_folders_whose_tests_do_not_work_here_are_refused(tmp_path: Path) -> None:
    """One import of five: the solution fails, no reward is written, doing nothing passes, and one is right."""
    task = FOLDER | {
        "task.toml": SEPARATE,
        "tests/Dockerfile": IN_IMAGE,
        "tests/other.txt": "",
        "tests/test.sh": OWN_TEST,
    }
    folders = {
        "fails": FOLDER | {"solution/double.py": "print(1)"},
        "lacks": FOLDER | {"tests/test.sh": "no-such-tool /app && echo 1 > /logs/verifier/reward.txt"},
        "passes": FOLDER | {"tests/test.sh": "echo 1 > /logs/verifier/reward.txt"},
        "separate": task,
        "strange": FOLDER | {"tests/test.sh": 'echo "{\\"a\\": 1, \\"b\\": 1}" > /logs/verifier/reward.json'},
    }
    for name, files in folders.items():
        written(tmp_path / "set" / name, files)
    code, text = await asyncio.to_thread(imported, tmp_path / "set", tmp_path / "out.parquet")
    assert code == 0, text
    reasons = {
        one["detail"].partition(":")[0]: one["detail"] for one in rejections_of(tmp_path / "out.parquet.rejected.jsonl")
    }
    assert reasons.keys() == {"fails", "lacks", "passes", "strange"}
    assert "its solution does not pass its tests here" in reasons["fails"]
    assert "tests/test.sh has written no reward" in reasons["lacks"]
    assert "an empty answer passes its tests" in reasons["passes"]
    assert "is no number from 0 to 1" in reasons["strange"]
    (item,) = read_parquet(tmp_path / "out.parquet")
    assert item.problem.problem_id == "separate"
    async with local_grader(load_config(None).verifier) as grader:
        rules = item.problem.grading_rules()
        verdict = await grader.grade(rules.submission(item.problem.tests, "```bash\nmkdir -p /solution/x\n```"))
    assert (verdict.kind.value, verdict.score) == ("wrong_answer", 0.25)


# What an export writes.

PROBLEMS: list[dict[str, Any]] = [
    {
        "problem_id": "sum/1",
        "prompt": "Print the sum.",
        "tests": {"type": "stdin", "cases": [{"input": "1 2\n", "output": "3.0"}, {"input": "5 2\n", "output": "7.0"}]},
        "comparator": {"type": "tokens", "float_tolerance": 0.01},
        "references": ["if __name__ == '__main__':\n    print(sum(map(int, input().split())) + 0.001)"],
    },
    {
        "problem_id": "two sum",
        "prompt": "Write f(a).",
        "tests": {"type": "call", "entry_point": "f", "cases": [{"args": [[1, 2]], "expected": [2, 1.0]}]},
        "prelude": "lcb",
        "references": ["class Solution:\n    def f(self, a: List[int]): return tuple(reversed(a))"],
    },
    {
        "problem_id": "two-sum",
        "prompt": "Write f(a).",
        "tests": {"type": "assert", "setup": "K = 3", "cases": ["assert f(1) == K - 1"]},
        "references": ["from __future__ import annotations\ndef f(a): return a + 1"],
    },
]
OTHERS: list[dict[str, Any]] = [
    {"problem_id": "cpp", "prompt": "", "languages": ["cpp"], "tests": PROBLEMS[0]["tests"]},
    {"problem_id": "half", "prompt": "", "tests": {"type": "math", "cases": [{"expected": "1/2"}]}},
]
WRONG = {
    "sum-1": ["print(3)", "print('3.0'); raise SystemExit(1)", ""],
    "two-sum": ["def f(a): return [1, 2]", "def f(a): return {1}", "import os; os._exit(0)"],
    "two-sum-2": ["def f(a): return a", "import os\nprint(True); os._exit(0)"],
}


@pytest.mark.parametrize(
    "tests",
    [
        {"type": "call", "entry_point": "gcd", "cases": [{"args": [12, 18], "expected": 6}]},
        {"type": "assert", "cases": ["assert gcd(12, 18) == 6"]},
    ],
)
def test_what_the_prelude_brings_is_no_answer_in_an_exported_folder(
    tests: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # else the program could not reach the interpreter of root
    limits = {"wall_time_s": 60, "cpu_time_s": 30, "memory_bytes": 1 << 30, "output_bytes": 1 << 20}
    problem = {"before": PRELUDE, "tests": tests, "limits": limits, "comparator": {"type": "exact"}}
    codes = [
        "print('hello')",
        "from math import gcd",
        "def gcd(a, b): return math.gcd(a, b)",
        "def gcd(a, b): return a",
    ]
    assert [grade.passes(problem, code, 0) for code in codes] == [False, True, True, False]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of the problems."""
    place = tmp_path_factory.mktemp("export")
    limits = {"limits": {"wall_time_s": 60, "cpu_time_s": 30}}
    (place / "p.jsonl").write_text("".join(json.dumps(one | limits) + "\n" for one in PROBLEMS + OTHERS))
    done = CliRunner().invoke(app, ["data", "export", "harbor", str(place / "p.jsonl"), "--out", str(place / "set")])
    assert done.exit_code == 0, done.output
    assert "3 task folders, 0 of them without a solution" in done.output
    assert "left out 1: the program is in cpp" in done.output
    assert "left out 1: math tests" in done.output
    again = CliRunner().invoke(app, ["data", "export", "harbor", str(place / "p.jsonl"), "--out", str(place / "set")])
    assert "exists already" in str(again.exception)
    return place


def test_an_export_is_imported_as_the_same_problems(exported: Path) -> None:
    code, text = imported(exported / "set", exported / "same.parquet")
    assert code == 0, text
    before = {one.problem.problem_id: one for one in read_referenced(exported / "p.jsonl")}
    after = {one.problem.problem_id: one for one in read_parquet(exported / "same.parquet")}
    assert after.keys() == {one["problem_id"] for one in PROBLEMS}
    for name, item in after.items():
        assert item.problem == before[name].problem
        assert item.references == before[name].references


def test_a_program_of_an_export_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # else the program could not reach the interpreter of root
    limits = {"wall_time_s": 0.2, "cpu_time_s": 1, "memory_bytes": 2**30, "output_bytes": 1000}
    tests = {"type": "stdin", "cases": [{"input": "", "output": ""}]}
    problem = {"tests": tests, "limits": limits, "comparator": {"type": "tokens"}, "before": ""}
    assert not grade.passes(problem, "while True: pass", 0)


def test_an_image_without_a_library_gives_no_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Harbor counts no reward then. It is no fault of the program."""
    problem = PROBLEMS[1] | {"libraries": ["json", "no_such_library"]}
    (tmp_path / "problem.json").write_text(json.dumps(problem))
    monkeypatch.setattr(grade, "__file__", str(tmp_path / "grade.py"))
    with pytest.raises(SystemExit, match="this image lacks no_such_library"):
        grade.main(tmp_path / "solution.py", tmp_path / "reward.json")


def test_hidden_tests_are_only_in_the_verifiers_image(exported: Path) -> None:
    for folder in (exported / "set").iterdir():
        config = tomllib.loads((folder / "task.toml").read_text())
        assert config["verifier"]["environment_mode"] == "separate"
        assert config["artifacts"] == ["/app/solution.py"]
        assert [file.name for file in (folder / "environment").iterdir()] == ["Dockerfile"]


@pytest.mark.heavy
async def test_the_tests_of_an_export_run_in_a_sandbox_as_in_harbor(exported: Path) -> None:
    """Without our mark, a folder is one of tests that are programs: the solution gets 1, nothing 0, and so on."""
    for task in (exported / "set").glob("*/task.toml"):
        copy = exported / "foreign" / task.parent.name
        shutil.copytree(task.parent, copy)
        (copy / "task.toml").write_text(task.read_text().replace("nouscoder = 1", ""))
    code, text = await asyncio.to_thread(imported, exported / "foreign", exported / "foreign.parquet")
    assert code == 0, text
    items = {item.problem.problem_id: item.problem for item in read_parquet(exported / "foreign.parquet")}
    assert items.keys() == WRONG.keys()
    for name, programs in WRONG.items():
        answers = [f"cat > solution.py <<'END'\n{program}\nEND" for program in programs]
        assert await graded(items[name], answers) == ["wrong_answer"] * len(programs)
