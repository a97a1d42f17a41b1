"""Sets in the layouts of trainers: NousCoder's own, DeepCoder's parts, verl's parquet, and rows of any columns."""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.services.test_data_import import CALL_ROWS, CALLS, SUM, SUM_ROWS, WRAPPED, jsonl, parquet
from tests.services.test_import_options import imported

from nouscoder.data import bounded_files
from nouscoder.data.importers import rows
from nouscoder.data.importers.options import ImportOptions
from nouscoder.data.importers.run import import_files, rejections_of
from nouscoder.data.problem_parquet import load_problems, read_parquet
from nouscoder.data.problems import ProblemFileError
from nouscoder.domain.prompt import PromptForm, prompt_text
from nouscoder.domain.submission import (
    AssertTests,
    CallCase,
    CallTests,
    Comparator,
    ComparatorKind,
    Limits,
    MathCase,
    MathTests,
    Prelude,
    Tests,
)

RUN = {"input": ["1 2\n", "5 5\n"], "output": ["3\n", "10\n"]}
LINES = {"input": ['[1, 2]\n"x"', '[]\n"y"'], "output": ["3", "null"], "fn_name": "f"}
LISTS = {"input": [[[1, 2], "x"], [[], "y"]], "output": [[3], [None]], "fn_name": "f"}
NAMED = [{"fn_name": "f", "input": i, "output": o} for i, o in zip(LISTS["input"], LISTS["output"], strict=True)]


GIVEN: list[tuple[dict[str, Any], Tests]] = [
    ({"tests": json.dumps(RUN), "problem_type": "stdin_stdout", "starter_code": ""}, SUM),
    ({"tests": RUN | {"fn_name": "none"}, "problem_type": "stdin"}, SUM),
    ({"tests": {"inputs": RUN["input"], "outputs": RUN["output"]}, "fn_name": None}, SUM),
    ({"tests": SUM_ROWS, "problem_type": "stdin_stdout"}, SUM),
    ({"tests": LINES, "problem_type": "func", "starter_code": "def f(a, b):"}, CALLS),
    ({"tests": json.dumps(LISTS), "problem_type": "func", "starter_code": "def f(a, b):"}, CALLS),
    ({"tests": {name: LINES[name] for name in ("input", "output")}, "fn_name": "f", "problem_type": "func"}, CALLS),
    ({"tests": CALL_ROWS, "fn_name": "f", "problem_type": "func"}, CALLS),
]


@pytest.mark.parametrize(("row", "tests"), GIVEN)
def test_a_row_of_the_authors_set_is_graded_as_their_grader_does(
    tmp_path: Path, row: dict[str, Any], tests: Tests
) -> None:
    (item,) = imported(tmp_path, "nouscoder", [{"problem": "Do it.", "difficulty": "hard", **row}])
    problem = item.problem
    assert (problem.problem_id, problem.prompt, problem.tests) == ("nouscoder-1", "Do it.", tests)
    assert problem.starter_code == (row.get("starter_code") or "")
    assert (problem.limits, problem.prelude, problem.difficulty) == (Limits(), Prelude.LCB, "hard")
    close = Comparator(ComparatorKind.LCB, absolute_tolerance=1e-4)
    assert problem.comparator == (close if tests is SUM else Comparator())  # results of functions are compared exactly


def test_official_figures_need_the_exact_rule_which_the_option_gives(tmp_path: Path) -> None:
    row = {"problem": "Do it.", "tests": RUN, "problem_type": "stdin_stdout"}
    (item,) = imported(tmp_path, "nouscoder", [row], "--float-tolerance", "0")
    assert item.problem.comparator == Comparator(ComparatorKind.LCB)


def test_the_parts_of_deepcoder_have_each_its_form_of_tests(tmp_path: Path) -> None:
    typed = [{"type": "stdin_stdout", "fn_name": None, **case} for case in SUM_ROWS]
    called = [{"type": "function_call", "fn_name": "f", "input": args, "output": out} for args, out in CALLED]
    rows = [
        {"problem": "primeintellect", "tests": json.dumps(typed)},
        {"problem": "primeintellect", "tests": json.dumps(called)},
        {"problem": "taco", "tests": json.dumps({"inputs": RUN["input"], "outputs": RUN["output"]})},
        {"problem": "lcbv5", "tests": json.dumps([case | {"metadata": {"func_name": "f"}} for case in CALL_ROWS])},
        {"problem": "codeforces", "tests": json.dumps(SUM_ROWS)},
    ]
    items = imported(tmp_path, "deepcoder", rows)
    assert [one.problem.tests for one in items] == [SUM, replace(CALLS, wrapped=True), SUM, CALLS, SUM]
    assert [one.problem.limits.wall_time_s for one in items] == [12.0, 12.0, 12.0, 6.0, 12.0]


