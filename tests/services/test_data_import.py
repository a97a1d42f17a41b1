"""Every importer on a file of its public layout, and what an import keeps to whatever happens to it."""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import shutil
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from nouscoder.cli.app import app
from nouscoder.config import load_config
from nouscoder.data.importers import livecodebench, run
from nouscoder.data.importers.formats import FORMATS
from nouscoder.data.importers.livecodebench import UnsafePickle, text_of_pickle
from nouscoder.data.importers.run import CannotImport, ImportSummary, import_files, rejections_of
from nouscoder.data.problem_index import open_index
from nouscoder.data.problem_parquet import load_problems, read_parquet, read_problem_file
from nouscoder.data.problems import Reference, ReferencedProblem, save_problems
from nouscoder.domain.prompt import PromptForm, prompt_text, system_text
from nouscoder.domain.submission import (
    AssertTests,
    CallCase,
    CallTests,
    CheckerTests,
    Comparator,
    ComparatorKind,
    InteractiveTests,
    MathCase,
    MathTests,
    Prelude,
    StdinCase,
    StdinTests,
    Tests,
)
from nouscoder.errors import Unusable
from nouscoder.grade_files.grade_file import FileRequest, grade_file

SUM = StdinTests((StdinCase("1 2\n", "3\n"), StdinCase("5 5\n", "10\n")))
CALLS = CallTests("f", (CallCase(([1, 2], "x"), {}, 3), CallCase(([], "y"), {}, None)))
WRAPPED = CallTests("f", (CallCase(([1, 2], "x"), {}, [3]), CallCase(([], "y"), {}, [None])), wrapped=True)
SUM_ROWS = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5\n", "output": "10\n"}]
CALL_LINES = [('[1, 2]\n"x"', "3"), ('[]\n"y"', "null")]


def packed(value: object) -> str:
    """Tests as LiveCodeBench keeps its private ones."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(value)))).decode()


def lcb(kind: str, public: Sequence[Any], private: object, **more: object) -> dict[str, Any]:
    """A row of LiveCodeBench."""
    return {
        "question_title": "T",
        "question_content": "Do it.",
        "platform": "atcoder",
        "question_id": "abc301_a",
        "contest_id": "abc301",
        "contest_date": "2024-08-03T00:00:00",
        "starter_code": "class Solution: ..." if kind == "functional" else "",
        "difficulty": "easy",
        "public_test_cases": json.dumps([{**case, "testtype": kind} for case in public]),
        "private_test_cases": private,
        "metadata": json.dumps({"func_name": "f"} if kind == "functional" else {}),
        **more,
    }


CALL_ROWS = [{"input": given, "output": wanted, "testtype": "functional"} for given, wanted in CALL_LINES]
SYNTHETIC = {
    "language": "python",
    "test_cases": [{"type": "stdin_stdout", "fn_name": None, **case} for case in SUM_ROWS],
}
# The programs that EvalPlus publishes (tools/humaneval and tools/mbpp/to_original_fmt.py).
ASSERTION = """import numpy as np

def is_floats(x) -> bool:
    return isinstance(x, float)

def assertion(out, exp, atol):
    exact_match = out == exp

    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert exact_match, f"out: {out}, exp: {exp}"
"""
PLUS = f"""{ASSERTION}
def check(candidate):
    inputs = [[[1, 2], 'x'], [[], 'y']]
    results = [3, None]
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assertion(candidate(*inp), exp, 0)
"""
MBPP_PLUS = f"""{ASSERTION}
inputs = [[[1, 2], 'x'], [[], 'y']]
results = [3, None]
for i, (inp, exp) in enumerate(zip(inputs, results)):
    assertion(f(*inp), exp, 0)
"""
MBPP_AS_SETS = """def assertion(out, exp, atol):
    out = set(out)
    exp = set(exp)
    assert out == exp
inputs = [[(3, 4, 5, 6), (5, 7, 4, 10)]]
results = [(4, 5)]
for i, (inp, exp) in enumerate(zip(inputs, results)):
    assertion(f(*inp), exp, 0)
"""
MBPP_TWO_RESULTS = f"""{ASSERTION}
def _f(a): return a + 1
inputs = [[1]]
results = [5]
for i, (inp, exp) in enumerate(zip(inputs, results)):
    assertion(f(*inp), exp, _f(*inp), 0.001)
