"""The programs of semantics/*.toml with hand-checked verdicts: those of a real process, and those of LiveCodeBench.

Every program must get `verdict` with the process profile, and `lcb`, if given, with the lcb profile. Where NeMo Gym's
code_gen differs from that, `code_gen` is given too. Programs in languages that this host lacks are skipped.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from nouscoder.config import SandboxSection, load_config
from nouscoder.domain.submission import Submission
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.api.schema import parse_submission
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.judges import mathematics
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import open_sandbox, with_libraries
from nouscoder.verifier.toolchains.languages import installed

_PUBLISHED = "NOUSCODER_LCB_TESTING_UTIL"
_CODES = {True: "accepted", False: "wrong_answer", -1: "runtime_error", -2: "wrong_answer"}
_CODES |= {-3: "time_limit_exceeded", -4: "runtime_error"}
# The program's stdin must be empty. The result is written to a descriptor that the grader does not use.
_RUN_PUBLISHED = """
import importlib.util, json, os, sys
sample, code, timeout_s = json.load(sys.stdin)
os.dup2(os.open(os.devnull, os.O_RDWR), 0)
out = os.dup(2)
os.dup2(1, 2)
write = os.write
sys.set_int_max_str_digits(50000)
spec = importlib.util.spec_from_file_location("published", sys.argv[1])
published = importlib.util.module_from_spec(spec)
spec.loader.exec_module(published)
dumps = json.dumps
sys.argv = ["-"]
results, _ = published.run_test({"input_output": dumps(sample)}, test=code, timeout=timeout_s)
write(out, b"RESULT " + dumps(results).encode())
"""
_TABLES = sorted(Path(__file__).with_name("semantics").glob("*.toml"))
_LIMITS = {"wall_time_s": 8.0, "cpu_time_s": 4.0}
_JUDGES = {
    "sum": """#include <stdio.h>
int main(int c, char **v) {
  long n, x, y; FILE *i = fopen(v[1], "r"), *o = fopen(v[2], "r");
  if (fscanf(i, "%ld", &n) != 1) return 3;
  if (fscanf(o, "%ld %ld", &x, &y) != 2) return 2;
  return x + y != n;
}""",
    "answer": """#include <stdio.h>
int main(int c, char **v) {
  char x[99] = "", y[99] = ""; fgets(x, 99, fopen(v[2], "r")); fgets(y, 4, fopen(v[3], "r"));
  return x[0] != y[0] || x[2] != y[2];
}""",
    "broken": "int main(void) { return 3; }",
    "points": "int main(void) { return 7; }",
    "guess": """#include <stdio.h>
int main(int c, char **v) {
  long n, x; if (fscanf(fopen(v[1], "r"), "%ld", &n) != 1) return 3;
  for (int k = 0; k < 12; k++) {
    if (scanf("%ld", &x) != 1) return 2;
    puts(x == n ? "=" : x < n ? "<" : ">"); fflush(stdout);
    if (x == n) return 0;
  }
  return 1;
}""",
}


def _programs() -> list[dict[str, Any]]:
    return [program for path in _TABLES for program in tomllib.loads(path.read_text("utf-8"))["program"]]


def _tests(program: Mapping[str, Any]) -> dict[str, Any]:
    """The request's field `tests`, made from the short forms of the tables."""
    if "tests" in program:
        return dict(program["tests"])
    if "call" in program:
        calls = [{"args": args, "expected": expected} for args, expected in program["call"]]
        return {"type": "call", "entry_point": "f", "cases": calls}
    if "math" in program:
        return {"type": "math", "cases": [{"expected": gold} for gold in program["math"]]}
    given = program.get("input", "")
    if "input_repeat" in program:
        part, times = program["input_repeat"]
        given = part * times
    pairs = program.get("cases", [[given, program.get("output", "")]])
    cases = [{"input": one, "output": other} for one, other in pairs]
    for kind, judge in (("checker", "checker"), ("interactive", "interactor")):
        if judge in program:
            code = {"language": "c", "code": _JUDGES[program[judge]]}
            return {"type": kind, "cases": cases, judge: code}
    return {"type": "stdin", "cases": cases}


def _submission(program: Mapping[str, Any], profile: str) -> Submission:
    request: dict[str, Any] = {name: program[name] for name in ("code", "completion", "language") if name in program}
    limits = {name: program[name] for name in ("wall_time_s", "memory_bytes", "output_bytes") if name in program}
    request |= {
        "tests": _tests(program),
        "limits": _LIMITS | limits,
        "comparator": program.get("comparator", {}),
        "prelude": program.get("prelude", "none"),
        "stop_on_first_failure": not program.get("all_tests", False),
        "profile": profile,
    }
    return parse_submission(json.dumps(request))


def _can_run(program: Mapping[str, Any]) -> bool:
    judged = "checker" in program or "interactor" in program
    needed = {program.get("language", "python")} | ({"c"} if judged else set())
    return needed <= set(installed()) and ("math" not in program or mathematics.is_installed())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grader() -> AsyncIterator[Grader]:
    sandbox = open_sandbox(with_libraries(load_config(None).verifier))
    await sandbox.start()
    grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()))
    yield grader
    await grader.close()
    await sandbox.close()
    await asyncio.sleep(0.1)  # lets the pipes of the slots' processes close before the loop does


