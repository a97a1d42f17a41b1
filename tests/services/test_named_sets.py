"""Importers of named sets: a few rows in each public layout, and programs that are known to be right or wrong."""

from __future__ import annotations

import asyncio
import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.services.test_data_import import SUM, jsonl, packed, parquet

from nouscoder.config import VerifierSection
from nouscoder.data.importers.formats import FORMATS
from nouscoder.data.importers.rows import file_rows
from nouscoder.data.importers.run import CannotImport, ImportSummary, import_files, rejections_of
from nouscoder.data.problem_parquet import read_parquet
from nouscoder.data.problems import ProblemFileError, Reference, ReferencedProblem
from nouscoder.domain.submission import (
    AssertTests,
    CallCase,
    CallTests,
    CheckerTests,
    Comparator,
    Limits,
    MathCase,
    MathTests,
    StdinCase,
    StdinTests,
    Submission,
)
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.grading.grader import local_grader

SUM_PROGRAM = "print(sum(map(int, input().split())))\n"
DIFFERENCE = "a, b = map(int, input().split())\nprint(a - b)\n"
# Which checkers judge: print n and two numbers with this sum.
SPLIT_ROWS = [{"input": "7\n", "output": "1 6\n"}, {"input": "2\n", "output": "1 1\n"}]
SPLIT, SPLIT_OTHERWISE = "n = int(input())\nprint(1, n - 1)\n", "n = int(input())\nprint(n - 1, 1)\n"
SPLIT_WRONG = "n = int(input())\nprint(1, n)\n"
SPLIT_CPP = "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << n - 2 << ' ' << 2; }\n"
SPLIT_WRONG_CPP = "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << n << ' ' << 1; }\n"
TESTLIB = """#include "testlib.h"
#include <vector>
using namespace std;
int main(int argc, char* argv[]) {
    setName("two numbers with the sum n");
    registerTestlibCmd(argc, argv);
    int n = inf.readInt(1, 1000, "n");
    vector<int> both = ouf.readInts(2, -1000, 1000, "both");
    if (both[0] + both[1] != n) quitf(_wa, "the sum is %d, not %d", both[0] + both[1], n);
    quitf(_ok, "%s", vtos(n).c_str());
}
"""
PRINTING = """import sys
def main():
    n = int(open(sys.argv[1]).read())
    correct, got = (list(map(int, open(name).read().split())) for name in sys.argv[2:4])
    assert sum(correct) == n, "the order of the arguments is another"
    print(1 if sum(got) == n and len(got) == 2 else 0)
if __name__ == "__main__":
    main()
"""
JUDGING = """def output_judging_function(input_str: str, candidate_output: str, reference_output: str) -> bool:
    assert sum(map(int, reference_output.split())) == int(input_str)
    return sum(map(int, candidate_output.split())) == int(input_str)
"""


def nemotron(folder: Path) -> Path:
    def row(name: str, tests: object, **more: Any) -> dict[str, Any]:
        asked = [{"role": "system", "content": "Help."}, {"role": "user", "content": "Add."}]
        return {
            "hash_id": name,
            "dataset": "code_contests",
            "source": "codeforces",
            "responses_create_params": {"input": asked},
            "verifier_metadata": {"problem_id": "x", "unit_tests": tests},
            **more,
        }

    whole = {"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10\n"], "fn_name": None}
    return jsonl(
        folder / "nemotron.jsonl",
        row("a", whole),
        row("b", {"inputs": ["[1, 2]\n3", "[]\n4"], "outputs": ["6", "4"], "fn_name": "total"}),
        row("c", json.dumps(whole), responses_create_params={"input": "Add."}),
        row("d", {"inputs": ["1"], "outputs": []}),
        row("e", whole, responses_create_params={"input": []}),
        row("f", {}),
    )


