"""Program arguments, stderr and further source files, through the formats, the grader, the sandbox and the APIs."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from nouscoder.config import VerifierSection
from nouscoder.domain.submission import CheckerTests, JudgeProgram, Profile, StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import VerdictKind
from nouscoder.formats import body as form
from nouscoder.rpc import pairs
from nouscoder.rpc.pairs import SUBMISSION, VERDICT
from nouscoder.store.case_files import CaseFile, write_tests
from nouscoder.v1 import verdict_pb2
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.api.schema import parse_submission, request_of
from nouscoder.verifier.grading import verdict_cache
from nouscoder.verifier.grading.grader import Grader, local_grader
from nouscoder.verifier.grading.runs import judge_for
from nouscoder.verifier.grading.validation import Bounds, InvalidSubmission, validate
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import SandboxUnavailable
from nouscoder.verifier.sandbox.base import RunResult
from nouscoder.verifier.sandbox.fake import FakeSandbox, ended
from nouscoder.verifier.toolchains.languages import installed

TESTS = StdinTests((StdinCase("1", "a b"), StdinCase("2", "c", ("-v", "two words"))))


def test_tests_without_arguments_keep_their_form_and_digest() -> None:
    plain = StdinTests((StdinCase("1\n", "2\n"),))
    assert form.canonical_json(plain) == b'{"type":"stdin","cases":[{"input":"1\\n","output":"2\\n"}]}'
    assert form.tests_from_json(form.canonical_json(TESTS)) == TESTS
    checked = CheckerTests(TESTS.cases, JudgeProgram("1"))
    assert form.tests_from_json(form.canonical_json(checked)) == checked
    assert form.digest_of(TESTS) != form.digest_of(StdinTests((TESTS.cases[0], StdinCase("2", "c"))))


def test_arguments_are_kept_by_the_store_and_by_the_protocol(tmp_path: Path) -> None:
    file = io.BytesIO()
    digest, _ = write_tests(TESTS, file)
    (tmp_path / "tests").write_bytes(file.getvalue())
    with CaseFile(tmp_path / "tests") as opened:
        assert tuple(opened.tests().cases) == TESTS.cases
    assert digest == form.digest_of(TESTS)
    given = Submission(TESTS, "1", stderr=True, files={"helper.py": "x = 1"})
    assert SUBMISSION.of(SUBMISSION.to(given)) == given
    assert parse_submission(json.dumps(request_of(given))) == given
    cases = [verdict_pb2.StdinCase(input="1", output="a b"), verdict_pb2.StdinCase(input="2", output="c")]
    cases[1].args.extend(["-v", "two words"])
    assert pairs.tests_from(verdict_pb2.Tests(stdin=verdict_pb2.StdinTests(cases=cases))) == TESTS


@pytest.mark.parametrize("args", [["x"] * 65, ["x" * 4097], ["a\0b"], [1], "text"])
def test_too_many_or_invalid_arguments_are_refused(args: object) -> None:
    case = {"input": "", "output": "", "args": args}
    with pytest.raises(ValidationError, match="args"):
        form.tests_from_json(json.dumps({"type": "stdin", "cases": [case]}))


def test_arguments_are_refused_where_no_program_takes_them() -> None:
    case = {"input": "", "output": "", "args": ["a"]}
    with pytest.raises(ValidationError, match="extra"):
        form.tests_from_json(json.dumps({"type": "interactive", "interactor": {"code": "1"}, "cases": [case]}))
    with pytest.raises(InvalidSubmission, match="lcb does not support program arguments"):
        judge_for(Submission(TESTS, "1", profile=Profile.LCB))


def noisy(stdin: bytes) -> RunResult:
    return ended(b"a b" if stdin == b"1" else b"c", stderr=b"said " + stdin + b"\n")


async def test_each_test_gets_its_arguments_and_gives_its_stderr_on_demand() -> None:
    sandbox, registry = FakeSandbox({"noisy": noisy}, num_slots=1), CollectorRegistry()
    await sandbox.start()
    grader = Grader(sandbox, VerifierMetrics(registry))
    verdict = await grader.grade(Submission(TESTS, "noisy", stderr=True))
    assert [(run.stdin, run.args) for run in sandbox.inputs] == [(b"1", ()), (b"2", ("-v", "two words"))]
    assert [outcome.stderr for outcome in verdict.tests] == ["said 1\n", "said 2\n"]
    assert VERDICT.of(VERDICT.to(verdict)) == verdict
    quiet = await grader.grade(Submission(TESTS, "noisy"))
    assert [outcome.stderr for outcome in quiet.tests] == [None, None]
    assert VERDICT.of(VERDICT.to(quiet)) == quiet
    app = make_app(grader, registry, DrainState(), 10_000)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://verifier") as http:
        body = request_of(Submission(TESTS, "noisy", stderr=True))
        tests = (await http.post("/v1/grade", json=body)).json()["tests"]
        assert [test["stderr"] for test in tests] == ["said 1\n", "said 2\n"]
        tests = (await http.post("/v1/grade", json=body | {"stderr": False})).json()["tests"]
        assert all("stderr" not in test for test in tests)


async def test_stderr_is_cut_for_each_test_and_for_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nouscoder.verifier.grading.progress._STDERR_CHARS", 5000)
    sandbox = FakeSandbox({"loud": lambda stdin: ended(stdin, stderr=b"x" * 60_000 + stdin)}, num_slots=2)
    await sandbox.start()
    tests = StdinTests(tuple(StdinCase(str(n), str(n)) for n in range(10, 20)))
    grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()))
    verdict = await grader.grade(Submission(tests, "loud", stderr=True))
    assert verdict.kind is VerdictKind.ACCEPTED
    assert [len(outcome.stderr or "") for outcome in verdict.tests] == [2000] * 3 + [0] * 7
    assert (verdict.tests[0].stderr or "").endswith("x10")


async def test_a_python_program_sees_its_arguments_in_the_sandbox() -> None:
    section = VerifierSection.model_validate({"sandbox": {"slots": 1}})
    code = "import sys\nprint(input(), *sys.argv[1:], sep='|')\nprint('heard', file=sys.stderr)"
    tests = StdinTests((StdinCase("1", "1"), StdinCase("2", "2|-v|two words|ä", ("-v", "two words", "ä"))))
    try:
        async with local_grader(section) as grader:
            verdict = await grader.grade(Submission(tests, code, stderr=True))
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    assert verdict.kind is VerdictKind.ACCEPTED, verdict.first_failure
    assert [outcome.stderr for outcome in verdict.tests] == ["heard\n", "heard\n"]


MAIN_AND_FILES = {
    "python": ("import helper\nprint(helper.twice(int(input())), open('data.txt').read())", "helper.py"),
    "c": ('#include <stdio.h>\n#include "helper.h"\nint main() { int n; scanf("%d", &n); printf("%d ", twice(n));'
    ' FILE *f = fopen("data.txt", "r"); for (int c; (c = getc(f)) != EOF;) putchar(c); }', "helper.h"),
}  # fmt: skip
HELPERS = {"python": "def twice(n):\n    return 2 * n\n", "c": "static int twice(int n) { return 2 * n; }\n"}


@pytest.mark.parametrize("language", MAIN_AND_FILES)
async def test_further_files_are_there_when_a_program_is_compiled_and_in_each_run(language: str) -> None:
    if language not in installed():
        pytest.skip(f"no {language} here")
    code, name = MAIN_AND_FILES[language]
    files = {name: HELPERS[language], "data.txt": "a b"}
    tests = StdinTests(tuple(StdinCase(str(n), f"{2 * n} a b") for n in range(3)))
    try:
        async with local_grader(VerifierSection.model_validate({"sandbox": {"slots": 1}})) as grader:
            verdict = await grader.grade(Submission(tests, code, language=language, files=files))
            assert verdict.kind is VerdictKind.ACCEPTED, verdict
            changes = "import os\ntry:\n    open('data.txt', 'w')\nexcept OSError as e:\n    print('refused')\n"
            hostile = "os.chmod('data.txt', 0o777)\nos.remove('data.txt')"
            changing = Submission(StdinTests((StdinCase("", "refused"),) * 2), changes, files=files)
            assert (await grader.grade(changing)).kind is VerdictKind.ACCEPTED
            await grader.grade(replace(changing, code="import os\n" + hostile))
            assert (await grader.grade(Submission(tests, code, language=language, files=files))).passed == 3
            gone = await grader.grade(Submission(tests, code, language=language))
            assert gone.kind in (VerdictKind.RUNTIME_ERROR, VerdictKind.COMPILE_ERROR), "of another submission"
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "main.py", "x" * 101, "a\0", "-x", "\u00e4", ".hidden"])
def test_a_file_needs_a_plain_name(name: str) -> None:
    with pytest.raises(InvalidSubmission, match="plain name"):
        validate(Submission(TESTS, "1", files={name: ""}), Bounds())


def test_files_are_bounded_and_are_part_of_what_a_verdict_depends_on() -> None:
    for files in ({f"f{n}": "" for n in range(65)}, {"big": "x" * 4_000_001}):
        with pytest.raises(InvalidSubmission, match="may be at most"):
            validate(Submission(TESTS, "1", files=files), Bounds())
    with pytest.raises(InvalidSubmission, match="further files"):
        validate(Submission(StdinTests((StdinCase("", ""),)), "1", profile=Profile.LCB, files={"a": ""}), Bounds())
    keys = [
        verdict_cache._key(Submission(TESTS, "1", files=files), "d")
        for files in ({}, {"a": "b"}, {"a": "c"}, {"a": "b", "c": "d"}, {"ab": ""})
    ]
    assert len(set(keys)) == 5
