"""How importers judge right and wrong programs on real rows. The table of docs/data.md has what was measured.

Rows that no repository here has are read from the folder NOUSCODER_REAL_ROWS, in which ORGANISATION/NAME is a clone of
that repository of GitHub. Right are a row's reference and, where a set has none, a program that prints the expected
outputs from a table. Wrong are the program of another row, one whose functions return None or which prints nothing,
and a table whose last output is another.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from nouscoder.config import load_config
from nouscoder.data.importers.run import import_files
from nouscoder.data.problem_parquet import read_parquet
from nouscoder.data.problems import ReferencedProblem
from nouscoder.domain.submission import AssertTests, MathTests, StdinTests
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.grading.grader import local_grader
from nouscoder.verifier.grading.validation import InvalidSubmission

ROWS = Path(os.environ.get("NOUSCODER_REAL_ROWS", "/absent"))
SITE = Path(os.environ.get("NOUSCODER_REAL_LIBRARIES", sysconfig.get_path("purelib")))  # for candidates
DISTANCE = 23  # neighbours are often two sizes of one problem, which one program solves
RLLM, GYM = "agentica-project/rllm/rllm/data", "NVIDIA-NeMo/Gym/resources_servers"
FILES = [
    ("humaneval", "openai/human-eval/data/HumanEval.jsonl.gz"),
    ("mbpp", "deepseek-ai/DeepSeek-Coder/Evaluation/MBPP/data/mbpp.jsonl"),
    ("mbpp", "patdfb/TPC-EES/mbpp/sanitized-mbpp.json"),
    ("leetcode", "newfacade/LeetCodeDataset/data/LeetCodeDataset-v0.1.0-test.jsonl.gz"),
    ("leetcode", "newfacade/LeetCodeDataset/data/LeetCodeDataset-v0.3.0-test.jsonl.gz"),
    ("leetcode", "newfacade/LeetCodeDataset/data/LeetCodeDataset-v0.3.1-test.jsonl.gz"),
    ("leetcode", "newfacade/LeetCodeDataset/data/LeetCodeDataset-v0.2.0-test.jsonl.gz"),
    ("leetcode", "newfacade/LeetCodeDataset/data/LeetCodeDataset-v0.2.0-train.jsonl.gz"),
    ("bigcodebench", "QwenLM/Qwen2.5-Coder/qwencoder-eval/instruct/BigCodeBench/data/bigcodebench_hard.json"),
    ("apps", "salesforce/CodeRL/data/APPS/train"),
    ("taco", "salesforce/CodeRL/data/APPS/train"),
    ("rllm_contests", f"{RLLM}/test/code/code_contests.json"),
    ("deepcoder", f"{RLLM}/test/code/codeforces.json"),
    ("generic", f"{RLLM}/test/code/code_contests.json"),
    ("nemotron", f"{GYM}/code_gen/data/example.jsonl"),
    ("math", f"{RLLM}/test/math/math.json"),
    ("math", f"{RLLM}/test/math/minerva.json"),
    ("math", f"{RLLM}/test/math/olympiad_bench.json"),
    ("math", f"{RLLM}/test/math/gsm8k.json"),
    ("math", f"{GYM}/math_with_judge/data/example.jsonl"),
    ("reasoning", "suzgunmirac/BIG-Bench-Hard/bbh"),
    ("reasoning", f"{GYM}/reasoning_gym/data/example.jsonl"),
    ("kattis", "Kattis/problemtools/examples"),
    ("ds1000", "zz-haooo/ReCreate/datasets/ds1000/data/ds1000.jsonl.gz"),
]
EACH = {"ds1000": 4}  # only each fourth row of a long set
MULTIPL_E = "deepseek-ai/DeepSeek-Coder/Evaluation/HumanEval/data"
ANSWERS = "QwenLM/Qwen2.5-Coder/qwencoder-eval/base/outptus/qwen2.5-coder/7b-base/multipl-e"
Program = tuple[str, str]  # the language and the code


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "file"), FILES)
def test_right_programs_are_accepted_and_wrong_ones_are_not(tmp_path: Path, name: str, file: str) -> None:
    if not (ROWS / file).exists():
        pytest.skip(f"NOUSCODER_REAL_ROWS has no {file}")
    summary = import_files(name, as_published(ROWS / file, tmp_path), tmp_path / "problems.parquet")
    items = [item for item in read_parquet(tmp_path / "problems.parquet") if has_libraries(item)][:: EACH.get(name, 1)]
    right, wrong = asyncio.run(rates(items))
    refused, accepted = (
        [key for key, is_right in found if is_right is bad] for found, bad in ((right, False), (wrong, True))
    )
    print(f"\n{name} {file}: {len(items)} rows, rejected {summary.rejected}")
    print(f"  right accepted {len(right) - len(refused)} of {len(right)}, refused {refused}")
    print(f"  wrong refused {len(wrong) - len(accepted)} of {len(wrong)}, accepted {accepted}")
    assert len(refused) <= 0.02 * len(right), "some references of a set are wrong"
    assert len(accepted) <= 0.02 * len(wrong), "some programs of other problems are right"


def as_published(path: Path, folder: Path) -> list[Path]:
    """The files that an import reads. APPS's folders and BigCodeBench's object become JSON lines, as on the hub."""
    if path.name == "bbh":
        return sorted(path.glob("*.json"))
    if path.name == "bigcodebench_hard.json":
        rows: list[Any] = list(json.loads(path.read_text()).values())
    elif path.name == "train":
        rows = [apps_row(one) for one in sorted(path.iterdir())]
    else:
        return [path]
    lines = folder / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [lines]


def apps_row(folder: Path) -> dict[str, Any]:
    files = {"question": "question.txt", "solutions": "solutions.json", "starter_code": "starter_code.py"}
    files |= {"input_output": "input_output.json"}
    found = {name: folder / file for name, file in files.items()}
    return {"id": int(folder.name), **{name: file.read_text() if file.exists() else "" for name, file in found.items()}}


def has_libraries(item: ReferencedProblem) -> bool:
    return all(PathFinder.find_spec(name, [str(SITE)]) for name in item.problem.libraries)


def programs(item: ReferencedProblem) -> tuple[Program | None, list[Program]]:
    """The right program, if there is one, and those that are wrong."""
    tests = item.problem.tests
    if item.references:
        best = item.references[0]
        empty = returning_none(best.code) if best.language == "python" else ""
        return (best.language, best.code), [("python", empty)] if empty else []
    if isinstance(tests, MathTests):
        return ("python", f"\\boxed{{{tests.cases[0].expected}}}"), [("python", "\\boxed{}"), ("python", "")]
    if not isinstance(tests, StdinTests):
        return None, []
    pairs = [(case.input, case.output) for case in tests.cases]
    changed = [*pairs[:-1], (pairs[-1][0], f"{pairs[-1][1].rstrip()}1")]
    return ("python", table(pairs)), [("python", table(changed)), ("python", "pass")]


def table(pairs: Sequence[tuple[str, str]]) -> str:
    return f"import sys\nprint({dict(pairs)!r}[sys.stdin.read()])\n"


def returning_none(code: str) -> str:
    """The program with functions and methods that return None; one without any prints nothing."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return "pass"
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
    for node in nodes:
        node.body = [ast.Pass()]
    return ast.unparse(tree) if nodes else "pass"