def rstar_coder(folder: Path) -> Path:
    call = {"inputs": json.dumps([[[1, 2], 3], [[], 4]]), "outputs": json.dumps([6, 4]), "func_name": "total"}
    return jsonl(
        folder / "rstar.jsonl",
        {"question_id": "s1", "question": "Add.", "inputs": '["1 2\\n", "5 5\\n"]', "outputs": '["3\\n", "10\\n"]'},
        {"question_id": "s2", "question": "Add.", "inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10\n"]},
        {"question_id": "s3", "question": "Add.", "starter_code": "class Solution:", "class_name": "Solution", **call},
        {"question_id": "s4", "question": "A stack.", "class_name": "MinStack", **call},
        {"question_id": "s5", "question": "Add.", "inputs": "[", "outputs": "[]"},
    )


def synthetic2(folder: Path) -> Path:
    tests = {"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10\n"]}
    rewards = {"Qwen/Qwen3-32B_avg_reward": 0.25, "Qwen/Qwen3-4B_avg_reward": None, "Qwen/Qwen3-32B_responses": ["x"]}

    def row(name: str, info: object) -> dict[str, Any]:
        return {"problem_id": name, "prompt": "Add.", "verification_info": json.dumps(info), **rewards}

    return parquet(
        folder / "synthetic2.parquet",
        row("prime_rl_code_1", {"test_cases": json.dumps(tests)}),
        row(
            "prime_rl_code_2",
            {"test_cases": {"inputs": [[[1, 2], 3]], "outputs": [[6]], "fn_name": "total"}},
        ),
        row("verifiable_math_3", {"ground_truth": "3"}),
        row("reasoning_gym_4", {"entry": {}}),
        row("verifiable_math_5", {}),
    )


FUNCTIONS = """import pytest
from solution import total

def test_numbers():
    assert total([1, 2], 3) == 6

@pytest.mark.parametrize("extra", [0, 4])
def test_nothing(extra):
    assert total([], extra) == extra

def helper(): ...
"""
CLASSES = """import unittest
import solution

class TestTotal:
    def test_one(self):
        assert solution.total([1]) == 1

class Totals(unittest.TestCase):
    def test_two(self):
        self.assertEqual(solution.total([1], 1), 2)
"""
TOTAL = "def total(values, extra=0):\n    return sum(values) + extra\n"
TOTAL_WRONG = "def total(values, extra=0):\n    return sum(values)\n"


def kodcode(folder: Path) -> Path:
    def row(name: str, test: str) -> dict[str, Any]:
        about = [{"function_name": "total", "function_declaration": "def total(values, extra=0):", "docstring": ""}]
        return {
            "version": "v1.0",
            "style": "instruct",
            "subset": "Algorithm",
            "question_id": name,
            "question": "Add.",
            "solution": TOTAL,
            "test": test,
            "test_info": about,
            "gpt_difficulty": "easy",
            "gpt_pass_percentage": 0.8,
        }

    rows = {"a": FUNCTIONS, "b": CLASSES, "c": "def test_f():\n    assert 1", "d": "import solution", "e": "from ("}
    return parquet(folder / "kodcode.parquet", *(row(name, test) for name, test in rows.items()))


def codeforces(folder: Path) -> Path:
    def row(name: str, **more: Any) -> dict[str, Any]:
        return {
            "id": name,
            "title": "Split",
            "description": "Split n.",
            "input_format": "n",
            "output_format": "Two numbers.",
            "interaction_format": None,
            "note": "Any will do.",
            "examples": SPLIT_ROWS[:1],
            "official_tests": SPLIT_ROWS,
            "official_tests_complete": True,
            "time_limit": 1.5,
            "memory_limit": 256.0,
            "rating": 800,
            "contest_start": 1737547500,
            "input_mode": "stdio",
            "generated_checker": None,
            "language": None,
            **more,
        }

    cut = [{"input": "7\n...", "output": "1 6\n"}, {"input": "7\n", "output": "1 ..."}]
    return parquet(
        folder / "codeforces.parquet",
        row("1/A"),
        row("1/B", generated_checker=PRINTING),
        row("1/C", official_tests=[*cut, *SPLIT_ROWS], official_tests_complete=None),  # unknown
        row("1/D", official_tests=cut, official_tests_complete=False),
        row("1/E", interaction_format="Ask."),
        row("1/F", input_mode="file"),
        row("1/G", generated_checker="print(1"),
        row("1/H", time_limit=-1.0),
        row("1/I", language="cplusplus"),
        row("1/J", language="brainfuck"),
    )