CALLED = [([[1, 2], "x"], 3), ([[], "y"], None)]


def verl(content: str, truth: object, **more: object) -> dict[str, Any]:
    """A row of verl's parquet."""
    return {
        "data_source": "code",
        "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": content}],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": truth if isinstance(truth, str) else json.dumps(truth)},
        **more,
    }


def test_klear_s_prompts_are_parted_from_the_form_that_they_were_published_in(tmp_path: Path) -> None:
    rows = [
        verl(prompt_text(PromptForm.DEEPCODER, "Do it.", code), tests)
        for code, tests in (("", SUM_ROWS), ("def f(a, b):", {**LINES, "inputs": LINES["input"]}), ("", SUM_ROWS))
    ]
    rows[1]["reward_model"]["ground_truth"] = json.dumps(
        {"inputs": LISTS["input"], "outputs": LISTS["output"], "fn_name": "f"}
    )
    rows[2]["prompt"][1]["content"] = "### Format: another\n"
    items = imported(tmp_path, "klear", rows)
    assert [one.problem.prompt for one in items] == [
        f"Think.\n\n{question}" for question in ("Do it.", "Do it.", "### Format: another\n")
    ]
    assert [one.problem.starter_code for one in items] == ["", "def f(a, b):", ""]
    assert [one.problem.tests for one in items] == [SUM, WRAPPED, SUM]


CHECK = "def check(candidate):\n    assert candidate(a = 1) == 2\n    assert candidate(a = 2) == 3\n"
FILE = "import pytest\nfrom solution import f\n\ndef test_one():\n    assert f(1) == 2\n"
CALLS_OF_F = CallTests("f", (CallCase((), {"a": 1}, 2), CallCase((), {"a": 2}, 3)))


@pytest.mark.parametrize("name", ["klear", "generic"])
def test_tests_that_run_behind_a_program_or_with_pytest_are_calls_or_asserts(tmp_path: Path, name: str) -> None:
    truths: list[tuple[object, Tests]] = [
        ({"functional": f"{CHECK}\n\ncheck(Solution().f)"}, CALLS_OF_F),
        ({"functional": f"{CHECK}\ncheck(f)\n"}, CALLS_OF_F),
        ({"functional": f"{LINKED}\n\ncheck(Solution().f)"}, AssertTests((f"{LINKED}\n\ncheck(Solution().f)",))),
        ({"functional": "assert f(1) == 2\nassert f(2) > 2"}, AssertTests(("assert f(1) == 2\nassert f(2) > 2",))),
        (f"import math\n{CHECK}\ncheck(f)", AssertTests((f"import math\n{CHECK}\ncheck(f)",))),
        ({"pytest": FILE}, AssertTests(("test_one",), FILE, "solution")),
        (FILE, AssertTests(("test_one",), FILE, "solution")),
        (json.dumps(FILE), AssertTests(("test_one",), FILE, "solution")),
        ("1 import and 2 from x", MathTests((MathCase("1 import and 2 from x"),))),
    ]
    items = imported(tmp_path, name, [verl("Write f.", truth) for truth, _ in truths])
    assert [item.problem.tests for item in items] == [tests for _, tests in truths]


def test_what_tests_nothing_is_rejected_by_name_with_a_count(tmp_path: Path) -> None:
    guarded = f"{CHECK}\nif __name__ == '__main__':\n    check(f)\n"
    bad = [CHECK, guarded, "", "check("]
    truths = [*({"functional": code} for code in bad), {"pytest": "def test_a():\n    pass\n"}, {"pytest": FILE}]
    jsonl(tmp_path / "rows.jsonl", *(verl("Write f.", truth) for truth in truths))
    summary = import_files("klear", [tmp_path / "rows.jsonl"], tmp_path / "p.parquet")
    assert summary.problems == 1
    assert summary.rejected == {"no_tests": 3, "unreadable_tests": 2}


LINKED = "def check(candidate):\n    assert is_same_list(candidate(list_node([1])), list_node([1]))"