"""
FIND_ZERO = """import math
def _poly(xs, x): return sum(c * math.pow(x, i) for i, c in enumerate(xs))
def check(candidate):
    inputs = [[[0, 2]], [[0, -3]]]
    results = [0.0, 0.0]
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assert _poly(*inp, candidate(*inp)) <= 0.0001
"""
UNIT = "import unittest\nclass TestCases(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(1), 2)\n"
PROGRAM = "print(sum(map(int, input().split())))"
ROWS: list[tuple[str, str, dict[str, Any], Tests, tuple[str, ...]]] = [
    ("livecodebench", "abc301_a", lcb("stdin", SUM_ROWS[:1], packed([SUM_ROWS[1] | {"testtype": "stdin"}])), SUM, ()),
    ("livecodebench", "abc301_a", lcb("functional", CALL_ROWS, json.dumps([])), CALLS, ()),
    ("livecodebench", "abc301_a", lcb("functional", CALL_ROWS[:1], packed(CALL_ROWS[1:])), CALLS, ()),
    (
        "taco",
        "taco-1",
        {
            "question": "Do it.",
            "starter_code": "",
            "difficulty": "EASY",
            "solutions": json.dumps([PROGRAM]),
            "input_output": json.dumps({"inputs": ["1 2\n", ["5 5", ""]], "outputs": ["3\n", ["10", ""]]}),
        },
        SUM,
        (PROGRAM,),
    ),
    (
        "apps",
        "apps-7",
        {
            "problem_id": 7,
            "question": "Do it.",
            "solutions": "",
            "input_output": json.dumps(
                {"fn_name": "f", "inputs": [[[1, 2], "x"], [[], "y"]], "outputs": [[3], [None]]}
            ),
        },
        WRAPPED,
        (),
    ),
    (
        "synthetic1",
        "vcp_0",
        {
            "problem_id": "vcp_0",
            "task_type": "verifiable_code",
            "prompt": "Do it.",
            "gold_standard_solution": f"```python\n{PROGRAM}\n```",
            "verification_info": json.dumps(SYNTHETIC),
        },
        SUM,
        (PROGRAM + "\n",),
    ),
    ("synthetic1", "synthetic1-1", {"prompt": "Do it.", "verification_info": repr(SYNTHETIC)}, SUM, ()),
    (
        "synthetic1",
        "synthetic1-1",
        {"task_type": "verifiable_math", "prompt": "1/2?", "verification_info": {"ground_truth": "0.5"}},
        MathTests((MathCase("0.5"),)),
        (),
    ),
    (
        "deepcoder",
        "deepcoder-1",
        {"problem": "Do it.", "solutions": [PROGRAM], "tests": json.dumps(SYNTHETIC["test_cases"])},
        SUM,
        (PROGRAM,),
    ),
    (
        "deepcoder",
        "deepcoder-1",
        {"problem": "Do it.", "tests": json.dumps({"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10\n"]})},
        SUM,
        (),
    ),
    (
        "deepcoder",
        "deepcoder-lcb-1",
        {
            "problem": "Do it.",
            "tests": json.dumps([case | {"metadata": {"func_name": "f"}} for case in CALL_ROWS]),
        },
        CALLS,
        (),
    ),
    (
        "code_contests",
        "1_A. Sum",
        {
            "name": "1_A. Sum",
            "description": "Do it.",
            "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
            "private_tests": {"input": [], "output": []},
            "generated_tests": {"input": ["5 5\n"], "output": ["10\n"]},
            "source": 2,
            "cf_rating": 800,
            "solutions": {"language": [1, 2, 3], "solution": ["print 3", "int main(){}", PROGRAM]},
            "time_limit": {"seconds": 2, "nanos": 500000000},
            "input_file": "",
        },
        SUM,
        (PROGRAM, "int main(){}"),
    ),
    (
        "rllm_contests",
        "code-contests-0",
        {"problem": "Do it.", "tests": {"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10\n"]}},
        SUM,
        (),
    ),
    (
        "leetcode",
        "two-sum",
        {
            "task_id": "two-sum",
            "query": "Do it.",
            "prompt": "import math",
            "completion": "class Solution: ...",
            "entry_point": "Solution().f",
            "test": "def check(candidate):\n    assert candidate(a = [1, [2]]) == {'k': 3.5}",
            "difficulty": "Easy",
        },
        CallTests("f", (CallCase((), {"a": [1, [2]]}, {"k": 3.5}),), "import math"),
        ("class Solution: ...",),
    ),
    (
        "acecode",
        "oss_1",
        {"id": "oss_1", "source": "oss", "question": "Do it.", "test_cases": ["assert f(1) == 2", "assert f(2) == 3"]},
        CallTests("f", (CallCase((1,), {}, 2), CallCase((2,), {}, 3))),
        (),
    ),
    (
        "acecode",
        "oss_2",
        {"id": "oss_2", "question": "Do it.", "test_cases": ["assert f(1) == 2", "assert abs(f(2) - 3) < 1"]},
        AssertTests(("assert f(1) == 2", "assert abs(f(2) - 3) < 1")),
        (),
    ),
    (
        "humaneval",
        "HumanEval/0",
        {
            "task_id": "HumanEval/0",
            "prompt": "def f(a):\n",
            "canonical_solution": "    return a\n",
            "entry_point": "f",
            "test": "def check(candidate):\n    assert candidate([1, 2], 'x') == 3\n"
            "    assert candidate([], 'y') == None\n",
        },
        CALLS,
        ("def f(a):\n    return a\n",),
    ),
    (
        "humaneval",
        "HumanEval/1",
        {
            "task_id": "HumanEval/1",
            "prompt": "def f(a):\n",
            "entry_point": "f",
            "test": "def check(candidate):\n    assert abs(candidate(1) - 2) < 1e-6\n",
        },
        AssertTests(("def check(candidate):\n    assert abs(candidate(1) - 2) < 1e-6\n\ncheck(f)",)),
        (),
    ),
    (
        "humaneval",
        "HumanEval/38",
        {
            "task_id": "HumanEval/38",
            "prompt": "import math\n\ndef g(s):\n    return s[::-1]\n\ndef f(s):\n    '''Undo g.'''\n",
            "canonical_solution": "    return s[::-1]\n",
            "entry_point": "f",
            "test": "def check(candidate):\n    for s in 'ab':\n        assert candidate(g(s)) == s\n",
        },
        AssertTests(
            ("def check(candidate):\n    for s in 'ab':\n        assert candidate(g(s)) == s\n\ncheck(f)",),
            "import math\n\ndef g(s):\n    return s[::-1]",
        ),
        ("import math\n\ndef g(s):\n    return s[::-1]\n\ndef f(s):\n    '''Undo g.'''\n    return s[::-1]\n",),
    ),
    (
        "humaneval",
        "HumanEval/2",
        {"task_id": "HumanEval/2", "prompt": "def f(a):\n", "entry_point": "f", "test": PLUS},
        CALLS,
        (),
    ),
    (
        "humaneval",
        "HumanEval/32",
        {"task_id": "HumanEval/32", "prompt": "def f(a):\n", "entry_point": "f", "test": FIND_ZERO},
        AssertTests((f"{FIND_ZERO}\ncheck(f)",)),
        (),
    ),
    (
        "mbpp",
        "Mbpp/11",
        {
            "task_id": 11,
            "text": "Do it.",
            "code": "def f(a): return a",
            "test_list": ["assert f(1) == 2"],
            "test_setup_code": "root = Node(1)",
            "test_imports": ["import math"],
        },
        AssertTests(("root = Node(1)\nassert f(1) == 2",), "import math"),
        ("def f(a): return a",),
    ),
    (
        "mbpp",
        "Mbpp/12",
        {
            "task_id": 12,
            "prompt": "Do it.",
            "test_list": ["assert f(1) == 2"],
            "test_imports": [],
            "test": MBPP_PLUS,
        },
        CALLS,
        (),
    ),
    *(
        (
            "mbpp",
            "Mbpp/2",
            {"task_id": 2, "prompt": "Do it.", "test_list": ["assert f(1) == 2"], "test_imports": [], "test": code},
            AssertTests((code,)),
            (),
        )
        for code in (MBPP_AS_SETS, MBPP_TWO_RESULTS)
    ),
    (
        "math",
        "test/algebra/1.json",
        {"unique_id": "test/algebra/1.json", "problem": "?", "solution": r"So \boxed{\frac{1}{2}}.", "level": 3},
        MathTests((MathCase(r"\frac{1}{2}"),)),
        (),
    ),
    ("math", "math-1", {"question": "?", "answer": "2 + 2 = 4\n#### 1,004"}, MathTests((MathCase("1004"),)), ()),
    (
        "math",
        "math-1",
        {"problem": "?", "solution": "2\n#### 1,018", "answer": None},
        MathTests((MathCase("1018"),)),
        (),
    ),
    ("math", "math-1", {"problem": "?", "solution": ["so"], "answer": ["$2$"]}, MathTests((MathCase("$2$"),)), ()),
    (
        "math",
        "math-1",
        {"prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "34"}},
        MathTests((MathCase("34"),)),
        (),
    ),
    ("math", "math-1", {"problem": "?", "answer": float("nan"), "final_answer": [4]}, MathTests((MathCase("4"),)), ()),
    ("reasoning", "reasoning-1", {"input": "2 + 2?", "target": "4"}, StdinTests((StdinCase("", "4"),)), ()),
]


def jsonl(path: Path, *rows: object) -> Path:
    """A file of rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path: Path, *rows: dict[str, Any]) -> Path:
    """A parquet file of rows."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=2)
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("case", ROWS, ids=[f"{n}-{case[0]}" for n, case in enumerate(ROWS)])
def test_a_row_of_each_layout_becomes_its_problem(
    tmp_path: Path, case: tuple[str, str, dict[str, Any], Tests, tuple[str, ...]], suffix: str
) -> None:
    name, problem_id, row, tests, programs = case
    file = (parquet if suffix == "parquet" else jsonl)(tmp_path / f"data.{suffix}", row)
    summary = import_files(name, [file], tmp_path / "out.parquet")
    (item,) = read_parquet(tmp_path / "out.parquet")
    assert item.problem.problem_id == problem_id
    assert item.problem.tests == tests
    assert item.problem.prompt
    assert tuple(one.code for one in item.references) == programs
    assert (summary.problems, summary.tests, summary.rejected) == (1, len(tests.cases), {})


@pytest.mark.parametrize(("published", "absolute"), [("0", 1e-6), ("1e-06", 1e-6), ("0.01", 0.01)])
def test_the_tolerance_of_evalplus_is_that_of_its_program(tmp_path: Path, published: str, absolute: float) -> None:
    code = PLUS.replace("exp, 0)", f"exp, {published})")
    row = {"task_id": "HumanEval/2", "prompt": "def f(a):\n", "entry_point": "f", "test": code}
    import_files("humaneval", [jsonl(tmp_path / "data.jsonl", row)], tmp_path / "out.parquet")
    (item,) = read_parquet(tmp_path / "out.parquet")
    assert (item.problem.comparator.absolute_tolerance, item.problem.comparator.relative_tolerance) == (absolute, 1e-7)


def test_a_plus_program_that_calls_no_named_function_is_rejected(tmp_path: Path) -> None:
    """EvalPlus once wrote `candidate(*inp)` for MBPP+, and no field says whose name that is."""
    code = MBPP_PLUS.replace("f(*inp)", "candidate(*inp)")
    rows = [
        {"task_id": 1, "prompt": "?", "test_list": ["assert f(1) == 2"], "test": code} for code in (code, MBPP_PLUS)
    ]
    rows[1]["task_id"] = 2
    summary = import_files("mbpp", [jsonl(tmp_path / "data.jsonl", *rows)], tmp_path / "out.parquet")
    assert (summary.problems, summary.rejected) == (1, {"unreadable_tests": 1})


@pytest.mark.parametrize(
    ("given", "difficulty", "metadata"),
    [
        ({"cf_rating": 1100, "difficulty": 7}, "1100", {"cf_rating": "1100"}),
        ({"cf_rating": 0, "difficulty": 7, "cf_contest_id": 0, "memory_limit_bytes": 0}, "A", {}),
        ({"cf_rating": 0, "difficulty": 3}, "hard", {}),
        ({"cf_rating": 0, "difficulty": 0}, "", {}),
    ],
)
def test_zeros_of_code_contests_are_no_facts(
    tmp_path: Path, given: dict[str, int], difficulty: str, metadata: dict[str, str]
) -> None:
    row = {"name": "n", "description": "?", "public_tests": {"input": ["1"], "output": ["1"]}, **given}
    import_files("code_contests", [jsonl(tmp_path / "data.jsonl", row)], tmp_path / "out.parquet")
    (item,) = read_parquet(tmp_path / "out.parquet")
    assert (item.problem.difficulty, item.metadata) == (difficulty, metadata)


def test_a_row_becomes_a_problem_of_its_language(tmp_path: Path) -> None:
    """Rows of other languages were Python problems for which every right answer was a compile_error; then rejected."""
    call = {"test_cases": [{"type": "function_call", "fn_name": "f", "input": [1], "output": 2}]}
    infos = [
        {**SYNTHETIC, "language": name} for name in ("python", "Python3", "", "cpp", "GNU C++17", "rust", "nodejs")
    ]
    infos += [{**call, "language": "rust"}, {**call, "language": "python"}, {**SYNTHETIC, "language": "whitespace"}]
    rows = [
        {
            "problem_id": f"p{number}",
            "prompt": "Add.",
            "verification_info": repr(info),
            "gold_standard_solution": f"```\n{number}\n```",
        }
        for number, info in enumerate(infos)
    ]
    summary = import_files("synthetic1", [jsonl(tmp_path / "data.jsonl", *rows)], tmp_path / "out.parquet")
    assert (summary.problems, summary.rejected) == (8, {"other_language": 2})
    found = {one.problem.problem_id: one for one in read_parquet(tmp_path / "out.parquet")}
    languages = ["python", "python", "python", "cpp", "cpp", "rust", "javascript", "python"]
    assert [one.problem.languages for one in found.values()] == [(language,) for language in languages]
    assert [one.references[0].language for one in found.values()] == languages
    assert {name for name, one in found.items() if one.problem.prelude is Prelude.LCB} == {"p0", "p1", "p2", "p8"}
    details = [line["detail"] for line in rejections_of(Path(summary.rejections))]
    assert details[0] == "call tests need programs in python: in rust only whole programs are tested"
    assert details[1].startswith("'whitespace' is no language that the verifier knows: bash, c, cpp,")


def test_the_kind_of_a_generated_task_is_its_family(tmp_path: Path) -> None:
    """Reasoning Gym's metadata is a record, or its JSON. Any other text names no kind."""
    about = {"source_dataset": "gcd"}
    rows = [
        {"question": f"{at}?", "answer": "7", "metadata": given}
        for at, given in enumerate((about, json.dumps(about), "no record"))
    ]
    import_files("reasoning", [jsonl(tmp_path / "data.jsonl", *rows)], tmp_path / "out.parquet")
    assert [item.problem.family for item in read_parquet(tmp_path / "out.parquet")] == ["gcd", "gcd", ""]