def code_contests_plus(folder: Path) -> Path:
    def row(name: str, **more: Any) -> dict[str, Any]:
        return {
            "source": "Codeforces",
            "id": name,
            "title": "Split",
            "description": "Split n.",
            "time_limit": 1500,
            "memory_limit": 256,
            "checker": TESTLIB,
            "generator": "",
            "validator": "",
            "test_cases": SPLIT_ROWS,
            "true_positive_rate": 1.0,
            "correct_submissions": [
                {"code": "print 1", "language": "py2"},
                {"code": SPLIT_CPP, "language": "cpp"},
                {"code": SPLIT_OTHERWISE, "language": "py3"},
            ],
            "incorrect_submissions": [{"code": SPLIT_WRONG, "language": "py3"}],
            **more,
        }

    return parquet(folder / "plus.parquet", row("1_A"), row("1_B", checker=""), row("1_C", test_cases=[]))


def code_contests_o(folder: Path) -> Path:
    def row(name: str, checker: str, cases: Sequence[dict[str, str]]) -> dict[str, Any]:
        made = [{"input": {"stdin": one["input"]}, "output": {"stdout": one["output"]}} for one in cases]
        return {"name": name, "description": "Split n.", "corner_cases": made, "checker": checker, "commands": []}

    # The last test's answer is none that the checker accepts: an equal output is right all the same.
    strange = [*SPLIT_ROWS, {"input": "5\n", "output": "\nNone \n\nat all\n"}]
    return jsonl(
        folder / "o.jsonl", row("1_A. Split", TESTLIB, strange), row("1_B", "", strange), row("1_C", TESTLIB, [])
    )


def hardtests(folder: Path) -> Path:
    def problem(name: str) -> dict[str, Any]:
        return {
            "pid": name,
            "question_content": "Split n.",
            "platform": "codeforces",
            "contest_date": "2024-08-03",
            "public_test_cases": SPLIT_ROWS[:1],
            "solutions": [{"code": SPLIT, "language": "python"}, {"code": "?", "language": "unknown"}],
            "time_limit": "2 seconds",
            "starter_code": None,
        }

    def tests(name: str, judge: str | None) -> dict[str, Any]:
        kit = {"pid": name, "output_judging_function": judge, "input_validator": ""}
        return {"pid": name, "test_cases_kit": kit, "mapping": {"LLMGen": [0, 1]}, "test_cases": packed(SPLIT_ROWS)}

    (folder / "hardtests").mkdir()
    jsonl(folder / "hardtests" / "README.json", {"about": "no rows"})
    parquet(folder / "hardtests" / "problems.parquet", *map(problem, "abcd"))
    jsonl(
        folder / "hardtests" / "tests.jsonl",
        tests("b", JUDGING),
        tests("a", None),
        tests("z", None),
        tests("c", "def judge(): ..."),
    )
    return folder / "hardtests"