def test_skywork_s_rows_have_pass_rates_of_three_models(tmp_path: Path) -> None:
    check = "def check(candidate):\n    assert candidate(a = 1) == 2\n    assert candidate(a = 2) == 3\n"
    leetcode = {"import_prefix": "import math\n", "test_code": check, "entry_point": "Solution().f"}
    difficulty = {"DeepSeek-R1-Distill-Qwen-7B": 5, "DeepSeek-R1-Distill-Qwen-32B": 0, "other": None}
    rows = [
        verl("Write f.", leetcode, extra_info={"index": 3, "model_difficulty": difficulty}),
        verl("Sum.", {"inputs": RUN["input"], "outputs": RUN["output"]}, extra_info={"index": 4}),
        verl("Write g.", {"assert_case": ["assert g(1) == 2"]}, extra_info={"index": 5}),
        verl("1/2?", "0.5", ability="math", extra_info={"index": 6}),
        verl("Write h.", leetcode | {"test_code": LINKED}, extra_info={"index": 7}),
    ]
    items = imported(tmp_path, "skywork", rows)
    assert items.pop().problem.tests == AssertTests((f"{LINKED}\n\ncheck(Solution().f)",), "import math\n")
    called = CallTests("f", (CallCase((), {"a": 1}, 2), CallCase((), {"a": 2}, 3)), "import math\n")
    asserted = AssertTests(("assert g(1) == 2",))
    assert [one.problem.tests for one in items] == [called, SUM, asserted, MathTests((MathCase("0.5"),))]
    rates = {name: text for name, text in items[0].metadata.items() if name.startswith("pass_rate")}
    assert rates == {
        "pass_rate.DeepSeek-R1-Distill-Qwen-7B": "11/16",
        "pass_rate.DeepSeek-R1-Distill-Qwen-32B": "16/16",
    }


GENERIC: list[tuple[dict[str, Any], Tests]] = [
    ({"prompt": "Do it.", "tests": {"inputs": RUN["input"], "outputs": RUN["output"]}}, SUM),
    ({"question": "Do it.", "input_output": json.dumps({"inputs": RUN["input"], "outputs": RUN["output"]})}, SUM),
    ({"problem": "Do it.", "test_cases": SUM_ROWS}, SUM),
    ({"prompt": "Do it.", "tests": [[case["input"], case["output"]] for case in SUM_ROWS]}, SUM),
    ({"prompt": "Do it.", "inputs": RUN["input"], "outputs": json.dumps(RUN["output"])}, SUM),
    ({"prompt": "Do it.", "tests": SUM_ROWS[:0] + [{"type": "stdin", **case} for case in SUM_ROWS]}, SUM),
    ({"prompt": "Do it.", "tests": {"type": "stdin", "cases": SUM_ROWS}}, SUM),
    ({"prompt": "Do it.", "tests": json.dumps(LISTS), "fn_name": "f"}, WRAPPED),
    ({"prompt": "Do it.", "tests": json.dumps(LISTS | {"fn_name": None}), "entry_point": "f"}, WRAPPED),
    ({"prompt": "Do it.", "tests": json.dumps(NAMED)}, WRAPPED),
    ({"prompt": "Do it.", "tests": ["assert f(1) == 2"]}, AssertTests(("assert f(1) == 2",))),
    ({"prompt": "Do it.", "answer": "42"}, MathTests((MathCase("42"),))),
    ({**verl("Do it.", SUM_ROWS)}, SUM),
    ({**verl("Do it.", "\\frac{1}{2}")}, MathTests((MathCase("\\frac{1}{2}"),))),
]


@pytest.mark.parametrize(("row", "tests"), GENERIC)
def test_generic_finds_a_question_and_tests_in_every_public_form(
    tmp_path: Path, row: dict[str, Any], tests: Tests
) -> None:
    items = [*imported(tmp_path, "generic", [row])]
    if "type" not in str(row.get("tests")):  # a column of parquet has one type
        import_files("generic", [parquet(tmp_path / "rows.parquet", row)], tmp_path / "other.parquet")
        items += read_parquet(tmp_path / "other.parquet")
    assert {one.problem.prompt for one in items} == {"Think.\n\nDo it." if "reward_model" in row else "Do it."}
    assert [one.problem.tests for one in items] == [tests] * len(items)