def test_a_missing_answer_is_sought_elsewhere_and_one_that_is_not_one_is_rejected(tmp_path: Path) -> None:
    """NaN, which pandas writes for a missing value, was the answer n * a * n; of two answers the boxed one counted."""
    rows: list[dict[str, Any]] = [{"answer": float("nan")}, {"answer": ["2", "3"]}, {"answer": {"value": 2}}]
    rows += [{"final_answer": True}, {"reward_model": {"ground_truth": ["2", "3"]}}, {"answer": " "}]
    file = jsonl(tmp_path / "rows.jsonl", *({"problem": "?", "solution": r"\boxed{2}"} | row for row in rows))
    import_files("math", [file], tmp_path / "math.parquet")
    assert [item.problem.problem_id for item in read_parquet(tmp_path / "math.parquet")] == ["math-1", "math-6"]
    file = jsonl(tmp_path / "rows.jsonl", {"prompt": "?", "answer": float("nan")}, {"prompt": "?", "answer": 2})
    import_files("generic", [file], tmp_path / "generic.parquet")
    assert [item.problem.problem_id for item in read_parquet(tmp_path / "generic.parquet")] == ["generic-2"]


TUPLES = "def check(candidate):\n    assert candidate((1, 2), [3]) == 4\n"


def test_a_function_is_called_with_tuples_where_its_tests_have_tuples(tmp_path: Path) -> None:
    """As lists they are no keys of a dictionary, and a program that adds (x,) to one fails."""
    case = {"type": "function_call", "fn_name": "f", "input": [(1, 2)], "output": (3, 4)}
    plus = PLUS.replace("[[1, 2], 'x']", "[(1, 2), 'x']")
    rows: list[tuple[str, dict[str, Any]]] = [
        ("acecode", {"question": "?", "test_cases": ["assert f((1, 2)) == 3", "assert f([(1,)]) == 4"]}),
        ("humaneval", {"task_id": "1", "prompt": "def f(a):", "entry_point": "f", "test": TUPLES}),
        ("humaneval", {"task_id": "1", "prompt": "def f(a):", "entry_point": "f", "test": plus}),
        ("leetcode", {"task_id": "1", "query": "?", "entry_point": "Solution().f", "test": TUPLES}),
        ("klear", {"prompt": "?", "reward_model": {"ground_truth": json.dumps({"functional": f"{TUPLES}check(f)"})}}),
    ]
    for number, (name, row) in enumerate(rows):
        import_files(name, [jsonl(tmp_path / "rows.jsonl", row)], tmp_path / f"{number}.parquet")
        (item,) = read_parquet(tmp_path / f"{number}.parquet")
        assert isinstance(item.problem.tests, AssertTests), name
        assert "(1, 2)" in item.problem.tests.cases[0]
    row = {"prompt": "?", "verification_info": repr({"language": "python", "test_cases": [case]})}
    with pytest.raises(Unusable, match=r"not a JSON value: \(1, 2\)"):
        import_files("synthetic1", [jsonl(tmp_path / "rows.jsonl", row)], tmp_path / "synthetic1.parquet")


