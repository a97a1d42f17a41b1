"""`nouscoder data export harbor`: each problem of a file becomes a Harbor task folder, version 1.4.

An agent writes /app/solution.py. The tests are in the image of a separate verifier, which gets this file alone, so an
agent never sees them. `data import harbor` makes the same problems of the folders again.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from nouscoder.atomic_files import naming_storage_faults, whole_or_gone
from nouscoder.data.importers.formats import read_referenced
from nouscoder.data.problems import ReferencedProblem, line_of
from nouscoder.domain.problem import Problem
from nouscoder.domain.prompt import PromptForm, prompt_text
from nouscoder.domain.submission import AssertTests, CallTests, ComparatorKind, Prelude, Profile, StdinTests
from nouscoder.errors import Unusable
from nouscoder.verifier.judges.lcb import PRELUDE

_TASK = """schema_version = "1.4"
artifacts = ["/app/solution.py"]

[task]
name = "nouscoder/{name}"

[metadata]
nouscoder = 1

[verifier]
timeout_sec = {timeout_s:.1f}
environment_mode = "separate"

[verifier.environment]
memory_mb = {memory_mb}

[environment]
memory_mb = {memory_mb}
"""
_TEST = """#!/bin/bash
# Writes /logs/verifier/reward.json.
exec python3 /tests/grade.py
"""
_SOLVE = """#!/bin/bash
cp /solution/solution.py /app/solution.py
"""
_FILES = {
    "grade.py": ("nouscoder.data.harbor", "grade.py"),
    "nouscoder/domain/languages.py": ("nouscoder.domain", "languages.py"),
    "nouscoder/domain/languages.toml": ("nouscoder.domain", "languages.toml"),
    "nouscoder/domain/submission.py": ("nouscoder.domain", "submission.py"),
    "nouscoder/verifier/harness/program_names.py": ("nouscoder.verifier.harness", "program_names.py"),
    "nouscoder/verifier/judges/comparators.py": ("nouscoder.verifier.judges", "comparators.py"),
}
# What the comparators need of this module: nothing, because one process here has one text.
_JSON_VALUES = '''"""The parts of this module that the comparators name."""
from contextlib import nullcontext as without_collections


def give_way(size):
    pass


def json_weight(text, most=0):
    return 0
'''


class NotForHarbor(Unusable):
    """Nothing can be exported. The message says why."""


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """The result. `left_out` names the problems that no folder can express, with the reason."""

    folders: int
    without_solution: int
    left_out: dict[str, str]
    out: str

    def text(self) -> str:
        """For people."""
        lines = [f"{self.out}: {self.folders} task folders, {self.without_solution} of them without a solution"]
        lines += [f"left out {count}: {reason}" for reason, count in Counter(self.left_out.values()).most_common()]
        return "\n".join(lines)


def export_harbor(path: Path, out: Path, image: str) -> ExportSummary:
    """Write the folders to `out`, whose containers are of `image`. Raises NotForHarbor, ProblemFileError and others."""
    if out.exists():
        raise NotForHarbor(f"{out} exists already: give another --out, or delete it")
    left_out: dict[str, str] = {}
    names: set[str] = set()
    without = 0
    with whole_or_gone(out), naming_storage_faults(out):
        for item in read_referenced(path):
            if reason := _reason(item.problem):
                left_out[item.problem.problem_id] = reason
                continue
            name = _name(item.problem.problem_id, names)
            names.add(name.lower())
            code = next((one.code for one in item.references if one.language == "python"), "")
            without += not code
            for file, text in _files(name, item, code, image).items():
                (out / name / file).parent.mkdir(parents=True, exist_ok=True)
                (out / name / file).write_text(text, "utf8")
    if not names:
        raise NotForHarbor(f"no problem of {path} can be a Harbor folder: {next(iter(left_out.values()))}")
    return ExportSummary(len(names), without, left_out, str(out))


def _reason(problem: Problem) -> str:
    """Why no folder can express the problem. Empty: one can."""
    tests = problem.tests
    if "python" not in problem.languages:
        return f"the program is in {problem.languages[0]}; folders have Python alone"
    if problem.profile is not Profile.PROCESS:
        return f"the profile {problem.profile.value} is that of this service"
    if problem.comparator.kind is ComparatorKind.ENTRY_POINT:
        return f"the comparator {problem.comparator.entry_point} is a function of the operator"
    if not isinstance(tests, StdinTests | CallTests | AssertTests) or (isinstance(tests, AssertTests) and tests.module):
        return f"{tests.type} tests need programs of this service beside Python's standard library"
    return ""


def _name(problem_id: str, taken: set[str]) -> str:
    """A name of a folder and of a task, which is not taken yet."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", problem_id).strip("-._")[:80] or "problem"
    number, free = 1, name
    while free.lower() in taken:
        number += 1
        free = f"{name}-{number}"
    return free


def _files(name: str, item: ReferencedProblem, code: str, image: str) -> dict[str, str]:
    problem = item.problem
    limits = problem.limits
    task = _TASK.format(
        name=name,
        timeout_s=60 + 1.2 * limits.wall_time_s * len(problem.tests.cases),
        memory_mb=(limits.memory_bytes >> 20) + 512,
    )
    files = {
        "task.toml": task,
        "instruction.md": _instruction(problem),
        "environment/Dockerfile": f"FROM {image}\nWORKDIR /app\n",
        "tests/Dockerfile": f"FROM {image}\nWORKDIR /app\nCOPY . /tests/\n",
        "tests/test.sh": _TEST,
        "tests/problem.json": line_of(problem).decode(),
        "tests/prelude.py": PRELUDE if problem.prelude is Prelude.LCB else "",
        "tests/nouscoder/formats/json_values.py": _JSON_VALUES,
    }
    for file, (package, source) in _FILES.items():
        files[f"tests/{file}"] = resources.files(package).joinpath(source).read_text("utf8")
    if code:
        files |= {"solution/solve.sh": _SOLVE, "solution/solution.py": code}
    return files


def _instruction(problem: Problem) -> str:
    text = prompt_text(PromptForm.PLAIN, problem.prompt, problem.starter_code).rstrip()
    match problem.tests:
        case CallTests() as tests:
            how = f"It is imported, and {tests.entry_point} is called."
        case AssertTests():
            how = "It is imported, and its functions are called."
        case _:
            how = "It reads standard input and prints to standard output."
    return f"{text}\n\nWrite the program, in Python, to /app/solution.py. {how}\n"
