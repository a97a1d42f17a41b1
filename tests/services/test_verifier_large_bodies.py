"""Bodies with very many items: refused in one sentence before they cost much, while large ordinary bodies are graded.

Tests the invariants of body.py and memory_budget.py.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nouscoder.domain.submission import Submission, TestsReference
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.formats.body import canonical_json, digest_of
from nouscoder.formats.json_values import BYTES_PER_WEIGHT, MAX_WEIGHT, ValueCount
from nouscoder.http_server.body import MAX_BYTES, SMALL_WEIGHT
from nouscoder.http_server.memory_budget import (
    MemoryBudget,
    MemoryBudgetExceeded,
    charging,
    charging_part,
)
from nouscoder.store.case_files import StoredCases
from nouscoder.verifier.api.remote_rewards import rewarded_submissions
from nouscoder.verifier.api.run_code import parse_run_code
from nouscoder.verifier.api.sandbox_fusion import submitted_answer
from nouscoder.verifier.api.schema import bodies, parse_submission, parse_tests
from nouscoder.verifier.api.streaming import answer_line, batch_lines, lines_of
from nouscoder.verifier.grading.grader import OnOutcome
from nouscoder.verifier.grading.validation import InvalidSubmission, TooLarge

MANY = 12_000  # more tests than a request may have
MOST_MIB = 200  # what parsing takes at most; a body of 4 MiB took 3.4 GB
GRADE, TESTS, RUN, SUBMIT, REWARD = (
    parse_submission,
    parse_tests,
    parse_run_code,
    submitted_answer,
    rewarded_submissions,
)
CALLS = [{"args": [[at, 1.5, None, True, "é", 1 << 70]], "kwargs": {"a": {}}, "expected": [at]} for at in range(50)]
TESTS_OF_KINDS: dict[str, dict[str, Any]] = {
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
Parse = Callable[[bytes, ValueCount], Any]


def items(item: str, count: int) -> str:
    """A list that holds an item very often."""
    return f"[{','.join([item] * count)}]"


def fields(count: int) -> str:
    """Fields of an object, all unknown, and a comma."""
    return "".join(f'"f{number}":1,' for number in range(count))


def graded(tests: str) -> str:
    """A request with these tests."""
    return f'{{"code":"1","tests":{tests}}}'


def call(args: str) -> str:
    """A request with one call test."""
    return graded(f'{{"type":"call","entry_point":"f","cases":[{{"args":{args},"expected":0}}]}}')


def stdin(cases: str) -> str:
    """Tests of a whole program."""
    return f'{{"type":"stdin","cases":{cases}}}'


def pairs(inputs: str, outputs: str, name: str = "f") -> str:
    """A request with tests in the form of public data sets."""
    return graded(f'{{"inputs":{inputs},"outputs":{outputs},"fn_name":"{name}"}}')


def submitted(test: str) -> str:
    """A request of /submit."""
    config = f'{{"language":"python","provided_data":{{"test":{test}}}}}'
    return f'{{"id":1,"completion":"```\\nx\\n```","config":{config}}}'


def rewarded(label: str) -> str:
    """A request of /get_reward."""
    return f'{{"query":["pa"],"prompts":["p"],"labels":[{label}]}}'


HUGE = 2_500_000
BIG = 400_000
FIELDS = 45_000  # about as many as there may be
HOSTILE: dict[str, tuple[Parse, Callable[[], str], str]] = {
    "cases that are no objects": (GRADE, lambda: graded(stdin(items("1", BIG))), "tests.cases"),
    "too many small tests": (GRADE, lambda: graded(stdin(items('{"input":"","output":""}', MANY))), "tests.cases"),
    "wrong cases": (GRADE, lambda: graded(stdin(items('{"input":1}', 9_000))), "tests.cases[0].input"),
    "unknown fields": (GRADE, lambda: "{" + fields(FIELDS) + graded(stdin("[1]"))[1:], "body"),
    "unknown fields of a case": (
        GRADE,
        lambda: graded(stdin("[{" + fields(FIELDS) + '"input":""}]')),
        "body",
    ),
    "files": (GRADE, lambda: graded(stdin("[]"))[:-1] + ',"files":{' + fields(FIELDS) + '"g":""}}', "body"),
    "arguments": (GRADE, lambda: call(items("[]", HUGE)), "body"),
    "numbers": (GRADE, lambda: call(items(items("1", HUGE), 3)), "body"),
    "public form": (GRADE, lambda: pairs(items("[]", BIG // 4), items("[]", BIG // 4)), "tests.cases"),
    "public runs": (GRADE, lambda: pairs(items('""', BIG // 4), items('""', BIG // 4), ""), "tests.cases"),
    "tests as text": (GRADE, lambda: graded(json.dumps(stdin(items("1", HUGE)))), "tests"),
    "many tests as text": (GRADE, lambda: graded(json.dumps(stdin(items("1", BIG)))), "tests.cases"),
    "lines of values": (GRADE, lambda: pairs(json.dumps(["1\r" * HUGE]), '["1"]'), "tests"),
    "values in lines": (GRADE, lambda: pairs(json.dumps([items("[]", BIG)] * 3), items('"1"', 3)), "tests"),
    "tests to store": (TESTS, lambda: stdin(items("1", BIG)), "tests.cases"),
    "arguments to store": (TESTS, lambda: call(items("[]", HUGE))[20:-1], "body"),
    "pairs to store": (TESTS, lambda: pairs(*[items('"1"', BIG // 4)] * 2)[20:-1], "tests.cases"),
    "files of a run": (RUN, lambda: '{"code":"1","language":"python","files":{' + fields(FIELDS) + '"g":1}}', "body"),
    "fetched files": (
        RUN,
        lambda: '{"code":"1","language":"python","fetch_files":' + items("1", BIG) + "}",
        "fetch_files",
    ),
    "submitted tests": (SUBMIT, lambda: submitted(items("1", BIG)), "config.provided_data.test"),
    "submitted text": (SUBMIT, lambda: submitted(json.dumps(items("[]", BIG))), "config.provided_data.test"),
    "labels": (REWARD, lambda: rewarded(items("1", 1)[1:-1] + ",1" * BIG), "labels"),
    "label": (REWARD, lambda: rewarded(graded(stdin(items("1", BIG)))), "labels[0].tests.cases"),
    "label as text": (REWARD, lambda: rewarded(json.dumps(graded(stdin(items("1", HUGE))))), "labels[0].tests"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_body_with_very_many_items_is_refused_in_one_sentence(name: str) -> None:
    parse, body, field = HOSTILE[name]
    with pytest.raises(InvalidSubmission) as refused:
        await bodies.parsed(body().encode(), parse)
    assert refused.value.field.startswith(field)
    assert str(refused.value).startswith(f"{refused.value.field}: ")
    assert len(str(refused.value)) < 500


async def measure() -> None:
    """Print how much memory [MiB] the refusal of each body takes at most, beside the body."""
    for name, (parse, body, _) in HOSTILE.items():
        sent = body().encode()
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = status_mib("VmRSS")
        with pytest.raises(InvalidSubmission):
            await bodies.parsed(sent, parse)
        print(json.dumps([name, status_mib("VmHWM") - before]), flush=True)


def status_mib(name: str) -> int:
    """A size of this process, as the kernel counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith(name + ":"))


