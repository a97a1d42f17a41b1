"""Real problems through the REST API of a running service.

LeetCode: the reference solutions get `accepted` wherever a bare Python process that runs the data set's own `check`
accepts them. CodeContests: an empty program, print(0), an endless loop and a program that uses too much memory get the
right verdict on every problem. pytest uses a sample; `python tests/e2e/test_real_problems.py` uses both sets.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from nouscoder.client import AsyncClient
from nouscoder.data.importers.formats import format_named, read_referenced
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import CallTests, StdinTests

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
LEETCODE = DATA / "leetcode_200.jsonl.gz"
CODE_CONTESTS = DATA / "code_contests_165.json.gz"
AT_ONCE = 4

ENDLESS = "while True:\n    pass\n"
MEMORY_HOG = "held = []\nwhile True:\n    held.append(bytearray(1 << 20))\n"
SMALL = {"wall_time_s": 1.0, "cpu_time_s": 1.0}

Item = TypeVar("Item")
Answer = TypeVar("Answer")


@contextmanager
def running_service() -> Iterator[str]:
    """The URL of `nouscoder serve verifier` in a separate process with its defaults."""
    command = [sys.executable, "-m", "nouscoder", "serve", "verifier"]
    addresses = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    process = subprocess.Popen([*command, *addresses], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield _url(process)
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0, "the service must drain and exit with code 0"


def _url(process: subprocess.Popen[str]) -> str:
    seen = []
    assert process.stderr is not None
    for line in process.stderr:
        seen.append(line)
        if line.startswith("{") and "http" in (record := json.loads(line)):
            return f"http://{record['http']}"
    raise RuntimeError("the service did not start: " + "".join(seen)[-2000:])


async def each(items: Sequence[Item], work: Callable[[Item], Awaitable[Answer]]) -> list[Answer]:
    """Run `work` for every item, a few at a time."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(item: Item) -> Answer:
        async with slots:
            return await work(item)

    return await asyncio.gather(*(one(item) for item in items))


@dataclass(frozen=True, slots=True)
class Judged:
    """The expected and the actual verdict of a program on a problem."""

    problem_id: str
    program: str
    truth: str
    verdict: str
    detail: str = ""

    @property
    def right(self) -> bool:
        """Whether the verdict is the expected one."""
        return self.verdict == self.truth


@dataclass(frozen=True, slots=True)
class LeetCodeProblem:
    """A problem, its reference solution, and the data set's own test of it."""

    problem: Problem
    program: str
    own_test: str


def read_leetcode(path: Path) -> list[LeetCodeProblem]:
    """The problems of LeetCodeDataset."""
    known = format_named("leetcode")
    read = [(known.read(row.value, row.number), row.value) for row in known.rows(path, 0)]
    return [
        LeetCodeProblem(item.problem, item.references[0].code, f"{row['test']}\ncheck({row['entry_point']})\n")
        for item, row in read
    ]


def read_code_contests(path: Path) -> list[Problem]:
    """The problems of rllm's CodeContests."""
    return [item.problem for item in read_referenced(path)]


async def bare_check(item: LeetCodeProblem) -> bool:
    """Whether a bare Python process accepts the reference solution by the data set's own test."""
    assert isinstance(item.problem.tests, CallTests)
    code = f"{item.problem.tests.setup}\n{item.program}\n{item.own_test}"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    await process.communicate(code.encode())
    return process.returncode == 0


async def judge_leetcode(url: str, problems: Sequence[LeetCodeProblem]) -> list[Judged]:
    """Grade the reference solutions with the service and with a bare process."""
    async with AsyncClient(url) as client:

        async def one(item: LeetCodeProblem) -> Judged:
            tests = item.problem.tests
            assert isinstance(tests, CallTests)
            cases = [{"args": list(c.args), "kwargs": c.kwargs, "expected": c.expected} for c in tests.cases]
            record = {"type": "call", "entry_point": tests.entry_point, "setup": tests.setup, "cases": cases}
            answer = await client.grade(code=item.program, tests=record)
            truth = "accepted" if await bare_check(item) else "not accepted"
            return Judged(
                item.problem.problem_id, "reference", truth, answer["verdict"], json.dumps(answer["first_failure"])
            )

        return await each(problems, one)


def same_tokens(output: str, tests: StdinTests) -> bool:
    """Whether a program that always prints `output` is right, computed without the code under test."""
    return all(case.output.split() == output.split() for case in tests.cases)


async def judge_contests(url: str, problems: Sequence[Problem]) -> list[Judged]:
    """Grade four programs on each problem."""
    async with AsyncClient(url) as client:

        async def one(work: tuple[Problem, str]) -> Judged:
            problem, name = work
            tests = problem.tests
            assert isinstance(tests, StdinTests)
            code, limits, truth = {
                "empty": ("", {}, "accepted" if same_tokens("", tests) else "wrong_answer"),
                "print(0)": ("print(0)", {}, "accepted" if same_tokens("0", tests) else "wrong_answer"),
                "endless": (ENDLESS, SMALL, "time_limit_exceeded"),
                "memory hog": (MEMORY_HOG, {"memory_bytes": 256 * 1024**2}, "memory_limit_exceeded"),
            }[name]
            cases = [{"input": case.input, "output": case.output} for case in tests.cases]
            record = {"code": code, "tests": {"type": "stdin", "cases": cases}, "limits": limits}
            answer = await client.grade_record(record)
            return Judged(problem.problem_id, name, truth, answer["verdict"], answer["detail"])

        names = ("empty", "print(0)", "endless", "memory hog")
        return await each([(problem, name) for problem in problems for name in names], one)


def report_of(judged: Sequence[Judged]) -> str:
    """The counts, then every difference."""
    counts = Counter((one.program, one.truth, one.verdict) for one in judged)
    lines = [f"{n:4} x {program}: truth {truth}, verdict {verdict}" for (program, truth, verdict), n in counts.items()]
    lines += [f"DISAGREEMENT {one}" for one in judged if not one.right]
    return "\n".join(lines)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """One service for this module's tests."""
    with running_service() as address:
        yield address


async def test_reference_solutions_are_accepted_where_the_data_set_accepts_them(url: str) -> None:
    problems = read_leetcode(LEETCODE)
    with_library = [item for item in problems if "sortedcontainers" in item.program]
    judged = await judge_leetcode(url, problems[::4] + with_library)
    assert len(judged) == 51
    assert all(one.right for one in judged), report_of(judged)


@pytest.mark.heavy
async def test_wrong_programs_get_the_right_verdict_on_real_problems(url: str) -> None:
    judged = await judge_contests(url, read_code_contests(CODE_CONTESTS)[::15])
    assert len(judged) == 44
    assert all(one.right for one in judged), report_of(judged)


async def _whole() -> AsyncIterator[tuple[str, list[Judged], float]]:
    with running_service() as address:
        begun = time.monotonic()
        judged = await judge_leetcode(address, read_leetcode(LEETCODE))
        yield "200 LeetCode reference solutions, call tests", judged, time.monotonic() - begun
        begun = time.monotonic()
        judged = await judge_contests(address, read_code_contests(CODE_CONTESTS))
        yield "165 CodeContests problems, four programs each", judged, time.monotonic() - begun


async def main() -> int:
    """Grade both complete sets. Exit code 1 when any verdict is wrong."""
    wrong = 0
    async for title, judged, seconds in _whole():
        wrong += sum(not one.right for one in judged)
        print(f"{title}: {len(judged)} verdicts in {seconds:.1f} s, bare checks among them")
        print(report_of(judged))
    print("no disagreement" if not wrong else f"{wrong} disagreements")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
