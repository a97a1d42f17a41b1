"""The process that parses large bodies (parse_process.py): results, failures, and a process that ends."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from nouscoder.domain.submission import CallTests, StdinTests, Submission, TestsReference
from nouscoder.formats.json_size import ValueCount, json_weight
from nouscoder.formats.tests import canonical_json, digest_of
from nouscoder.store.case_files import StoredCases
from nouscoder.verifier.api.get_reward import rewarded_submissions
from nouscoder.verifier.api.parse_process import ParseProcess, ParsingFailed
from nouscoder.verifier.api.parse_worker import MAX_CASE_WEIGHT
from nouscoder.verifier.api.schema import parse_submission, parse_tests
from nouscoder.verifier.grading.validation import InvalidSubmission

CALLS = [
    {"args": [[index, 1.5, None, True, "é", 1 << 70]], "kwargs": {"a": {}}, "expected": [index]} for index in range(50)
]
TESTS: dict[str, dict[str, Any]] = {
    "stdin": {
        "type": "stdin",
        "cases": [{"input": "1\n", "output": "2", "args": ["-x"]}, {"input": "é", "output": ""}],
    },
    "call": {"type": "call", "entry_point": "f", "cases": CALLS},
    "assert": {"type": "assert", "setup": "import math", "cases": ["assert f(1)", "assert f(2)"]},
    "checker": {
        "type": "checker",
        "checker": {"code": "x", "language": "cpp", "protocol": "kattis"},
        "cases": [{"input": "1", "output": "2"}],
    },
    "interactive": {"type": "interactive", "interactor": {"code": "x"}, "cases": [{"input": "1", "output": "2"}]},
    "math": {"type": "math", "cases": [{"expected": "1/2"}]},
}


def request(tests: object) -> bytes:
    """A request with these tests."""
    return json.dumps({"code": "1", "tests": tests, "files": {"a.py": "1"}, "problem_id": "p"}).encode()


@pytest.fixture
def process() -> Any:
    """A process that ends with the test."""
    process = ParseProcess()
    yield process
    process.close()


@pytest.mark.parametrize("kind", TESTS)
def test_the_process_finds_the_same_as_this_one(process: ParseProcess, kind: str) -> None:
    body = request(TESTS[kind])
    here, there = parse_submission(body), process.parse(parse_submission, body, ValueCount(json_weight(body)))
    assert isinstance(here.tests, CallTests | StdinTests) or kind not in ("call", "stdin")
    assert not isinstance(here.tests, TestsReference)
    assert isinstance(there.tests.cases, StoredCases)
    assert list(there.tests.cases) == list(here.tests.cases)
    assert canonical_json(there.tests) == canonical_json(here.tests)
    assert there.tests_digest == digest_of(here.tests)
    plain = {name: getattr(here, name) for name in Submission.__match_args__ if name not in ("tests", "tests_digest")}
    assert plain == {name: getattr(there, name) for name in plain}


def test_stored_tests_lists_and_references_arrive(process: ParseProcess) -> None:
    tests = process.parse(parse_tests, json.dumps(TESTS["call"]).encode(), ValueCount())
    assert [case.expected for case in tests.cases] == [[index] for index in range(50)]
    digest = digest_of(tests)
    assert process.parse(parse_submission, request({"digest": digest}), ValueCount()).tests == TestsReference(digest)
    labels = [TESTS["stdin"], json.dumps(TESTS["call"])]
    body = json.dumps({"query": ["pa", "pb"], "prompts": ["p", "p"], "labels": labels}).encode()
    values = ValueCount(json_weight(body))
    before = values.weight
    first, second = process.parse(rewarded_submissions, body, values)
    assert (first.completion, second.completion) == ("a", "b")
    assert len(second.tests.cases) == 50
    assert values.weight > before, "the label that is a text counts"


def test_a_refusal_arrives_with_its_field(process: ParseProcess) -> None:
    for body in (
        request({"type": "call", "entry_point": "f", "cases": [{"args": 1}]}),
        b"{",
        request(TESTS["call"])[:-9],
    ):
        with pytest.raises(InvalidSubmission) as here:
            parse_submission(body)
        with pytest.raises(InvalidSubmission) as there:
            process.parse(parse_submission, body, ValueCount())
        assert (there.value.field, str(there.value)) == (here.value.field, str(here.value))


def test_a_call_with_more_values_than_the_gateway_can_decode_is_refused(process: ParseProcess) -> None:
    def sent(num_values: int) -> bytes:
        cases = [{"args": [], "expected": 0}, {"args": [[0] * num_values], "expected": 0}]
        return request({"type": "call", "entry_point": "f", "cases": cases})

    assert len(process.parse(parse_submission, sent(MAX_CASE_WEIGHT - 50), ValueCount()).tests.cases) == 2
    with pytest.raises(InvalidSubmission, match="holds too many values") as refused:
        process.parse(parse_submission, sent(MAX_CASE_WEIGHT), ValueCount())
    assert refused.value.field == "tests.cases[1]"


def dies(body: bytes, values: ValueCount) -> int:
    """A parser that ends its process, unless the body says otherwise."""
    if body == b"die":
        os.kill(os.getpid(), signal.SIGKILL)
    if body == b"wait":
        signal.pause()  # silent until it is killed
    return os.getpid()


def exhausts(body: bytes, values: ValueCount) -> int:
    """A parser that needs more memory than it may have."""
    return len(bytearray(8 << 30))


def wasteful(body: bytes, values: ValueCount) -> int:
    """A parser that takes more memory than the process keeps."""
    return os.getpid() + 0 * len(b"1" * (600 << 20))


def test_a_process_that_dies_or_is_silent_is_replaced() -> None:
    process = ParseProcess(limit_s=20.0)
    first = process.parse(dies, b"", ValueCount())
    with pytest.raises(ParsingFailed, match="retry"):
        process.parse(dies, b"die", ValueCount())
    second = process.parse(dies, b"", ValueCount())
    assert second != first
    process.close()
    impatient = ParseProcess(limit_s=1.0)
    with pytest.raises(ParsingFailed, match="retry"):
        impatient.parse(dies, b"wait", ValueCount())
    impatient.close()


def test_its_memory_is_bounded(process: ParseProcess) -> None:
    with pytest.raises(InvalidSubmission, match="too much memory"):
        process.parse(exhausts, b"", ValueCount())
    large = process.parse(wasteful, b"", ValueCount())
    assert process.parse(dies, b"", ValueCount()) != large, "the memory went back with the process"


def test_it_ends_with_the_gateway(process: ParseProcess) -> None:
    pid = process.parse(dies, b"", ValueCount())
    assert process._socket is not None
    process._socket.close()
    assert process._process is not None
    assert process._process.wait(60) == 0
    assert not Path(f"/proc/{pid}").exists()