async def test_the_refusal_of_a_body_takes_little_memory() -> None:
    """In a process of its own, which counts its peaks."""
    code = f"import asyncio, {__name__} as t; asyncio.run(t.measure())"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code), cwd=Path(__file__).parents[2], stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    assert process.returncode == 0
    found = dict(json.loads(line) for line in said.splitlines())
    assert found.keys() == HOSTILE.keys()
    assert max(found.values()) < MOST_MIB, found


NUMBERS = items("123456", 10_000)
LARGE: dict[str, tuple[Callable[[], str], Callable[[Submission], object], object]] = {
    "long texts": (
        lambda: graded(stdin(items(json.dumps({"input": '[1, {"a": 2}],\n' * 6_000, "output": "1 "}), 60))),
        lambda one: sum(len(case.input) for case in one.tests.cases),  # type: ignore[union-attr,misc]
        60 * 6_000 * len('[1, {"a": 2}],\n'),
    ),
    "small tests": (
        lambda: graded(stdin(items('{"input":"1 2","output":"3"}', 10_000))),
        lambda one: len(one.tests.cases),  # type: ignore[union-attr]
        10_000,
    ),
    "arrays": (
        lambda: graded(
            call(NUMBERS)[20:-1].replace("[{", "[" + f'{{"args":[{NUMBERS}],"expected":{NUMBERS}}},' * 9 + "{")
        ),
        lambda one: len(one.tests.cases[8].args[0]) + len(one.tests.cases[8].expected),  # type: ignore
        20_000,
    ),
    "arrays in lines": (
        lambda: pairs(items(json.dumps(f"{NUMBERS}\n7"), 10), items('"1"', 10)),
        lambda one: sum(len(case.args[0]) for case in one.tests.cases),  # type: ignore
        100_000,
    ),
    "edges": (
        lambda: pairs(items(f"[{items('[1,2]', 10_000)}]", 5), items("1", 5)),
        lambda one: sum(len(case.args[0]) for case in one.tests.cases),  # type: ignore
        50_000,
    ),
}


@pytest.mark.parametrize("name", LARGE)
async def test_a_large_ordinary_body_is_parsed_as_before(name: str) -> None:
    body, read, wanted = LARGE[name]
    submission = await bodies.parsed(body().encode(), parse_submission)
    assert read(submission) == wanted


def where(body: bytes, values: ValueCount) -> tuple[int, int, bool]:
    """A parser that returns the weight, its thread, and whether the garbage collector is on."""
    return values.weight, threading.get_ident(), gc.isenabled()