def livecodebench_pro(folder: Path) -> Path:
    top = folder / "pro"
    (top / "zips").mkdir(parents=True)
    names = ["1A", "1B", "1C", "1D", "1E"]
    rows = [{"problem_id": name, "problem_title": "Split", "problem_statement": "Split n."} for name in names]
    parquet(top / "quater.parquet", *({**row, "difficulty": "easy", "platform": "codeforces"} for row in rows))
    config = "type: default\ntime_limit: 1500ms\nmemory_limit: 256m\nchecker: chk.cc\nsubtasks:\n  - n_cases: 2\n"
    listed = "time: 2s\nsubtasks:\n  - cases:\n    - {input: 1.in, output: 1.ans}\n"
    configs = {"1A": config, "1B": listed, "1C": config.replace("default", "interactive"), "1D": config}
    for name, text in configs.items():
        with zipfile.ZipFile(top / "zips" / f"{name}.zip", "w") as packed_files:
            packed_files.writestr("config.yaml", text.replace("n_cases: 2", f"n_cases: {10**9 if name == '1D' else 2}"))
            packed_files.writestr("chk.cc", TESTLIB)
            for number, case in enumerate(SPLIT_ROWS, 1):
                packed_files.writestr(f"testdata/{number}.in", case["input"])
                packed_files.writestr(f"testdata/{number}.ans", case["output"])
    return top


# The files of each set, the problems with their number of tests, and the counts of rejected rows.
SETS: dict[str, tuple[Callable[[Path], Path], dict[str, int], dict[str, int]]] = {
    "nemotron": (nemotron, {"a": 2, "b": 2, "c": 2}, {"unreadable_tests": 2, "missing_field": 1}),
    "rstar_coder": (rstar_coder, {"s1": 2, "s2": 2, "s3": 2}, {"unsupported": 1, "unreadable_tests": 1}),
    "synthetic2": (
        synthetic2,
        {"prime_rl_code_1": 2, "prime_rl_code_2": 1, "verifiable_math_3": 1},
        {"not_verifiable": 1, "no_answer": 1},
    ),
    "kodcode": (kodcode, {"a": 2, "b": 2}, {"unreadable_tests": 2, "no_tests": 1}),
    "codeforces": (
        codeforces,
        {"1/A": 2, "1/B": 2, "1/C": 2, "1/I": 2},
        {"no_tests": 1, "unsupported": 1, "needs_files": 1, "unreadable_tests": 1, "malformed": 1, "other_language": 1},
    ),
    "code_contests_plus": (code_contests_plus, {"1_A": 2, "1_B": 2}, {"no_tests": 1}),
    "code_contests_o": (code_contests_o, {"1_A. Split": 3, "1_B": 3}, {"no_tests": 1}),
    "hardtests": (hardtests, {"b": 2, "a": 2}, {"missing_field": 1, "unreadable_tests": 1, "no_tests": 1}),
    "livecodebench_pro": (
        livecodebench_pro,
        {"1A": 2, "1B": 1},
        {"unsupported": 1, "malformed": 1, "no_tests": 1},
    ),
}


def imported(name: str, folder: Path) -> tuple[ImportSummary, dict[str, ReferencedProblem]]:
    """The problems of a set by their names."""
    summary = import_files(name, [SETS[name][0](folder)], folder / "out.parquet")
    return summary, {item.problem.problem_id: item for item in read_parquet(folder / "out.parquet")}


@pytest.mark.parametrize("name", SETS)
def test_each_row_is_a_problem_or_is_rejected_for_its_reason(tmp_path: Path, name: str) -> None:
    summary, found = imported(name, tmp_path)
    _, problems, rejected = SETS[name]
    reasons = {line["row"]: line["detail"] for line in rejections_of(Path(summary.rejections))}
    assert {one: len(item.problem.tests.cases) for one, item in found.items()} == problems, reasons
    assert summary.rejected == rejected, reasons