@pytest.mark.parametrize("ending", [".csv", ".csv.gz"])
def test_generic_reads_csv_with_columns_of_any_name(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"rows{ending}"
    opened: Any = gzip.open if ending.endswith(".gz") else open
    with opened(file, "wt", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["name", "text", "cases", "head", "lang"])
        writer.writerow(["a", "Do it,\nplease.", json.dumps(SUM_ROWS), "import sys", "python, cpp"])
        writer.writerow(["b", "And it.", "no tests", "", ""])
    columns = {"problem_id": "name", "prompt": "text", "tests": "cases", "starter_code": "head", "languages": "lang"}
    summary = import_files("generic", [file], tmp_path / "out.parquet", options=ImportOptions(columns=columns))
    (item,) = read_parquet(tmp_path / "out.parquet")
    assert (item.problem.problem_id, item.problem.prompt) == ("a", "Do it,\nplease.")
    assert (item.problem.tests, item.problem.starter_code) == (SUM, "import sys")
    assert item.problem.languages == ("python", "cpp")
    assert [(one["row"], one["reason"]) for one in rejections_of(Path(summary.rejections))] == [(2, "unreadable_tests")]


def test_rows_that_say_too_little_are_rejected_with_their_reason(tmp_path: Path) -> None:
    rows = [
        {"prompt": "Do it.", "tests": SUM_ROWS},
        {"tests": SUM_ROWS},
        {"prompt": "Do it."},
        {"prompt": "Do it.", "tests": []},
        {"prompt": "Do it.", "tests": {"inputs": ["1"], "outputs": []}},
        {"prompt": "Do it.", "tests": {"type": "stdin", "cases": [{"input": 1}]}},
        {"prompt": [{"role": "system", "content": "Do it."}], "tests": SUM_ROWS},
        {"prompt": "Do it.", "tests": [NAMED[0], NAMED[1] | {"fn_name": "g"}]},
    ]
    summary = import_files("generic", [jsonl(tmp_path / "rows.jsonl", *rows)], tmp_path / "out.parquet")
    reasons = [one["reason"] for one in rejections_of(Path(summary.rejections))]
    assert reasons == [
        "missing_field",
        "no_tests",
        "no_tests",
        "unreadable_tests",
        "unreadable_tests",
        "missing_field",
        "unreadable_tests",
    ]


SENT: list[tuple[dict[str, Any], Tests]] = [
    ({"inputs": RUN["input"], "outputs": RUN["output"]}, SUM),
    ({"input": RUN["input"], "output": RUN["output"], "fn_name": None}, SUM),
    ({"inputs": LISTS["input"], "outputs": LISTS["output"], "fn_name": "f"}, WRAPPED),
]


def test_a_problem_file_takes_the_names_and_tests_that_the_rest_api_takes(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"task_id": f"t{n}", "prompt": "Do it.", "tests": tests, "public_tests": tests}
        for n, (tests, _) in enumerate(SENT)
    ]
    rows.append({"problem_id": "p", "task_id": "other", "prompt": "Do it.", "tests": json.dumps(SUM_ROWS)})
    rows.append({"task_id": 7, "prompt": "Do it.", "tests": SUM_ROWS})
    file = jsonl(tmp_path / "problems.jsonl", *rows)
    problems = load_problems(file)
    assert [one.problem_id for one in problems] == ["t0", "t1", "t2", "p", "7"]
    wanted = [tests for _, tests in SENT]
    assert [one.tests for one in problems] == [*wanted, SUM, SUM]
    assert [one.public_tests for one in problems] == [*wanted, None, None]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            {"task_id": "a", "prompt": "x", "tests": {"inputs": ["1"], "outputs": []}},
            "tests.inputs: there are 1 inputs",
        ),
        ({"task_id": "a", "prompt": "x", "tests": [{"input": "1"}]}, "tests: a list must hold"),
        ({"task_id": "a", "prompt": "x", "test": {}}, "tests is missing"),
        ({"prompt": "x", "tests": {"inputs": ["1"], "outputs": ["1"]}}, "problem_id is missing"),
        (
            {"problem_id": "a", "prompt": "x", "tests": {"type": "stdin", "cases": [{"input": 1}]}},
            "tests.cases[0].input",
        ),
    ],
)
def test_what_is_wrong_in_a_line_is_still_named(tmp_path: Path, row: dict[str, Any], told: str) -> None:
    with pytest.raises(ProblemFileError) as caught:
        load_problems(jsonl(tmp_path / "problems.jsonl", {"prompt": "x"} | row))
    assert told in str(caught.value)
    assert "line 1" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"prompt,tests\n\xff,1\n", b'prompt,tests\n"' + b"x" * 2000, b"prompt,tests\nx," + b"y" * 2000 + b"\n"],
)
def test_csv_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(bounded_files, "MAX_LINE_BYTES", 1000)
    file = tmp_path / "rows.csv"
    file.write_bytes(content)
    with pytest.raises(ProblemFileError, match=r"rows\.csv cannot be read: "):
        import_files("generic", [file], tmp_path / "out.parquet")
    csv.field_size_limit(131072)