async def test_large_bodies_are_parsed_one_at_a_time_outside_of_the_event_loop_and_without_collections() -> None:
    texts, numbers = b'["' + b" " * 300_000 + b'"]', b"[" + b"1," * SMALL_WEIGHT + b"1]"
    small = [await bodies.parsed(body, where) for body in (b"[1,2]", b'["' + b"," * 9_000 + b'"]')]
    assert {found[1:] for found in small} == {(threading.get_ident(), True)}
    large = await asyncio.gather(*(bodies.parsed(body, where) for body in (texts, numbers) * 5))
    assert {found[0] for found in large} == {2, SMALL_WEIGHT + 1}
    (thread, collects), *others = {found[1:] for found in large}
    assert (thread != threading.get_ident(), collects, others) == (True, False, [])
    assert gc.isenabled()


async def test_what_is_too_large_is_never_decoded_and_names_the_way_for_large_tests() -> None:
    for body in (b" " * (MAX_BYTES + 1), b"[" + b"1," * MAX_WEIGHT + b"1]"):
        with pytest.raises(TooLarge, match="PUT /v1/tests"):
            await bodies.parsed(body, where)
    assert (await bodies.parsed(b" " * MAX_BYTES, where))[0] == 0
    assert (await bodies.parsed(b"[" + b"1," * (MAX_WEIGHT - 1) + b"1]", where))[0] == MAX_WEIGHT


@pytest.mark.parametrize("kind", TESTS_OF_KINDS)
def test_tests_with_many_values_are_kept_as_the_bytes_of_a_file(kind: str) -> None:
    body = json.dumps({"code": "1", "tests": TESTS_OF_KINDS[kind], "files": {"a.py": "1"}, "problem_id": "p"}).encode()
    here, packed = parse_submission(body), parse_submission(body, ValueCount(SMALL_WEIGHT + 1))
    assert not isinstance(here.tests, TestsReference)
    assert not isinstance(packed.tests, TestsReference)
    assert isinstance(packed.tests.cases, StoredCases)
    assert canonical_json(packed.tests) == canonical_json(here.tests)
    assert packed.tests_digest == digest_of(here.tests)
    assert replace(packed, tests=here.tests, tests_digest="") == here


def two_more(_: bytes, values: ValueCount) -> None:
    """A parser that decodes a text with three values."""
    values.add("[1,2]")


async def test_the_values_of_a_body_count_against_the_budget_until_its_request_ends() -> None:
    budget = MemoryBudget(1_000_000)
    body = b"[" + b"1," * 10_000 + b"1]"

    parse = two_more
    with budget.request() as first, charging(first):
        await bodies.parsed(body, parse)
        assert budget.held_bytes == BYTES_PER_WEIGHT * 10_003
        with pytest.raises(MemoryBudgetExceeded), budget.request() as second, charging(second):
            await bodies.parsed(b"[" + b"1," * 15_000 + b"1]", parse)
    assert budget.held_bytes == 0
    with budget.request() as alone, charging(alone):
        alone.add(800_000)
        await bodies.parsed(body, parse)  # its values alone would not fit
        assert budget.held_bytes == 875_000
        with charging_part():  # one line of it
            await bodies.parsed(body, parse)
            assert budget.held_bytes == 875_000
        await alone.add_answer(125_000)  # there is room for an answer


class Accepting:
    """A grader that accepts everything."""

    backend = "none"
    num_slots = 1
    unfinished = 0

    async def grade(self, submission: Submission, on_outcome: OnOutcome | None = None) -> Verdict:
        return Verdict(VerdictKind.ACCEPTED, 1, 1, 1, 0.0, self.backend)


async def test_each_line_gives_its_memory_back_and_waits_for_it() -> None:
    budget = MemoryBudget(600_000)
    line = call(items("1", 9_000)).encode()
    seen: list[int] = []

    async def grade(submission: Submission) -> Verdict:
        seen.append(budget.held_bytes)
        return await Accepting().grade(submission)

    with budget.request() as reservation, charging(reservation):
        answers = await asyncio.gather(*(answer_line(grade, number, line) for number in range(4)))
        assert budget.held_bytes == 0
    assert [answer["verdict"] for answer in answers] == ["accepted"] * 4
    assert BYTES_PER_WEIGHT * 9_000 <= min(seen) <= max(seen) <= 600_000


async def test_a_batch_of_very_many_empty_lines_lets_others_run() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    good = graded(stdin('[{"input":"","output":""}]')).encode()
    answers = [one async for one in batch_lines(Accepting(), lines_of(b" \n\n" * 100_000 + good + b"\n" * 1_000_000))]
    task.cancel()
    assert [json.loads(one)["id"] for one in answers] == [0]
    assert turns > 90


async def test_the_lines_of_a_body_are_never_a_list() -> None:
    tracemalloc.start()
    try:
        assert sum(1 for _ in lines_of(b"1\n" * 200_000)) == 200_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


async def test_a_hostile_line_of_a_batch_keeps_its_id() -> None:
    lines = [f'{{"id":"x",{HOSTILE[name][1]()[1:]}'.encode() for name in ("wrong cases", "too many small tests")]
    lines += [HOSTILE["numbers"][1]().encode(), b"{", b"[" * 100_000]
    answers = {str(one["id"]): one for one in map(json.loads, [one async for one in batch_lines(Accepting(), lines)])}
    assert answers["x"]["field"].startswith("tests.cases")
    assert [answers[number]["field"] for number in "234"] == ["body", "body", "body"]