Found = list[tuple[str, bool]]


async def rates(items: Sequence[ReferencedProblem]) -> tuple[Found, Found]:
    """(problem, whether it was accepted) of each right and of each wrong program."""
    made = [programs(item) for item in items]
    others = [right for right, _ in made]
    others = [*others[DISTANCE % len(others) :], *others[: DISTANCE % len(others)]]
    jobs = [
        (is_right, item, program)
        for item, (right, wrong), other in zip(items, made, others, strict=True)
        for is_right, program in [(True, right), (False, other), *((False, one) for one in wrong)]
        if program is not None and not (program == right and not is_right)
    ]
    named = await graded(jobs)
    right, wrong = ([(key, each) for is_right, key, each in named if is_right is want] for want in (True, False))
    return right, wrong


async def graded(jobs: Sequence[tuple[bool, ReferencedProblem, Program]]) -> list[tuple[bool, str, bool]]:
    """(whether it is right, the problem, whether it was accepted) of each program."""
    verifier = load_config(None).verifier
    sandbox = verifier.sandbox.model_copy(update={"site_packages": (SITE,)})
    room = asyncio.Semaphore(16)
    async with local_grader(verifier.model_copy(update={"sandbox": sandbox})) as grader:

        async def is_accepted(item: ReferencedProblem, program: Program) -> bool:
            language, code = program
            rules = item.problem.grading_rules()
            if not isinstance(item.problem.tests, MathTests):
                rules = replace(rules, text_is_code=True, languages=(language,))
            async with room:
                try:
                    verdict = await grader.grade(rules.submission(item.problem.tests, code))
                except InvalidSubmission as fault:  # its own reference fails here, so every answer is refused
                    print(f"{item.problem.problem_id}: {str(fault)[:300]}")
                    return False
            return verdict.kind is VerdictKind.ACCEPTED

        found = await asyncio.gather(*(is_accepted(item, program) for _, item, program in jobs))
    return [(is_right, item.problem.problem_id, each) for (is_right, item, _), each in zip(jobs, found, strict=True)]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "language", "end"),
    [
        ("cpp", "cpp", "\n}"),
        ("js", "javascript", ""),
        ("php", "php", ""),
        ("sh", "bash", "\n}"),
        ("ts", "typescript", ""),
    ],
)
def test_multipl_e_judges_a_model_s_answers_as_their_authors_did(
    tmp_path: Path, name: str, language: str, end: str
) -> None:
    """The answers of Qwen2.5-Coder-7B with the verdicts of its authors, which ran MultiPL-E's own tests."""
    rows, answers = ROWS / MULTIPL_E / f"humaneval-{name}.jsonl", ROWS / ANSWERS / f"pred_{name}_output.jsonl"
    if not rows.exists() or not answers.exists():
        pytest.skip(f"NOUSCODER_REAL_ROWS has no {rows.name} or no {answers.name}")
    summary = import_files("multipl-e", [rows], tmp_path / "problems.parquet")
    theirs = json.loads((ROWS / ANSWERS / f"humaneval-{name}-details.json").read_text())
    said = {key: found[0][1]["passed"] for key, found in theirs.items()}
    made = {row["task_id"]: row["generation"] + end for row in map(json.loads, answers.read_text().splitlines())}
    items = {
        item.problem.problem_id.removesuffix(f"-{name}"): item for item in read_parquet(tmp_path / "problems.parquet")
    }
    jobs = [(said[key], item, (language, made[key])) for key, item in items.items() if key in said]
    found = asyncio.run(graded(jobs))
    right, wrong = ([(key, each) for is_right, key, each in found if is_right is want] for want in (True, False))
    refused, accepted = [key for key, each in right if not each], [key for key, each in wrong if each]
    print(f"\nmultipl-e {name}: {len(items)} rows, rejected {summary.rejected}")
    print(f"  right accepted {len(right) - len(refused)} of {len(right)}, refused {refused}")
    print(f"  wrong refused {len(wrong) - len(accepted)} of {len(wrong)}, accepted {accepted}")
    assert len(refused) <= 0.02 * len(found), "one verdict differs between versions of a compiler"
    assert len(accepted) <= 0.05 * len(found), "their machine checked types and had no bc"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "language"), [("r", "r"), ("rs", "rust")])