async def _differences(
    grader: Grader, profile: str, truth: str, programs: Sequence[Mapping[str, Any]] | None = None
) -> list[str]:
    """The programs whose verdict with `profile` differs from their column `truth`."""
    programs = [program for program in programs or _programs() if truth in program and _can_run(program)]
    work = (grader.grade(_submission(program, profile)) for program in programs)
    verdicts = await asyncio.gather(*work)
    return [
        f"{program['name']}: {verdict.kind.value}, not {program[truth]}; {verdict.detail} {verdict.first_failure}"
        for program, verdict in zip(programs, verdicts, strict=True)
        if verdict.kind.value != program[truth]
    ]


def test_the_tables_have_the_documented_size() -> None:
    programs = _programs()
    names = [program["name"] for program in programs]
    assert len(programs) >= 150
    assert len(set(names)) == len(names)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.heavy
async def test_the_process_profile_gives_the_right_verdict_for_every_program(grader: Grader) -> None:
    assert await _differences(grader, "process", "verdict") == []


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.heavy
async def test_the_lcb_profile_gives_the_verdict_of_livecodebench(grader: Grader) -> None:
    assert await _differences(grader, "lcb", "lcb") == []


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.heavy
async def test_the_code_gen_profile_differs_from_lcb_only_where_nemo_gyms_server_does(grader: Grader) -> None:
    """Calls, and whole programs with a column of their own. make test-trainers has the server itself say the column."""
    programs = [program for program in _programs() if "lcb" in program and ("call" in program or "code_gen" in program)]
    expected = [{**program, "code_gen": program.get("code_gen", program["lcb"])} for program in programs]
    assert await _differences(grader, "code_gen", "code_gen", expected) == []


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("module", ["numpy", "numpy.linalg"])
async def test_the_lcb_profile_imports_numpy_before_its_guard(module: str) -> None:
    """The guard removes functions of `os` that numpy calls when it is imported."""
    numpy = pytest.importorskip("numpy")
    folder = Path(numpy.__file__).parents[1]
    sandbox = open_sandbox(SandboxSection(slots=1, site_packages=(folder,)))
    program = {"code": f"import {module}\nimport os\nprint(numpy.array([1, 2]).sum(), os.kill)", "output": "3 None"}
    try:
        await sandbox.start()
        grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()))
        verdict = await grader.grade(_submission(program, "lcb"))
        assert verdict.kind is VerdictKind.ACCEPTED, verdict.first_failure
    finally:
        await sandbox.close()
        await asyncio.sleep(0.1)  # lets the pipes of the slots' processes close before the loop does


@pytest.mark.skipif(
    _PUBLISHED not in os.environ, reason=f"{_PUBLISHED} names no copy of LiveCodeBench's testing_util.py"
)
def test_the_lcb_column_equals_the_verdicts_of_the_published_grader(tmp_path: Path) -> None:
    """A control: the same programs with a copy of the published file, which is not part of this project."""
    programs = [program for program in _programs() if "lcb" in program]
    said = {program["name"]: _published_verdict(program, tmp_path) for program in programs}
    assert len(said) >= 150
    assert {name: verdict for name, verdict in said.items() if verdict != _lcb_column(programs)[name]} == {}


def _lcb_column(programs: list[dict[str, Any]]) -> dict[str, str]:
    return {program["name"]: program["lcb"] for program in programs}


def _published_verdict(program: Mapping[str, Any], folder: Path) -> str:
    """The verdict of `run_test` of the published file, in a separate process, within its own total time limit."""
    tests, code = _tests(program), program["code"]
    timeout_s = int(program.get("wall_time_s", _LIMITS["wall_time_s"]))
    sample: dict[str, Any] = {"inputs": [], "outputs": []}
    for case in tests["cases"]:
        if tests["type"] == "call":
            # It supports no call without arguments, so such an `f` gets one that it ignores.
            sample["fn_name"] = "f"
            sample["inputs"].append("\n".join(json.dumps(arg) for arg in case["args"] or [0]))
            sample["outputs"].append(json.dumps(case["expected"]))
            if not case["args"]:
                code = code.replace("def f():", "def f(*_):").replace("def f(self):", "def f(self, *_):")
        else:
            sample["inputs"].append(case["input"])
            sample["outputs"].append(case["output"])
    request = json.dumps([sample, code, timeout_s])
    bound_s = (timeout_s + 1) * len(sample["inputs"]) + 5
    command = [sys.executable, "-c", _RUN_PUBLISHED, os.environ[_PUBLISHED]]
    with (folder / "request").open("w+") as file:
        file.write(request)
        file.seek(0)
        try:
            ended = subprocess.run(
                command, stdin=file, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=bound_s, cwd=folder
            )
        except subprocess.TimeoutExpired:
            return "runtime_error"
    last_line = ended.stderr.decode("utf8", "replace").rpartition("RESULT ")[2]
    codes = json.loads(last_line) if b"RESULT " in ended.stderr else [-1]
    return _CODES[next((one for one in codes if one is not True), True)]
