"""The options of an import: each changes every format in the same way, and what it cannot be is one sentence."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.services.test_data_import import CALL_ROWS, SUM_ROWS, jsonl, lcb
from typer.testing import CliRunner

from nouscoder.cli.app import app
from nouscoder.data.importers.options import ImportOptions
from nouscoder.data.importers.run import CannotImport, import_files
from nouscoder.data.problem_parquet import read_parquet
from nouscoder.data.problems import ReferencedProblem
from nouscoder.domain.prompt import PromptForm, PromptSettings, PromptText, prompt_text
from nouscoder.domain.submission import CallTests, Comparator, ComparatorKind, Limits, Profile, StdinTests
from nouscoder.errors import Unusable

CALLED = {
    "question": "Call it.",
    "starter_code": "def f(a, b):",
    "input_output": json.dumps({"fn_name": "f", "inputs": [[1], [222], [33]], "outputs": [1, 2, 3]}),
}
RUN = {
    "question": "Run it.",
    "starter_code": "",
    "input_output": json.dumps({"inputs": ["1\n", "22\n", "4444\n", "333\n"], "outputs": ["a", "b", "d", "c"]}),
}


def imported(folder: Path, name: str, rows: list[Any], *options: str) -> list[ReferencedProblem]:
    """The problems that the command makes of some rows."""
    out = folder / f"{len(list(folder.iterdir()))}.parquet"
    file = jsonl(folder / f"{out.stem}.jsonl", *rows)
    done = CliRunner().invoke(app, ["data", "import", name, str(file), "--out", str(out), *options])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return list(read_parquet(out))


def gym_row() -> dict[str, Any]:
    """A row of NeMo Gym's layout."""
    asked = {"input": [{"role": "user", "content": "Add two numbers."}]}
    tests = {"inputs": ["1 2\n"], "outputs": ["3\n"], "fn_name": None}
    return {"responses_create_params": asked, "verifier_metadata": {"unit_tests": tests}, "hash_id": "one"}


@pytest.mark.parametrize(
    ("name", "row", "profile", "seconds"),
    [
        ("livecodebench", lcb("stdin", SUM_ROWS, "[]"), Profile.LCB, 6),  # lcb_runner: --timeout 6
        ("nemotron", gym_row(), Profile.CODE_GEN, 10),  # code_gen.yaml: unit_test_timeout_secs 10
    ],
)
def test_a_published_grader_gives_its_profile_and_limits(
    tmp_path: Path, name: str, row: dict[str, Any], profile: Profile, seconds: int
) -> None:
    (item,) = imported(tmp_path, name, [row])
    assert (item.problem.profile, item.problem.limits) == (profile, Limits(seconds, seconds, 4 * 1024**3))
    for options in (["--comparator", "tokens"], ["--float-tolerance", "0.1"], ["--languages", "python,cpp"]):
        (own,) = imported(tmp_path, name, [row], *options)
        assert own.problem.profile is Profile.PROCESS, "that grader knows no other comparison and no other language"


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("taco", CALLED),
        ("apps", CALLED),
        ("deepcoder", {"problem": "Call it.", "starter_code": "def f(a, b):", "tests": CALLED["input_output"]}),
        ("livecodebench", lcb("functional", CALL_ROWS, "[]", question_content="Call it.", starter_code="def f(a, b):")),
    ],
)
def test_the_question_and_the_starter_code_are_kept_apart(tmp_path: Path, name: str, row: dict[str, Any]) -> None:
    (item,) = imported(tmp_path, name, [row])
    assert (item.problem.prompt, item.problem.starter_code) == ("Call it.", "def f(a, b):")
    assert item.problem.prompt_template == ""


def test_lcb_is_the_prompt_in_its_two_wordings(tmp_path: Path) -> None:
    items = imported(tmp_path, "taco", [CALLED, RUN], "--prompt", "lcb")
    told = [PromptSettings().text(PromptText.of(one.problem)) for one in items]
    forms = [("Call it.", "def f(a, b):"), ("Run it.", "")]
    assert told == [prompt_text(PromptForm.LIVECODEBENCH, question, code) for question, code in forms]
    assert [text.count("def f(a, b):") for text in told] == [1, 0]


def test_plain_is_no_template_and_a_file_is_its_own(tmp_path: Path) -> None:
    math = {"question": "1 + 1?", "answer": "2"}
    assert imported(tmp_path, "math", [math])[0].problem.prompt_template
    assert imported(tmp_path, "math", [math], "--prompt", "plain")[0].problem.prompt_template == ""
    template = tmp_path / "mine.txt"
    template.write_text("Solve:\n{prompt}\nBegin with {starter_code}\n")
    (called,) = imported(tmp_path, "taco", [CALLED], "--prompt", str(template))
    assert called.problem.starter_code == ""
    assert called.problem.prompt_template == "Solve:\n{prompt}\nBegin with def f(a, b):\n"