def test_what_a_problem_of_each_set_has(tmp_path: Path) -> None:
    """Prompts, tests, limits, languages and facts."""
    sets = {}
    for name in SETS:
        (tmp_path / name).mkdir()
        sets[name] = imported(name, tmp_path / name)[1]
    calls = (CallCase(([1, 2], 3), {}, 6), CallCase(([], 4), {}, 4))
    nemotrons, rstars = sets["nemotron"], sets["rstar_coder"]
    assert [nemotrons[name].problem.prompt for name in "abc"] == ["Help.\n\nAdd.", "Help.\n\nAdd.", "Add."]
    assert nemotrons["a"].problem.tests == nemotrons["c"].problem.tests == SUM
    assert nemotrons["b"].problem.tests == CallTests("total", calls)
    assert rstars["s3"].problem.tests == CallTests("total", calls, wrapped=True)  # the form of TACO
    assert rstars["s1"].problem.tests == rstars["s2"].problem.tests == SUM
    assert rstars["s3"].problem.starter_code == "class Solution:"
    synthetic = sets["synthetic2"]
    assert synthetic["prime_rl_code_1"].metadata == {"Qwen/Qwen3-32B_avg_reward": "0.25"}
    assert synthetic["verifiable_math_3"].problem.tests == MathTests((MathCase("3"),))
    wrapped = (CallCase(([1, 2], 3), {}, [6]),)
    assert synthetic["prime_rl_code_2"].problem.tests == CallTests("total", wrapped, wrapped=True)
    kodcodes = sets["kodcode"]
    assert kodcodes["a"].problem.tests == AssertTests(("test_numbers", "test_nothing"), FUNCTIONS, "solution")
    assert kodcodes["b"].problem.tests.cases == ("TestTotal::test_one", "Totals::test_two")
    assert kodcodes["a"].problem.starter_code == "def total(values, extra=0):"
    assert kodcodes["a"].references == (Reference(TOTAL),)
    split = tuple(StdinCase(one["input"], one["output"]) for one in SPLIT_ROWS)
    force = sets["codeforces"]["1/C"]
    assert force.problem.tests == StdinTests(split)
    assert force.problem.public_tests == StdinTests(split[:1])
    assert force.problem.limits == Limits(4.0, 1.5, 256 * 1024**2)
    assert force.problem.prompt == (
        "Split n.\n\nInput\n\nn\n\nOutput\n\nTwo numbers.\n\nExamples\n\nInput\n\n7\n\n\nOutput\n\n1 6\n\n\n"
        "Note\n\nAny will do."
    )
    assert [sets["codeforces"][name].problem.languages for name in ("1/A", "1/I")] == [("python",), ("cpp",)]
    assert (force.metadata["contest_date"], force.metadata["cf_rating"]) == ("2025-01-22", "800")
    plus = sets["code_contests_plus"]
    assert plus["1_A"].problem.limits == force.problem.limits
    assert [one.language for one in plus["1_A"].references] == ["python", "cpp"]
    assert plus["1_B"].problem.tests == StdinTests(split)
    plain = sets["code_contests_o"]["1_B"].problem
    assert plain.comparator == Comparator(ignore_case=True)
    hard = sets["hardtests"]["a"]
    assert hard.problem.tests == StdinTests(split)
    assert (hard.references, hard.metadata["time_limit"]) == ((Reference(SPLIT),), "2 seconds")
    pro = sets["livecodebench_pro"]
    assert pro["1A"].problem.languages == ("cpp",)
    assert pro["1A"].problem.limits == force.problem.limits
    assert (pro["1B"].problem.limits.cpu_time_s, pro["1B"].problem.limits.memory_bytes) == (2.0, 256 * 1024**2)


STRANGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    10**30,
    1e300,
    "",
    "x",
    "[1",
    '{"a": 1}',
    [],
    [None],
    [[1]],
    {},
    {"input": 1},
)


def damaged(value: Any) -> Iterator[Any]:
    """The value with each part of it in turn replaced by something else."""
    yield from STRANGE
    if isinstance(value, dict):
        for name in value:
            yield from ({**value, name: other} for other in damaged(value[name]))
            yield {key: kept for key, kept in value.items() if key != name}
    elif isinstance(value, list):
        for at in range(len(value)):
            yield from ([*value[:at], other, *value[at + 1 :]] for other in damaged(value[at]))