def test_every_format_is_tested_here() -> None:
    of_trainers = {"generic", "nouscoder", "klear", "skywork"}  # test_trainers_sets.py
    of_named_sets = {"nemotron", "rstar_coder", "synthetic2", "kodcode", "codeforces", "code_contests_plus"}
    of_named_sets |= {"code_contests_o", "hardtests", "livecodebench_pro"}  # test_named_sets.py
    others = {"kattis", "bigcodebench", "harbor", "multipl-e", "ds1000"} | of_trainers | of_named_sets
    assert {case[0] for case in ROWS} | others == set(FORMATS)


def test_what_is_imported_is_what_a_run_trains_on_and_what_grade_reads(tmp_path: Path) -> None:
    """The same problems as JSON lines, in the index of a run, and with their references in a grading."""
    rows = [{"problem": f"Sum {n}.", "tests": {"inputs": ["a"], "outputs": ["a" if n else "b"]}} for n in range(3)]
    out = tmp_path / "out.parquet"
    import_files("rllm_contests", [jsonl(tmp_path / "data.jsonl", *rows)], out)
    problems = load_problems(out)
    save_problems(tmp_path / "same.jsonl", problems)
    assert load_problems(tmp_path / "same.jsonl") == problems
    indexes = [
        open_index(load_config(None, [f"problems.train={tmp_path / name}"])) for name in (out.name, "same.jsonl")
    ]
    assert indexes[0].problem_ids == indexes[1].problem_ids
    for name in indexes[0].problem_ids:
        assert indexes[0].problem(name) == indexes[1].problem(name)
        assert indexes[0].tests.has(indexes[0].problem(name).tests_digest)
    samples = jsonl(tmp_path / "samples.jsonl", *({"task_id": one.problem_id, "code": "x"} for one in problems))
    config = load_config(None, ["verifier.sandbox.backend=fake"])  # every program prints its input
    summary, _ = grade_file(FileRequest(samples, tmp_path / "verdicts", out), config)
    assert summary.pass_at_k == {1: pytest.approx(2 / 3)}


