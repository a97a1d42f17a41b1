"""Problems that models write: what is read from their answers, which tests are kept, and what a second run asks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.openai_mock import MockServer, completion, serving
from typer.testing import CliRunner

from nouscoder.cli.app import app
from nouscoder.data.asking import NotAnswered
from nouscoder.data.kept_tests import kept_tests
from nouscoder.data.problem_parquet import read_parquet
from nouscoder.data.problems import Reference
from nouscoder.data.synthesis import CannotSynthesize
from nouscoder.data.written_problem import NoProblem, SeedRejection, WrittenProblem, written_problem
from nouscoder.domain.submission import CallCase, CallTests

RIGHT = "def add(a, b=0):\n    return a + b\n"
WRONG = "def add(a, b=0):\n    return a - b\n"
ASSERTS = """assert add(1, 2) == 3
assert add(0, 0) == 0
assert add(-4, 4) == 0
assert add(5) == 5
assert add(2, b=2) == 4
assert add(10, 20) == 30
assert add(1, 2) == 3
assert add(1, 1) == 3
assert isinstance(add(1, 2), int)
assert add(1, x) == 3"""

pytestmark = pytest.mark.timeout(600)  # on a busy machine


def written(asserts: str, question: str = "Write `add`, which adds b (by default 0) to a.") -> str:
    return f"I think.\n<question>\n{question}\n</question>\n<tests>\n{asserts}\n</tests>\n"


def test_asserts_of_literals_become_call_tests() -> None:
    problem = written_problem(written(ASSERTS), 5)
    assert (problem.entry_point, len(problem.cases), problem.num_written) == ("add", 8, 10)
    assert problem.cases[:2] == (CallCase((1, 2), {}, 3), CallCase((0, 0), {}, 0))
    assert problem.cases[4] == CallCase((2,), {"b": 2}, 4)
    assert problem.prompt.endswith("to a.\n\nWrite the Python function `add`.")


def test_lines_that_are_no_python_are_left_out() -> None:
    fenced = f"```python\nHere they are:\n{ASSERTS}\n```"
    assert written_problem(written(fenced), 5).cases == written_problem(written(ASSERTS), 5).cases


def test_the_last_question_of_an_answer_counts() -> None:
    problem = written_problem(written("assert first(1) == 1", "First.") + written(ASSERTS, "Second."), 5)
    assert problem.prompt.startswith("Second.")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", SeedRejection.NO_QUESTION),
        (written(ASSERTS, " "), SeedRejection.NO_QUESTION),
        (f"<question>Add.</question>\n{ASSERTS}", SeedRejection.NO_QUESTION),
        (written("assert add(1) == 1\n" * 4), SeedRejection.FEW_TESTS_WRITTEN),
        (written("assert __import__('os').getpid() == 1\n" * 9), SeedRejection.FEW_TESTS_WRITTEN),
        (written("assert " + "(" * 5000), SeedRejection.FEW_TESTS_WRITTEN),
    ],
)
def test_an_answer_without_a_problem_is_rejected(answer: str, reason: SeedRejection) -> None:
    with pytest.raises(NoProblem) as caught:
        written_problem(answer, 5)
    assert caught.value.reason is reason


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8),
    st.lists(st.sets(st.integers(0, 7)), max_size=3),
    st.integers(1, 5),
)
def test_all_kept_tests_are_passed_by_one_program(
    pairs: list[tuple[int, int]], passed: list[set[int]], at_least: int
) -> None:
    cases = tuple(CallCase((given,), {}, expected) for given, expected in pairs)
    passed = [{place for place in own if place < len(cases)} for own in passed]
    counts = [len({cases[place].args for place in own}) for own in passed]
    problem = WrittenProblem("p", "f", cases, len(cases))
    if max(counts, default=0) < at_least:
        with pytest.raises(NoProblem):
            kept_tests(problem, passed, at_least)
        return
    kept = kept_tests(problem, passed, at_least)
    assert all(case in [cases[place] for place in passed[kept.program]] for case in kept.tests.cases)
    assert len({case.args for case in kept.tests.cases}) == len(kept.tests.cases) == max(counts)


def block(code: str) -> str:
    return f"Like this:\n```python\n{code}```\n"


WRITTEN = {
    "good": written(ASSERTS, "good: add.\ud800"),  # half of a surrogate pair
    "second": written(ASSERTS, "second: add."),
    "wrong": written(ASSERTS, "wrong: add."),
    "silent": written(ASSERTS, "silent: add."),
    "few": written("assert add(1) == 1"),
    "none": "I cannot.",
}


def model(request: dict[str, Any]) -> dict[str, Any]:
    """The writer writes WRITTEN. The solver is right, right the second time, wrong, or says nothing."""
    content = request["messages"][0]["content"]
    if "The text:" in content:
        assert "Then write 12 tests" in content
        return completion(WRITTEN[content.split()[-1]])
    kind = content.split(":")[0]
    first = {"good": RIGHT, "second": WRONG, "wrong": WRONG, "silent": ""}[kind]
    program = RIGHT if kind == "second" and request["seed"] == 2 else first
    return completion(block(program) if program else "I do not know.")


def run(folder: Path, url: str, *more: str) -> dict[str, Any]:
    """The summary of the command."""
    seeds = folder / "seeds.jsonl"
    seeds.write_text("".join(json.dumps({"seed_id": name, "text": f"idea of {name}"}) + "\n" for name in WRITTEN))
    options = ["--url", url, "--model", "m", "--tests", "12", "--solutions", "2", "--at-once", "2", "--json"]
    command = ["data", "synthesize", str(seeds), "--out", str(folder / "o.parquet"), *options, *more]
    answer = CliRunner().invoke(app, command)
    if answer.exception is not None:
        raise answer.exception
    record: dict[str, Any] = json.loads(answer.stdout)
    return record


def test_tests_that_a_solver_passes_are_kept_and_a_second_run_asks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o.parquet"
    with serving(MockServer(model)) as mock:
        first = run(tmp_path, mock.url)
        assert Counter(request["seed"] for request in mock.requests) == {1: 6 + 4, 2: 4}
    assert first | {"out": ""} == {
        "seeds": 6,
        "problems": 2,
        "tests_written": 40,
        "tests_kept": 12,
        "rejected": {"no program": 1, "no question": 1, "too few tests pass": 1, "too few tests written": 1},
        "out": "",
    }
    problems = list(read_parquet(out))
    assert [item.problem.problem_id for item in problems] == ["good", "second"]
    assert problems[0].problem.prompt.startswith("good: add.?\n")
    for item in problems:
        assert isinstance(item.problem.tests, CallTests)
        assert [case.expected for case in item.problem.tests.cases] == [3, 0, 0, 5, 4, 30]
        assert item.references == (Reference(RIGHT.rstrip("\n")),) or item.references == (Reference(RIGHT),)
        assert item.metadata == {"writer": "m", "solver": "m", "tests_kept": "6/10"}
    lines = [json.loads(line) for line in (tmp_path / "o.parquet.rejected.jsonl").read_text().splitlines()]
    assert {line["seed_id"]: line["detail"] for line in lines}["wrong"] == "the best of 2 programs passes 2 of 8 tests"
    # Answers and results are in the evidence: the same output is made without a server and without a verifier.
    out.unlink()
    monkeypatch.setattr("nouscoder.data.kept_tests._grade_all", None)
    assert run(tmp_path, "http://127.0.0.1:9/v1") == first
    assert list(read_parquet(out)) == problems


def test_a_refusal_ends_the_command_and_what_was_answered_is_kept(tmp_path: Path) -> None:
    with serving(MockServer(model, statuses=[200, 200, 400, 400])) as mock, pytest.raises(NotAnswered):
        run(tmp_path, mock.url)
    assert not (tmp_path / "o.parquet").exists()
    assert (tmp_path / "o.parquet.evidence" / "written.jsonl").read_text().count("\n") >= 1


def test_seeds_that_give_no_problem_at_all_are_reported(tmp_path: Path) -> None:
    with serving(MockServer(lambda request: completion("I cannot."))) as mock:
        with pytest.raises(CannotSynthesize, match="no seed became a problem"):
            run(tmp_path, mock.url)
        (tmp_path / "o.parquet").write_text("")
        with pytest.raises(CannotSynthesize, match="exists already"):
            run(tmp_path, mock.url)