@pytest.mark.parametrize("name", SETS)
def test_a_row_with_anything_in_any_place_is_a_problem_or_is_rejected(tmp_path: Path, name: str) -> None:
    """No reader fails in another way than those that an import counts."""
    source = SETS[name][0](tmp_path)
    files = sorted(source.glob("*")) if source.is_dir() else [source]
    for file in [one for one in files if one.suffix in (".jsonl", ".parquet")]:
        rows = [row.value for row in file_rows(file, 0) if isinstance(row.value, dict)][:3]
        jsonl(file.with_suffix(".jsonl"), *rows, *(other for row in rows for other in damaged(row)))
        if file.suffix == ".parquet":
            file.unlink()
    given = source if source.is_dir() else source.with_suffix(".jsonl")
    summary = import_files(name, [given], tmp_path / "out.parquet")
    assert summary.problems > 0
    assert summary.rejected["malformed"] > 10


def test_a_checker_prefers_the_testlib_of_its_machine(tmp_path: Path) -> None:
    """The subset stands in the place of the include, once, and ends with the rest of the checker."""
    tests = imported("code_contests_plus", tmp_path)[1]["1_A"].problem.tests
    assert isinstance(tests, CheckerTests)
    code = tests.checker.code
    assert code.startswith("// What checkers use of testlib")
    assert code.count("#if __has_include(<testlib.h>)\n#include <testlib.h>\n#else\n") == 1
    assert code.endswith(TESTLIB.partition("\n")[2])


@pytest.mark.parametrize("name", ["hardtests", "livecodebench_pro"])
def test_a_folder_of_a_set_is_read_from_any_row_on(tmp_path: Path, name: str) -> None:
    """So an interrupted import goes on where it was. A path that is no such folder is refused in one sentence."""
    folder, rows = SETS[name][0](tmp_path), FORMATS[name].rows
    numbers = [row.number for row in rows(folder, 0)]
    assert numbers == [1, 2, 3, 4, 5]
    assert [[row.number for row in rows(folder, skip)] for skip in numbers] == [numbers[skip:] for skip in numbers]
    for wrong in (tmp_path / "none", next(folder.glob("*.parquet")), folder / "zips"):
        with pytest.raises(ProblemFileError, match="is no folder with a file"):
            list(rows(wrong, 0))


def test_a_broken_archive_is_a_rejected_row(tmp_path: Path) -> None:
    folder = livecodebench_pro(tmp_path)
    (folder / "zips" / "1A.zip").write_bytes(b"no archive")
    (folder / "zips" / "1B.zip").write_bytes((folder / "zips" / "1C.zip").read_bytes()[:-30])
    with pytest.raises(CannotImport, match="the archive is refused: it is not a zip archive"):
        import_files("livecodebench_pro", [folder], tmp_path / "out.parquet")


def verdicts(programs: Sequence[tuple[ReferencedProblem, str, str]]) -> list[VerdictKind]:
    """The verdicts on (problem, language, code), in real sandboxes."""

    async def grade() -> list[VerdictKind]:
        async with local_grader(VerifierSection()) as grader:
            found = []
            for item, language, code in programs:
                problem = item.problem
                given = Submission(
                    problem.tests, code, language=language, limits=problem.limits, comparator=problem.comparator
                )
                found.append((await grader.grade(given)).kind)
            return found

    return asyncio.run(grade())


RIGHT, WRONG = VerdictKind.ACCEPTED, VerdictKind.WRONG_ANSWER