def test_an_index_elsewhere_gets_its_own_copy_of_the_tests(tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    import_files("rllm_contests", [jsonl(tmp_path / "data.jsonl", ROWS[12][2])], out, str(tmp_path / "store"))
    settings = [f"problems.train={out}", f"problems.index={tmp_path / 'index'}", f"problems.tests={tmp_path / 'other'}"]
    index = open_index(load_config(None, settings))
    with index.tests.opened(index.problem("code-contests-0").tests_digest) as tests:
        assert list(tests.cases) == list(SUM.cases)


class Attack:
    """Unpickling this would write a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self._path, "executed"))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_of_anything_but_one_text_is_refused_and_never_loaded(tmp_path: Path, protocol: int) -> None:
    evil = tmp_path / "evil"
    values: list[Any] = [Attack(evil), [Attack(evil)], ["a"], {"a": "b"}, 7, b"bytes", Path("x"), ("a", "b")]
    for value in values:
        with pytest.raises(UnsafePickle, match=r"operation|no text"):
            text_of_pickle(pickle.dumps(value, protocol))
    assert text_of_pickle(pickle.dumps("text \u00e9" * 1000, protocol)) == "text \u00e9" * 1000
    row = lcb("stdin", SUM_ROWS, base64.b64encode(zlib.compress(pickle.dumps(Attack(evil), protocol))).decode())
    rows = [row, lcb("stdin", SUM_ROWS, "[]", question_id="fine")]
    summary = import_files("livecodebench", [jsonl(tmp_path / "data.jsonl", *rows)], tmp_path / "out.parquet")
    assert summary.rejected == {"unsafe_pickle": 1}
    assert not evil.exists()


@example(noise=b"P", at=0, protocol=0, replaced=False)  # an operation whose text has a wrong escape
@example(noise=bytes(6) + b"\x80", at=4, protocol=4, replaced=True)  # a frame that is longer than memory can be
@given(st.binary(max_size=60), st.integers(0, 80), st.integers(0, pickle.HIGHEST_PROTOCOL), st.booleans())
def test_whatever_the_bytes_of_a_pickle_are_it_is_a_text_or_a_fault(
    noise: bytes, at: int, protocol: int, replaced: bool
) -> None:
    data = pickle.dumps("text \u00e9\n", protocol)
    data = data[:at] + noise + data[at + len(noise) * replaced :]
    try:
        found = text_of_pickle(data)
    except ValueError:
        return
    # pickle itself refuses more of them
    with contextlib.suppress(pickle.UnpicklingError, ValueError, EOFError, OverflowError):
        assert pickle.loads(data) == found


def test_private_tests_that_unpack_to_too_much_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(livecodebench, "MAX_UNPACKED_BYTES", 1000)
    rows = [lcb("stdin", SUM_ROWS, packed("x" * 2000)), lcb("stdin", SUM_ROWS, "[]", question_id="fine")]
    summary = import_files("livecodebench", [jsonl(tmp_path / "data.jsonl", *rows)], tmp_path / "out.parquet")
    assert summary.rejected == {"too_large": 1}


def test_each_rejected_row_has_its_reason(tmp_path: Path) -> None:
    good = ROWS[5][2]
    rows = [
        good,
        good,
        {"problem_id": "b", "prompt": "x", "verification_info": {"test_cases": []}},
        {"problem_id": "c", "prompt": "x", "task_type": "llm_judgeable", "verification_info": "{}"},
        {"problem_id": "d", "verification_info": json.dumps(SYNTHETIC)},
        {"problem_id": "e", "prompt": "x", "verification_info": "{'a': open('/etc/passwd')}"},
        {"problem_id": "f", "prompt": "x", "verification_info": {"test_cases": [{"input": "1"}]}},
        [1],
    ]
    file = jsonl(tmp_path / "data.jsonl", *rows)
    file.write_text(file.read_text() + "{torn\n")
    summary = import_files("synthetic1", [file], tmp_path / "out.parquet")
    found = list(rejections_of(Path(summary.rejections)))
    assert [(one["row"], one["reason"]) for one in found] == [
        (2, "duplicate_id"),
        (3, "no_tests"),
        (4, "not_verifiable"),
        (5, "missing_field"),
        (6, "unreadable_tests"),
        (7, "malformed"),
        (8, "malformed"),
        (9, "not_json"),
    ]
    assert sum(summary.rejected.values()) == 8
    assert all(one["file"] == str(file) and one["detail"] for one in found)
    assert "duplicate_id" in summary.text()


def test_rows_without_a_name_of_several_files_are_all_kept(tmp_path: Path) -> None:
    """TACO and DeepCoder are published in several files, and their rows have no name."""
    rows = [{"question": f"Q{n}", "input_output": json.dumps({"inputs": [str(n)], "outputs": ["1"]})} for n in range(5)]
    files = [jsonl(tmp_path / "a.jsonl", *rows[:3]), jsonl(tmp_path / "b.jsonl", *rows[3:])]
    assert import_files("taco", files, tmp_path / "out.parquet").rejected == {}
    found = [(item.problem.problem_id, item.problem.prompt) for item in read_parquet(tmp_path / "out.parquet")]
    assert found == [(f"taco-{n + 1}", f"Q{n}") for n in range(5)]


class Killed(BaseException):
    """The process died here."""


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("at", [1, 4, 9])
def test_an_import_that_was_killed_goes_on_and_gives_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, suffix: str
) -> None:
    # The last two have no name: they are named by their place.
    names = [{"problem_id": f"p{n % 6}"} if n < 8 else {} for n in range(10)]
    rows = [{**names[n], "prompt": "x", "verification_info": json.dumps(SYNTHETIC if n % 3 else {})} for n in range(10)]
    write: Any = parquet if suffix == "parquet" else jsonl
    files = [write(tmp_path / f"a.{suffix}", *rows[:6]), write(tmp_path / f"b.{suffix}", *rows[6:])]
    monkeypatch.setattr(run, "_PART_PROBLEMS", 2)
    expected = import_files("synthetic1", files, tmp_path / "whole.parquet")

    read, calls = FORMATS["synthetic1"].read, []

    def dying(row: Any, number: int) -> ReferencedProblem:
        calls.append(number)
        if len(calls) == at + 1:
            raise Killed
        return read(row, number)

    monkeypatch.setitem(FORMATS, "synthetic1", replace(FORMATS["synthetic1"], read=dying))
    out = tmp_path / "out.parquet"
    with pytest.raises(Killed):
        import_files("synthetic1", files, out)
    assert not out.exists()
    summary = import_files("synthetic1", files, out)
    assert replace(summary, out="", rejections="") == replace(expected, out="", rejections="")
    assert list(read_parquet(out)) == list(read_parquet(tmp_path / "whole.parquet"))
    assert list(rejections_of(Path(summary.rejections))) == list(rejections_of(Path(expected.rejections)))
    assert len(calls) <= 10 + 3 + 1  # at most one part is read again
    assert not out.with_name("out.parquet.part").exists()


def test_faults_of_the_request_are_one_sentence(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "data.jsonl", {})
    out = tmp_path / "out.parquet"
    with pytest.raises(Unusable, match="no format 'livecodebnch': did you mean livecodebench"):
        import_files("livecodebnch", [file], out)
    with pytest.raises(CannotImport, match="absent does not exist"):
        import_files("taco", [tmp_path / "absent"], out)
    with pytest.raises(CannotImport, match=r"must end in \.parquet"):
        import_files("taco", [file], tmp_path / "out.json")
    with pytest.raises(CannotImport, match=r"no row could be imported; .*rejected\.jsonl has the reason of each"):
        import_files("taco", [file], out)
    out.touch()
    with pytest.raises(CannotImport, match="exists already"):
        import_files("taco", [file], out)


def test_files_that_were_imported_in_the_wrong_format_can_be_imported_in_the_right_one(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"problem": "What is 1 + 1?", "answer": "2"}) + "\n")
    with pytest.raises(CannotImport, match="no row could be imported"):
        import_files("livecodebench", [source], tmp_path / "out.parquet")
    assert import_files("math", [source], tmp_path / "out.parquet").problems == 1


def test_an_empty_file_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.touch()
    with pytest.raises(CannotImport, match=f"there is no row in {source}"):
        import_files("math", [source], tmp_path / "out.parquet")
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["rows.jsonl"]


def test_the_command_prints_a_table_or_json(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "data.jsonl", ROWS[12][2])
    out = tmp_path / "out.parquet"
    answer = CliRunner().invoke(app, ["data", "import", "rllm_contests", str(file), "--out", str(out), "--json"])
    assert ImportSummary(**json.loads(answer.output)).problems == 1
    assert "livecodebench" in CliRunner().invoke(app, ["data", "import", "list"]).output
    inspected = CliRunner().invoke(app, ["data", "inspect", str(out), "--json"])
    assert json.loads(inspected.output)["num_tests"] == 2


PYTHON_VALIDATOR = """import sys
given = int(open(sys.argv[1]).read())
print("checked", file=open(sys.argv[3] + "judgemessage.txt", "w"))
sys.exit(42 if sum(map(int, sys.stdin.read().split())) == given else 43)
"""
CPP_VALIDATOR = """#include <fstream>
#include <iostream>
#include "ends.h"
int main(int argc, char **argv) {
    std::ifstream given(argv[1]);
    std::ofstream message(std::string(argv[3]) + "judgemessage.txt");
    long n = 0, sum = 0, x = 0;
    given >> n;
    while (std::cin >> x) sum += x;
    return sum == n && message ? accept : reject;
}
"""
INTERACTOR = """import sys
secret = int(open(sys.argv[1]).read())
for line in sys.stdin:
    if int(line) == secret:
        print("right", flush=True)
        sys.exit(42)
    print("larger" if int(line) < secret else "smaller", flush=True)
sys.exit(43)
"""


def package(folder: Path, yaml: str = "name: sum", answer: str = "3", **files: str) -> Path:
    """A Kattis package with one sample and one secret test."""
    for name, content in {
        "problem.yaml": yaml,
        "problem_statement/problem.en.tex": "Print the sum.",
        "data/sample/1.in": "3\n",
        "data/sample/1.ans": f"{answer}\n",
        "data/secret/group/2.in": "7\n",
        "data/secret/group/2.ans": "7\n",
        "submissions/accepted/a.py": "print(int(input()))",
        "submissions/accepted/a2.py": "#!/usr/bin/env python2\nprint int(raw_input())",  # not a reference
        **files,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def imported(tmp_path: Path, path: Path) -> ReferencedProblem:
    """The only problem of a package."""
    import_files("kattis", [path], tmp_path / "kattis.parquet")
    (item,) = read_parquet(tmp_path / "kattis.parquet")
    return item


def test_a_package_keeps_its_tests_limits_tolerance_and_solutions(tmp_path: Path) -> None:
    yaml = "name: sum\nlimits:\n  memory: 64\nvalidator_flags: float_tolerance 1e-6"
    folder = package(tmp_path / "sum", yaml, **{"domjudge-problem.ini": "timelimit='2.5'\n"})
    with zipfile.ZipFile(tmp_path / "sum.zip", "w") as zipped:
        for file in folder.rglob("*"):
            zipped.write(file, file.relative_to(folder))
    for path in (folder, tmp_path / "sum.zip"):
        (tmp_path / "kattis.parquet").unlink(missing_ok=True)
        item = imported(tmp_path, path)
        assert item.problem.problem_id == "sum"
        assert item.problem.tests == StdinTests((StdinCase("3\n", "3\n"), StdinCase("7\n", "7\n")))
        assert "Print the sum." in item.problem.prompt
        assert "Sample input 1\n```\n3\n" in item.problem.prompt
        assert "7" not in item.problem.prompt
        limits = item.problem.limits
        assert (limits.cpu_time_s, limits.wall_time_s, limits.memory_bytes) == (2.5, 6.0, 64 * 1024**2)
        assert item.problem.comparator.float_tolerance == 1e-6
        assert item.references == (Reference("print(int(input()))"),)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("special_compare='float'", "special_compare is float, a program that is not in the package"),
        ("special_run = boolfind_run", "special_run is boolfind_run"),
        ("no value", "domjudge-problem.ini: "),
    ],
)
def test_a_package_of_domjudge_without_its_judge_program_is_rejected(tmp_path: Path, line: str, reason: str) -> None:
    """It would be judged by the default comparison."""
    package(tmp_path / "sum", **{"domjudge-problem.ini": f"timelimit='2'\n{line}\n"})
    with pytest.raises(CannotImport, match="no row could be imported"):
        import_files("kattis", [tmp_path / "sum"], tmp_path / "kattis.parquet")
    assert reason in (tmp_path / "kattis.parquet.rejected.jsonl").read_text()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("language", ["py", "cpp"])
def test_the_validator_of_a_package_judges_in_a_sandbox(tmp_path: Path, language: str) -> None:
    source = {"py": PYTHON_VALIDATOR, "cpp": CPP_VALIDATOR}[language]
    extra = {f"output_validators/v/validate.{language}": source}
    extra |= {"output_validators/v/ends.h": "enum { accept = 42, reject = 43 };\n"} if language == "cpp" else {}
    item = imported(tmp_path, package(tmp_path / "split", "validation: custom", **extra))
    assert isinstance(item.problem.tests, CheckerTests)
    assert verdicts(tmp_path, "split", "print(1, int(input()) - 1)", "print(2, 2)") == ["accepted", "wrong_answer"]


TOLERANCE = Comparator(ComparatorKind.KATTIS, float_tolerance=1e-4, ignore_case=True)
GROUP = "output_validator_flags: float_tolerance 1e-4\n"


@pytest.mark.parametrize(
    ("yaml", "files", "comparator"),
    [
        ("name: x", {}, Comparator(ignore_case=True)),
        ("validator_flags: float_tolerance 1e-4", {}, TOLERANCE),
        ("name: x", {"data/testdata.yaml": GROUP}, TOLERANCE),
        ("name: x", {"data/testdata.yaml": "grading: default", "data/secret/testdata.yaml": GROUP}, "'' and 'float"),
        ("name: x", {f"data/{name}/testdata.yaml": GROUP for name in ("sample", "secret")}, TOLERANCE),
        ("name: x", {"data/testdata.yaml": GROUP, "data/secret/group/testdata.yaml": GROUP[:-2] + "9"}, "1e-9"),
        ("name: x", {"data/test_group.yaml": "output_validator_args: [float_tolerance, 1e-4]"}, TOLERANCE),
        (
            "validator_flags: case_sensitive",
            {
                f"data/{case}.yaml": "output_validator_args: [float_tolerance, 1e-4]"
                for case in ("sample/1", "secret/group/2")
            },
            Comparator(ComparatorKind.KATTIS, float_tolerance=1e-4),
        ),
        (
            "validator_flags: float_absolute_tolerance 0.5 float_relative_tolerance 0.25 case_sensitive",
            {},
            Comparator(ComparatorKind.KATTIS, absolute_tolerance=0.5, relative_tolerance=0.25),
        ),
        ("validator_flags: space_change_sensitive case_sensitive", {}, Comparator(ComparatorKind.EXACT)),
        ("validator_flags: space_change_sensitive float_tolerance 1", {}, "space_change_sensitive together with"),
        ("validator_flags: ignore_everything", {}, "the default validator has no flag 'ignore_everything'"),
        ("name: x", {"data/secret/group/2.args": "-v"}, "2.args is an argument or a file for the program"),
        ("type: [pass-fail, multi-pass]", {}, "a multi-pass problem"),
        ("type: submit-answer", {}, "a submit-answer problem"),
    ],
)
def test_the_flags_of_the_default_validator_are_kept(
    tmp_path: Path, yaml: str, files: dict[str, str], comparator: Comparator | str
) -> None:
    """Of all forms of the format. What has no counterpart is rejected with its name."""
    folder = package(tmp_path / "sum", yaml, **files)
    if isinstance(comparator, Comparator):
        assert imported(tmp_path, folder).problem.comparator == comparator
        return
    with pytest.raises(CannotImport, match="no row could be imported") as found:
        imported(tmp_path, folder)
    assert comparator in str(found.value)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("language", ["py", "cpp"])
def test_a_validator_gets_the_flags_of_its_package(tmp_path: Path, language: str) -> None:
    """In a package of the format 2023-07, whose validator needs no key."""
    source = {
        "py": "import sys\nassert sys.argv[4:] == ['slack', '1']\n"
        "sys.exit(42 if abs(int(input()) - int(open(sys.argv[2]).read())) == int(sys.argv[5]) else 43)\n",
        "cpp": "#include <cstdlib>\n#include <fstream>\n#include <iostream>\nint main(int argc, char **argv) {\n"
        "    int given = 0, wanted = 0;\n    std::cin >> given;\n    std::ifstream(argv[2]) >> wanted;\n"
        "    return argc == 6 && std::abs(given - wanted) == std::atoi(argv[5]) ? 42 : 43;\n}\n",
    }[language]
    yaml = "problem_format_version: 2023-07-draft\nname: off\ntype: pass-fail\n"
    extra = {f"output_validator/validate.{language}": source, "data/testdata.yaml": "output_validator_args: [slack, 1]"}
    assert isinstance(imported(tmp_path, package(tmp_path / "off", yaml, **extra)).problem.tests, CheckerTests)
    assert verdicts(tmp_path, "off", "print(int(input()) - 1)", "print(input())") == ["accepted", "wrong_answer"]


@pytest.mark.timeout(300)
def test_the_interactor_of_a_package_judges_in_a_sandbox(tmp_path: Path) -> None:
    extra = {"output_validators/v/talk.py": INTERACTOR}
    item = imported(tmp_path, package(tmp_path / "guess", "validation: custom interactive", **extra))
    assert isinstance(item.problem.tests, InteractiveTests)
    search = "for n in range(1, 20):\n    print(n, flush=True)\n    if input() == 'right': break"
    assert verdicts(tmp_path, "guess", search, "print(1, flush=True)\ninput()") == ["accepted", "wrong_answer"]


def verdicts(tmp_path: Path, problem_id: str, *programs: str) -> list[str]:
    """What real sandboxes say of the programs."""
    samples = jsonl(tmp_path / "samples.jsonl", *({"task_id": problem_id, "code": code} for code in programs))
    grade_file(FileRequest(samples, tmp_path / "verdicts", tmp_path / "kattis.parquet"), load_config(None))
    return [json.loads(line)["verdict"] for line in (tmp_path / "verdicts").read_text().splitlines()]


def test_a_library_that_only_the_tests_of_bigcodebench_import_is_required(tmp_path: Path) -> None:
    """Three of the 148 hard tasks import faker in their tests alone; `libs` does not name it."""
    test = "import unittest\nfrom faker import Faker\nclass T(unittest.TestCase):\n    def test_a(self): pass\n"
    row = {"task_id": "B/1", "instruct_prompt": "Do it.", "test": test, "libs": "['json', 'numpy']"}
    row["canonical_solution"] = "    return pd.read_excel(path)"  # pandas imports openpyxl by itself
    import_files("bigcodebench", [jsonl(tmp_path / "data.jsonl", row)], tmp_path / "out.parquet")
    (item,) = read_parquet(tmp_path / "out.parquet")
    assert item.problem.libraries == ("numpy", "openpyxl", "faker")


def test_a_bigcodebench_task_is_judged_by_each_of_its_test_methods(tmp_path: Path) -> None:
    row = {
        "task_id": "BigCodeBench/0",
        "instruct_prompt": "Do it.",
        "code_prompt": "def f(x):\n",
        "canonical_solution": "    return x + 1\n",
        "test": UNIT + "    def test_b(self): self.assertEqual(f(2), 3)\n",
        "entry_point": "f",
        "libs": "['random']",
    }
    import_files("bigcodebench", [jsonl(tmp_path / "data.jsonl", row)], tmp_path / "kattis.parquet")
    (item,) = read_parquet(tmp_path / "kattis.parquet")
    assert len(item.problem.tests.cases) == 2
    programs = (item.references[0].code, "def f(x): return 2")
    assert verdicts(tmp_path, "BigCodeBench/0", *programs) == ["accepted", "wrong_answer"]


def test_what_the_tests_import_is_required_of_the_machine(tmp_path: Path) -> None:
    """A library that a test or a set-up imports, and the row does not list, was the program's fault."""
    test = "import pandas as pd\n" + UNIT + "    def test_b(self):\n        from bs4.element import Tag\n"
    bigcode = {"task_id": "B/0", "complete_prompt": "Do it.", "test": test, "libs": "['random', 'numpy']"}
    mbpp = {"task_id": 7, "text": "Do it.", "test_list": ["assert f(1) == 2"], "test_imports": ["import scipy, re"]}
    for name, row, libraries in (("bigcodebench", bigcode, ("numpy", "pandas", "bs4")), ("mbpp", mbpp, ("scipy",))):
        out = tmp_path / f"{name}.parquet"
        import_files(name, [jsonl(tmp_path / f"{name}.jsonl", row)], out)
        (item,) = read_parquet(out)
        assert item.problem.libraries == libraries


def test_a_test_that_asserts_nothing_is_rejected(tmp_path: Path) -> None:
    """Every program would be right."""
    row = {"prompt": "def f(x):\n", "entry_point": "f", "canonical_solution": "    return x"}
    tests = ("def check(candidate):\n    pass\n", "def check(candidate):\n    assert abs(candidate(1) - 1) < 1\n")
    rows = [row | {"task_id": f"H/{number}", "test": test} for number, test in enumerate(tests)]
    summary = import_files("humaneval", [jsonl(tmp_path / "rows.jsonl", *rows)], tmp_path / "out.parquet")
    assert (summary.problems, summary.rejected) == (1, {"no_tests": 1})


def test_a_row_that_no_machine_can_grade_is_rejected_by_its_field(tmp_path: Path) -> None:
    call = {"type": "call", "entry_point": "double it", "cases": [{"args": [2], "expected": 4}]}
    stdin = {"type": "stdin", "cases": [{"input": "1", "output": "1"}]}
    rows = [
        {"problem_id": "bad", "prompt": "Double.", "tests": call},
        {"problem_id": "ok", "prompt": "P", "tests": stdin},
    ]
    summary = import_files("generic", [jsonl(tmp_path / "rows.jsonl", *rows)], tmp_path / "out.parquet")
    assert (summary.problems, summary.rejected) == (1, {"ungradable": 1})
    assert "tests.entry_point: must be the name" in (tmp_path / "out.parquet.rejected.jsonl").read_text()


def test_a_leetcode_task_about_a_linked_list_keeps_its_program(tmp_path: Path) -> None:
    """Tests that are no literals were 6.4 % of LeetCodeDataset, and were rejected."""
    helpers = (
        "from math import inf\nclass ListNode:\n    def __init__(self, val=0, next=None):\n"
        "        self.val, self.next = val, next\ndef same(p, q): return p.val == q.val\n"
    )
    row = {
        "task_id": "same-node",
        "query": "A form with the question.",
        "problem_description": "Return the node.",
        "starter_code": "class Solution:\n    def node(self, head):",
        "prompt": helpers,
        "entry_point": "Solution().node",
        "test": "def check(candidate):\n    assert same(candidate(head = ListNode(3)), ListNode(3))\n",
    }
    import_files("leetcode", [jsonl(tmp_path / "data.jsonl", row)], tmp_path / "kattis.parquet")
    (item,) = read_parquet(tmp_path / "kattis.parquet")
    assert (item.problem.prompt, item.problem.starter_code) == ("Return the node.", row["starter_code"])
    right = "class Solution:\n    def node(self, head: ListNode): return head\n"
    wrong = "class Solution:\n    def node(self, head): return ListNode(4)\n"
    assert verdicts(tmp_path, "same-node", right, wrong) == ["accepted", "wrong_answer"]


def test_leetcode_s_version_with_the_question_in_a_form_alone_is_asked_once(tmp_path: Path) -> None:
    """0.3.0 has neither problem_description nor starter_code."""
    code = "class Solution:\n    def f(self, a: int) -> int:"
    form = prompt_text(PromptForm.LIVECODEBENCH, "Add one.\n\nConstraints:\n\n1 <= a <= 9\n", code)
    row = {
        "task_id": "add-one",
        "query": f"{system_text(PromptForm.LIVECODEBENCH)}\n\n{form.rstrip()}\n",
        "entry_point": "Solution().f",
        "test": "def check(candidate):\n    assert candidate(a = 1) == 2\n",
    }
    import_files("leetcode", [jsonl(tmp_path / "data.jsonl", row)], tmp_path / "out.parquet")
    (item,) = read_parquet(tmp_path / "out.parquet")
    assert item.problem.prompt.rstrip() == "Add one.\n\nConstraints:\n\n1 <= a <= 9"
    assert item.problem.starter_code == code


@pytest.mark.parametrize("task_id", [2, "Mbpp/2"])
def test_a_task_of_mbpp_has_one_name(tmp_path: Path, task_id: int | str) -> None:
    row = {"task_id": task_id, "prompt": "?", "test_list": ["assert f(1) == 2"]}
    import_files("mbpp", [jsonl(tmp_path / "data.jsonl", row)], tmp_path / "out.parquet")
    (item,) = read_parquet(tmp_path / "out.parquet")
    assert item.problem.problem_id == "Mbpp/2"


def test_a_rejected_package_is_named_and_a_time_limit_beyond_the_services_is_rejected(tmp_path: Path) -> None:
    package(tmp_path / "all" / "right")
    package(tmp_path / "all" / "slow", yaml="limits: {time_limit: 149.5}")
    package(tmp_path / "all" / "slower", yaml="limits: {time_limit: 150}")
    (package(tmp_path / "all" / "broken") / "data/secret/group/2.ans").unlink()
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "all")
    for place, shown in ((tmp_path / "all", tmp_path / "all"), (Path(archive), Path(archive))):
        out = tmp_path / f"{shown.name}.parquet"
        assert import_files("kattis", [place], out).problems == 2
        rows = [json.loads(line) for line in (tmp_path / f"{out.name}.rejected.jsonl").read_text().splitlines()]
        assert {row["file"]: row["detail"] for row in rows} == {
            str(shown / "broken"): "data/secret/group/2.in has no .ans file",
            str(shown / "slower"): "limits.wall_time_s: must be at most 300.0",
        }


def test_a_package_in_the_working_directory_has_the_name_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(package(tmp_path / "sums"))
    assert imported(tmp_path, Path()).problem.problem_id == "sums"


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_an_import_writes_json_lines_with_the_same_problems(tmp_path: Path, ending: str) -> None:
    package(tmp_path / "all" / "a")
    package(tmp_path / "all" / "b", answer="4")
    out, whole = tmp_path / f"x.{ending}", tmp_path / "x.parquet"
    summary = import_files("kattis", [tmp_path / "all"], out)
    assert (summary.problems, summary.out) == (2, str(out))
    import_files("kattis", [tmp_path / "all"], whole)
    assert list(read_problem_file(out)) == list(read_parquet(whole))
    assert {path.name for path in tmp_path.iterdir()} == {"all", out.name, whole.name, f"{whole.name}.index"}
    with pytest.raises(CannotImport, match="exists already"):
        import_files("kattis", [tmp_path / "all"], out)
