"""`nouscoder data inspect --flaky` on invented problems: a sound one, and one with each kind of flaw."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest

from nouscoder.config import load_config
from nouscoder.data.check import check_file
from nouscoder.data.importers.formats import read_referenced
from nouscoder.data.importers.run import import_files
from nouscoder.data.inspect import Flaw, ReferenceRound, Seen, audit_file, findings_of, inspect_file
from nouscoder.data.problems import ProblemBody, ProblemFileError, Reference
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.grading import validation

pytestmark = pytest.mark.alone

SECTION = load_config(None, ["verifier.sandbox.slots=2"]).verifier
ADD = "print(sum(map(int, input().split())))"
# Its output differs in every run, whatever the seed and the clock.
RANDOM = "import os\nprint(int.from_bytes(os.urandom(8), 'little'))"


def problem(name: str, *references: object, **fields: Any) -> dict[str, Any]:
    cases = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 6\n", "output": "11\n"}]
    limits = {"wall_time_s": 20.0, "cpu_time_s": 10.0}
    record: dict[str, Any] = {"problem_id": name, "prompt": "Add.", "tests": {"type": "stdin", "cases": cases}}
    return record | {"limits": limits, "references": references} | fields


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def audited(path: Path, num_rounds: int = 4) -> tuple[dict[tuple[str, int | None], set[str]], int]:
    """(flaws by problem and test, exit code)."""
    text, code = audit_file(path, SECTION, num_rounds, as_json=True)
    flaws: dict[tuple[str, int | None], set[str]] = {}
    for finding in json.loads(text)["findings"]:
        flaws.setdefault((finding["problem_id"], finding["test"]), set()).add(finding["flaw"])
    return flaws, code


def test_sound_problems_of_every_kind_have_no_finding(tmp_path: Path) -> None:
    call = {"type": "call", "entry_point": "add", "cases": [{"args": [1, 2], "expected": 3}]}
    function = "def add(a, b): return a + b"
    checked: dict[str, Any] = {"type": "checker", "cases": [{"input": "1 2\n", "output": ""}]}
    checked["checker"] = {"language": "python", "code": "import sys\nsys.exit(open(sys.argv[2]).read() != '3\\n')"}
    asserted = {"type": "assert", "cases": ["assert add(1, 2) == 3"]}
    path = write(
        tmp_path / "sound.jsonl",
        problem("stdin", ADD, {"language": "python", "code": ADD}),
        problem("call", function, tests=call),
        problem("checker", ADD, tests=checked),
        problem("assert", function, tests=asserted),
        problem("no reference"),
    )
    text, code = audit_file(path, SECTION, 2, as_json=False)
    assert code == 0
    assert text.endswith("4 of 5 problems have reference solutions; 5 tests, 2 rounds: 0 findings")


def test_each_kind_of_flaw_is_found_in_its_test(tmp_path: Path) -> None:
    sometimes = "import os\na = input()\nprint(3 if a == '1 2' or os.urandom(1)[0] % 2 else 11)"
    any_number: dict[str, Any] = {"type": "checker", "cases": [{"input": "", "output": ""}]}
    any_number["checker"] = {"language": "python", "code": "import sys\nsys.exit(0)"}
    path = write(
        tmp_path / "flawed.jsonl",
        problem("sound", ADD),
        problem("coin", sometimes),
        problem("wrong", "print(3)"),
        problem("random", RANDOM),
        problem("broken", "print("),
        problem("unknown language", {"language": "cobol", "code": "x"}),
        problem("checked", RANDOM, tests=any_number),  # its outputs differ, which the checker allows
    )
    flaws, code = audited(path, 20)
    assert code == 1
    assert flaws == {
        ("coin", 1): {"outcome_varies", "output_varies"},
        ("wrong", 1): {"never_passed"},
        ("random", 0): {"output_varies", "never_passed"},
        ("random", 1): {"output_varies", "never_passed"},
        ("broken", None): {"not_run"},
        ("unknown language", None): {"not_run"},
    }


def test_a_reference_that_takes_most_of_the_time_is_named(tmp_path: Path) -> None:
    slow = f"import time\n{ADD}\ntime.sleep(0.4)"
    path = write(tmp_path / "slow.jsonl", problem("slow", slow, limits={"wall_time_s": 0.7, "cpu_time_s": 0.7}))
    flaws, code = audited(path, 2)
    assert code == 1
    assert all("near_limit" in flaws["slow", test] for test in (0, 1))


def test_a_finding_is_printed_as_a_sentence() -> None:
    passed, failed = VerdictKind.ACCEPTED, VerdictKind.WRONG_ANSWER
    rounds = [ReferenceRound(0, (Seen(passed, b"a", 0.6),)), ReferenceRound(0, (Seen(failed, b"b", 0.1),))]
    found = {finding.flaw: finding.detail for finding in findings_of("p", rounds)}
    assert found == {
        Flaw.OUTCOME_VARIES: "reference 0: accepted 1 times, wrong_answer 1 times",
        Flaw.OUTPUT_VARIES: "reference 0: 2 outputs in 2 rounds",
        Flaw.NEAR_LIMIT: "reference 0 took 60% of the limit",
    }
    assert (
        findings_of("p", [ReferenceRound(1, (Seen(passed, b"a", 0.5),)), ReferenceRound(2, (Seen(failed, b"b", 0.1),))])
        == []
    )


def test_every_format_of_problem_files_is_read(tmp_path: Path) -> None:
    ours = write(tmp_path / "ours.jsonl", problem("a", ADD, {"language": "cpp", "code": "int main(){}"}), problem("b"))
    assert [one.references for one in read_referenced(ours)] == [
        (Reference(ADD), Reference("int main(){}", "cpp")),
        (),
    ]
    text, code = inspect_file(ours, as_json=False)
    assert (text, code) == (f"{ours}: 2 problems (2 StdinTests), 4 tests, 1 problems with reference solutions", 0)

    leetcode = tmp_path / "leet.jsonl.gz"
    record = {
        "task_id": "two-sum",
        "query": "?",
        "prompt": "",
        "completion": "class Solution:\n    def f(self, a): return a + 1",
        "entry_point": "Solution().f",
        "test": "def check(candidate):\n    assert candidate(a = 1) == 2\n",
    }
    leetcode.write_bytes(gzip.compress(json.dumps(record).encode() + b"\n"))
    assert audited(leetcode, 2) == ({}, 0)

    contests = tmp_path / "contests.json.gz"
    contests.write_bytes(gzip.compress(b'[{"problem": "?", "tests": {"inputs": ["1"], "outputs": ["2"]}}]'))
    assert json.loads(inspect_file(contests, as_json=True)[0])["num_with_references"] == 0
    with pytest.raises(ProblemFileError, match="no problem has a reference solution"):
        audit_file(contests, SECTION, 2, as_json=False)


@pytest.mark.parametrize("references", ["x", None, [3], [{"code": 1}], [{"code": "a", "typo": 1}], 7])
def test_invalid_references_are_named(tmp_path: Path, references: object) -> None:
    path = write(tmp_path / "bad.jsonl", problem("fine", ADD), problem("bad") | {"references": references})
    with pytest.raises(ProblemFileError, match=r"bad\.jsonl, line 2: references"):
        list(read_referenced(path))


def test_inspect_names_every_problem_that_the_grading_service_refuses(tmp_path: Path) -> None:
    call = {"type": "call", "entry_point": "double it", "cases": [{"args": [2], "expected": 4}]}
    path = write(
        tmp_path / "half.jsonl",
        problem("sound", ADD),
        problem("name", tests=call),
        problem("limits", limits={"wall_time_s": 1e9, "cpu_time_s": 301}),
        problem("asserts", tests={"type": "assert", "cases": ["assert f(1) =="]}),
        problem("long asserts", tests={"type": "assert", "setup": "#" * 9000, "cases": ["assert f(1) =="]}),
        problem(
            "lcb", tests={**call, "entry_point": "f", "cases": [{"kwargs": {"x": 2}, "expected": 4}]}, profile="lcb"
        ),
        problem("no tests", tests={"type": "stdin", "cases": []}),
        problem("", tests=call),
        problem("empty", prompt=" \n"),
        problem("shown", public_tests=call),
        problem("sound", ADD),
    )
    with pytest.raises(ProblemFileError) as caught:
        inspect_file(path, as_json=False)
    assert str(caught.value).splitlines() == [
        f"{path}: 10 of 11 problems cannot be graded:",
        "name: tests.entry_point: must be the name of a function or method",
        "limits: limits.wall_time_s: must be at most 300.0",
        "limits: limits.cpu_time_s: must be at most 300.0",
        "asserts: tests.cases[0]: is not python: invalid syntax (<unknown>, line 1)",
        "long asserts: tests.cases[0]: is not python: invalid syntax (<unknown>, line 1)",
        "lcb: profile: lcb does not support keyword arguments",
        "line 7: tests.cases: must have at least 1 item",
        "line 8: problem_id: must have at least 1 character",
        "empty: prompt: is empty",
        "shown: public_tests.entry_point: must be the name of a function or method",
        "line 11: problem_id 'sound' occurs twice",
    ]


@pytest.mark.parametrize(("language", "is_fault"), [("rust", False), ("perl6", True)])
def test_what_is_not_installed_here_is_no_fault_for_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, language: str, is_fault: bool
) -> None:
    monkeypatch.setattr(validation, "installed", dict)
    checker: dict[str, Any] = {"type": "checker", "cases": [{"input": "", "output": ""}]}
    path = write(
        tmp_path / "rust.jsonl",
        problem("checked", tests=checker | {"checker": {"language": language, "code": "x"}}, languages=["rust"]),
    )
    assert f"tests.checker.language: '{language}' is not installed" in check_file(path).text()
    assert bool(check_file(path, here=False).faults) == is_fault


@pytest.mark.heavy
def test_many_small_problems_are_few_files_and_quickly_inspected(tmp_path: Path) -> None:
    path = write(tmp_path / "many.jsonl", *(problem(f"p{number}", prompt=f"Add {number}.") for number in range(5000)))
    import_files("generic", [path], tmp_path / "many.parquet")
    assert len([file for file in tmp_path.rglob("*") if file.is_file()]) < 10
    began_s = time.process_time()
    for line in path.read_bytes().splitlines():
        ProblemBody.model_validate_json(line).record()
    bare_s, began_s = time.process_time() - began_s, time.process_time()
    assert check_file(tmp_path / "many.parquet").num_problems == 5000
    assert time.process_time() - began_s < 12 * bare_s