def test_limits_and_comparator_are_those_that_were_asked_for(tmp_path: Path) -> None:
    asked = ("--time-limit", "6", "--memory-limit", "2GiB", "--float-tolerance", "1e-4", "--comparator", "kattis")
    (item,) = imported(tmp_path, "taco", [RUN], *asked)
    assert item.problem.limits == Limits(wall_time_s=6.0, cpu_time_s=6.0, memory_bytes=2 * 1024**3)
    assert item.problem.comparator == Comparator(ComparatorKind.KATTIS, absolute_tolerance=1e-4)
    (plain,) = imported(tmp_path, "taco", [RUN])
    assert (plain.problem.limits, plain.problem.comparator) == (Limits(), Comparator())


def test_the_tests_with_the_longest_inputs_are_kept(tmp_path: Path) -> None:
    called, run = imported(tmp_path, "taco", [CALLED, RUN], "--max-tests", "2")
    assert isinstance(called.problem.tests, CallTests)
    assert [case.args for case in called.problem.tests.cases] == [(222,), (33,)]
    assert isinstance(run.problem.tests, StdinTests)
    assert [case.output for case in run.problem.tests.cases] == ["d", "c"]


def test_dates_choose_problems_and_each_other_row_has_its_reason(tmp_path: Path) -> None:
    days = ("2024-07-31T23:00:00", "2024-08-01T00:00:00", "2025-04-30T12:00:00", "2025-05-01T00:00:00", "")
    rows = [lcb("stdin", SUM_ROWS, "[]", question_id=f"q{n}", contest_date=day) for n, day in enumerate(days)]
    kept = imported(tmp_path, "livecodebench", rows, "--after", "2024-08-01", "--before", "2025-05-01")
    assert [one.problem.problem_id for one in kept] == ["q1", "q2"]
    rejected = next(tmp_path.glob("*.rejected.jsonl")).read_text().splitlines()
    reasons = [json.loads(line)["reason"] for line in rejected]
    assert reasons == ["outside_dates", "outside_dates", "no_date"]


def test_languages_are_those_of_problems_that_any_language_can_solve(tmp_path: Path) -> None:
    called, run = imported(tmp_path, "taco", [CALLED, RUN], "--languages", "python3, c++")
    assert called.problem.languages == ("python",)
    assert run.problem.languages == ("python", "cpp")
    (asked,) = imported(tmp_path, "taco", [RUN], "--languages", "c++,cpp", "--prompt", "lcb")
    assert "```cpp\n// YOUR CODE HERE" in asked.problem.prompt_template
    assert asked.problem.languages == ("cpp",)


def test_a_column_of_another_name_or_inside_another_is_found(tmp_path: Path) -> None:
    row = {"ask": "Run it.", "extra": {"tests": [RUN["input_output"]]}}
    (item,) = imported(tmp_path, "taco", [row], "--column", "question=ask", "--column", "input_output=extra.tests.0")
    assert (item.problem.prompt, len(item.problem.tests.cases)) == ("Run it.", 4)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--float-tolerance", "-1"], "--float-tolerance: must be greater than or equal to 0"),
        (["--time-limit", "0"], "--time-limit: "),
        (["--memory-limit", "4gb"], "--memory-limit '4gb' is no size such as 4GiB"),
        (["--max-tests", "0"], "--max-tests: "),
        (["--after", "yesterday"], "--after: 'yesterday' is not a date such as 2024-08-01"),
        (["--languages", "phyton"], "--languages: 'phyton' is no language here: did you mean python?"),
        (["--comparator", "fuzzy"], "--comparator: "),
        (["--prompt", "absent.txt"], "--prompt absent.txt is none of lcb, plain, livecodebench"),
        (["--column", "question"], "--column must be FIELD=COLUMN"),
    ],
)
def test_a_value_that_an_option_cannot_have_is_one_sentence(tmp_path: Path, options: list[str], told: str) -> None:
    file = jsonl(tmp_path / "data.jsonl", RUN)
    arguments = ["data", "import", "taco", str(file), "--out", str(tmp_path / "out.parquet"), *options]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code != 0
    assert told in str(done.exception) + done.output
    assert not (tmp_path / "out.parquet").exists()