def test_multipl_e_judges_tables_of_its_own_tests(tmp_path: Path, name: str, language: str) -> None:
    """No answers are published in these languages. A table returns what the asserts of its row expect."""
    if not (rows := ROWS / MULTIPL_E / f"humaneval-{name}.jsonl").exists():
        pytest.skip(f"NOUSCODER_REAL_ROWS has no {rows.name}")
    import_files("multipl-e", [rows], tmp_path / "problems.parquet")
    items = list(read_parquet(tmp_path / "problems.parquet"))
    cases = [asserted(item.problem.tests.cases[0]) for item in items if isinstance(item.problem.tests, AssertTests)]
    made = [function(name, item.problem.starter_code, own) for item, own in zip(items, cases, strict=True)]
    others = [*made[DISTANCE:], *made[:DISTANCE]]
    jobs = [(True, item, (language, code)) for item, code in zip(items, made, strict=True)]
    for item, own, other in zip(items, cases, others, strict=True):
        short, none = (function(name, item.problem.starter_code, kept) for kept in (own[:-1], []))
        jobs += [(False, item, (language, code)) for code in (other, short, none)]
    found = asyncio.run(graded(jobs))
    refused = [key for is_right, key, each in found if is_right and not each]
    accepted = [key for is_right, key, each in found if each and not is_right]
    print(
        f"\nmultipl-e {name}: {len(items)} rows, right refused {refused}, wrong accepted {accepted} of {3 * len(items)}"
    )
    assert len(refused) + len(accepted) <= 0.02 * len(found)


def asserted(tests: str) -> list[tuple[str, str]]:
    """The arguments and the expected value of each assert, as the language writes them."""
    rests = [tests[found.end() :] for found in re.finditer(r"(all\.equal|assert_eq!)\(candidate\(", tests)]
    ends = [(rest[: closed(rest)], rest[closed(rest) + len("), ") :]) for rest in rests]
    return [(args, rest[: closed(rest)]) for args, rest in ends]


def closed(text: str) -> int:
    """Where the parenthesis that was opened before the text is closed."""
    depth, quote = 1, ""
    for found in re.finditer(r"\\.|[\"'()]", text):
        sign = found.group()
        if quote or sign in "\"'":
            quote = "" if sign == quote else quote or sign
        else:
            depth += {"(": 1, ")": -1}.get(sign, 0)
        if not depth:
            return found.start()
    raise ValueError(text)


def function(name: str, prompt: str, cases: Sequence[tuple[str, str]]) -> str:
    """The function of a prompt that knows these cases alone."""
    if name == "r":
        begin = prompt[: prompt.rindex(" <- function(")].splitlines()[-1]
        pairs = "".join(f"  if (isTRUE(all.equal(list(...), list({args})))) return({value})\n" for args, value in cases)
        return f"{begin} <- function(...) {{\n{pairs}  stop()\n}}\n"
    names = re.findall(r"(\w+): ", prompt.splitlines()[-1])
    pairs = "".join(f"    if given == ({args},) {{ return {value}; }}\n" for args, value in cases)
    return f"{prompt}    let given = ({', '.join(names)},);\n{pairs}    panic!()\n}}\n"