def test_right_programs_are_accepted_and_wrong_ones_are_not(tmp_path: Path) -> None:
    """References, labelled submissions, and programs whose outputs only a checker accepts."""
    cases: list[tuple[str, str, str, VerdictKind]] = [
        ("nemotron", "a", SUM_PROGRAM, RIGHT),
        ("nemotron", "a", DIFFERENCE, WRONG),
        ("nemotron", "b", TOTAL, RIGHT),
        ("nemotron", "b", TOTAL_WRONG, WRONG),
        ("rstar_coder", "s1", SUM_PROGRAM, RIGHT),
        ("rstar_coder", "s3", "class Solution:\n    def total(self, a, b): return sum(a) + b", RIGHT),
        ("rstar_coder", "s3", TOTAL_WRONG, WRONG),
        ("synthetic2", "prime_rl_code_1", SUM_PROGRAM, RIGHT),
        ("synthetic2", "prime_rl_code_1", DIFFERENCE, WRONG),
        ("kodcode", "a", TOTAL, RIGHT),
        ("kodcode", "a", TOTAL_WRONG, WRONG),
        ("kodcode", "b", TOTAL, RIGHT),
        ("kodcode", "b", TOTAL_WRONG, WRONG),
        ("codeforces", "1/A", SPLIT, RIGHT),
        ("codeforces", "1/A", SPLIT_OTHERWISE, WRONG),
        ("codeforces", "1/B", SPLIT_OTHERWISE, RIGHT),
        ("codeforces", "1/B", SPLIT_WRONG, WRONG),
        ("codeforces", "1/B", "print('no number')", WRONG),
        ("code_contests_plus", "1_B", SPLIT, RIGHT),
        ("code_contests_o", "1_B", "n = int(input())\nprint(f'1 {n - 1}' if n != 5 else 'NONE\\nat ALL')", RIGHT),
        ("code_contests_o", "1_B", SPLIT, WRONG),
        ("hardtests", "a", SPLIT, RIGHT),
        ("hardtests", "a", SPLIT_OTHERWISE, WRONG),
        ("hardtests", "b", SPLIT_OTHERWISE, RIGHT),
        ("hardtests", "b", SPLIT_WRONG, WRONG),
        ("hardtests", "b", "print('no number')", WRONG),
    ]
    sets = {name: imported(name, _folder(tmp_path, name))[1] for name in {case[0] for case in cases}}
    found = verdicts([(sets[name][problem], "python", code) for name, problem, code, _ in cases])
    assert [(*case[:3], kind) for case, kind in zip(cases, found, strict=True)] == cases


EQUAL = "n = int(input())\nprint(f'2 {n - 2}' if n != 5 else 'none\\nAT all')"
TESTLIB_CASES: list[tuple[str, str, str, str, VerdictKind]] = [
    ("code_contests_plus", "1_A", "python", SPLIT_OTHERWISE, RIGHT),
    ("code_contests_plus", "1_A", "python", SPLIT_WRONG, WRONG),
    ("code_contests_plus", "1_A", "python", "print('1 6 0')", WRONG),
    ("code_contests_plus", "1_A", "cpp", SPLIT_CPP, RIGHT),
    ("code_contests_o", "1_A. Split", "python", EQUAL, RIGHT),
    ("code_contests_o", "1_A. Split", "python", "n = int(input())\nprint(2, n - 2 if n != 5 else n)", WRONG),
    ("livecodebench_pro", "1A", "cpp", SPLIT_CPP, RIGHT),
    ("livecodebench_pro", "1A", "cpp", SPLIT_WRONG_CPP, WRONG),
]


@pytest.mark.parametrize(
    "cases", [TESTLIB_CASES[:3], pytest.param(TESTLIB_CASES[3:], marks=pytest.mark.heavy)], ids=["one", "all others"]
)
def test_checkers_of_testlib_judge_with_the_subset_of_it(
    tmp_path: Path, cases: list[tuple[str, str, str, str, VerdictKind]]
) -> None:
    """Labelled submissions of CodeContests+, and C++ programs of LiveCodeBench Pro."""
    sets = {name: imported(name, _folder(tmp_path, name))[1] for name in {case[0] for case in cases}}
    assert all(isinstance(sets[case[0]][case[1]].problem.tests, CheckerTests) for case in cases)
    found = verdicts([(sets[name][problem], language, code) for name, problem, language, code, _ in cases])
    assert [(*case[:4], kind) for case, kind in zip(cases, found, strict=True)] == cases


def _folder(top: Path, name: str) -> Path:
    (top / name).mkdir()
    return top / name