def test_an_import_with_other_options_does_not_go_on_where_one_was(tmp_path: Path) -> None:
    from nouscoder.data.importers.options import ImportOptions

    file, out = jsonl(tmp_path / "data.jsonl", RUN), tmp_path / "out.parquet"
    part = tmp_path / "out.parquet.part"
    part.mkdir()
    stat = file.stat()
    identity = [str(file.resolve()), stat.st_size, stat.st_mtime_ns]
    request = {"format": "taco", "files": [identity], "tests": "", "options": {"max_tests": 2}}
    (part / "state.json").write_text(json.dumps({"request": request}))
    with pytest.raises(CannotImport, match="other files or with other options"):
        import_files("taco", [file], out)
    assert import_files("taco", [file], out, options=ImportOptions(max_tests=2)).tests == 2


STDIN = {"inputs": ["1\n"], "outputs": ["2\n"]}


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        (("prompt=q", "tests=casess"), r"no row has the column casess \(--column tests=casess\)"),
        (("propmt=q",), r"the format reads no field propmt: did you mean prompt\?; it looked for .*question"),
        (("prompt=q", "prompt=q2"), "names a field twice"),
    ],
)
def test_a_column_that_is_not_there_or_not_read_is_refused(
    tmp_path: Path, columns: tuple[str, ...], fault: str
) -> None:
    """The rows were imported all the same, as mathematics with another column."""
    row = {"q": "Add one.", "cases": STDIN, "answer": "2", "question": "Another text."}
    options = [word for column in columns for word in ("--column", column)]
    with pytest.raises(Unusable, match=fault):
        imported(tmp_path, "generic", [row], *options)
    assert not list(tmp_path.glob("*.part")), "the next import begins anew"


def test_rows_that_name_their_language_keep_it(tmp_path: Path) -> None:
    rows = [{"question": "Add.", **STDIN, **named} for named in ({}, {"language": "Python3"}, {"languages": ["rust"]})]
    items = imported(tmp_path, "generic", rows, "--languages", "cpp")
    assert [item.problem.languages for item in items] == [("cpp",), ("python",), ("rust",)]


def test_a_form_is_not_taken_where_it_would_ask_for_another_thing(tmp_path: Path) -> None:
    """Mathematics, and functions without starter code, were asked to read stdin."""
    rows = [
        {"question": "What is 6*7?", "answer": "42"},
        {"question": "Write cat.", "tests": {"fn_name": "cat", "inputs": [["a"]], "outputs": ["a"]}},
        {"question": "Add.", **STDIN},
    ]
    told = [PromptSettings().text(PromptText.of(item.problem)) for item in imported(tmp_path, "generic", rows)]
    in_form = imported(tmp_path, "generic", rows, "--prompt", "lcb")
    asked = [PromptSettings().text(PromptText.of(item.problem)) for item in in_form]
    assert asked[:2] == told[:2]
    assert "boxed" in asked[0]
    assert asked[2].startswith("### Question:\nAdd.")


def test_dates_have_types_and_time_zones(tmp_path: Path) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    rows = [
        {"question": "Add.", "inputs": ["1"], "outputs": ["1"], "id": name, "date": date(2025, 1, day)}
        for name, day in (("a", 1), ("b", 2))
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    summary = import_files(
        "generic", [tmp_path / "rows.parquet"], tmp_path / "out.parquet", options=ImportOptions(after="2025-01-02")
    )
    assert (summary.problems, summary.rejected) == (1, {"outside_dates": 1})
    row = lcb("stdin", SUM_ROWS, "[]", contest_date=datetime(2024, 8, 3, tzinfo=UTC))
    parquet.write_table(arrow.Table.from_pylist([row]), tmp_path / "lcb.parquet")
    import_files(
        "livecodebench", [tmp_path / "lcb.parquet"], tmp_path / "l.parquet", options=ImportOptions(after="2024-08-01")
    )
    assert next(read_parquet(tmp_path / "l.parquet")).metadata["contest_date"].startswith("2024-08-03T00:00:00")
    late = [{"question": "Add.", **STDIN, "contest_date": "2024-08-01T23:30:00-05:00"}]
    assert len(imported(tmp_path, "generic", late, "--after", "2024-08-02")) == 1, "it is the second in UTC"


def test_the_mark_of_utf8_is_no_part_of_the_first_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,question,answer\nfirst,What?,42\n", encoding="utf-8-sig")
    (tmp_path / "a.jsonl").write_text('{"id": "first", "question": "What?", "answer": "42"}\n', encoding="utf-8-sig")
    for name in ("a.csv", "a.jsonl"):
        out = tmp_path / f"{name}.parquet"
        import_files("generic", [tmp_path / name], out)
        assert [item.problem.problem_id for item in read_parquet(out)] == ["first"]


def test_a_limit_of_memory_in_which_nothing_starts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="--memory-limit: "):
        imported(tmp_path, "generic", [{"question": "Add.", **STDIN}], "--memory-limit", "1")
