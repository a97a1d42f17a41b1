"""The problems that OpenEnv and MCP clients are offered (verifier/api/compat/problem_set.py)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from nouscoder.data.problems import ProblemFileError
from nouscoder.domain.verdict import VerdictKind
from nouscoder.store.blobs import open_blobs
from nouscoder.store.tests_cache import TestsCache
from nouscoder.verifier.api.compat.problem_set import (
    NO_PROBLEMS,
    NoSuchProblem,
    ProblemSet,
    SampleAnswer,
    open_problem_set,
    prompt_of,
)
from nouscoder.verifier.api.streaming import NotGraded
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.base import RunResult, SandboxError
from nouscoder.verifier.sandbox.fake import FakeSandbox, ended

SECRET = "only-the-hidden-tests-know-this"
ECHO, FAILS, LOST, BREAKS = "print('echo')", "print('fails')", "print('lost')", "raise SystemExit(1)"
PROBLEMS: list[dict[str, object]] = [
    {
        "problem_id": "echo",
        "prompt": "Print the input.",
        "tests": {"type": "stdin", "cases": [{"input": SECRET, "output": SECRET}]},
        "public_tests": {"type": "stdin", "cases": [{"input": "shown", "output": "shown"}]},
    },
    {
        "problem_id": "blind",
        "prompt": "Print the input again.",
        "tests": {"type": "stdin", "cases": [{"input": SECRET, "output": SECRET}]},
    },
]


def _lost(_: bytes) -> RunResult:
    raise SandboxError("the machine is gone")


@asynccontextmanager
async def offered(folder: Path, problems: list[dict[str, object]] | None = None) -> AsyncIterator[ProblemSet]:
    """The problem set of a file, over a sandbox in which ECHO prints its input."""
    file = folder / "problems.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in problems or PROBLEMS))
    sandbox = FakeSandbox({FAILS: lambda _: ended(b"no"), LOST: _lost, BREAKS: lambda _: ended(b"", exit_code=1)})
    await sandbox.start()
    grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()))
    cache = TestsCache(folder / "cache", 2**20)
    async with open_problem_set(str(file), grader, cache) as problems_of_file:
        yield problems_of_file
    cache.close()
    await grader.close()


async def test_problems_are_found_by_name_and_by_place(tmp_path: Path) -> None:
    async with offered(tmp_path) as problems:
        assert problems.problem_ids == ("echo", "blind")
        assert problems.at(1) == problems.problem("blind")
        assert prompt_of(problems.at(0)) == "Print the input."
        for place in (-1, 2):
            with pytest.raises(NoSuchProblem, match=f"there is no problem {place}: the last is 1"):
                problems.at(place)
        with pytest.raises(NoSuchProblem, match="there is no problem 'other'"):
            problems.problem("other")


async def test_a_service_without_a_file_offers_nothing_and_says_so(tmp_path: Path) -> None:
    cache = TestsCache(tmp_path, 2**20)
    async with open_problem_set("", Grader(FakeSandbox(), VerifierMetrics(CollectorRegistry())), cache) as problems:
        assert problems.problem_ids == ()
        with pytest.raises(NoSuchProblem, match=NO_PROBLEMS):
            problems.at(0)
        with pytest.raises(NoSuchProblem, match=NO_PROBLEMS):
            problems.problem("echo")
    with pytest.raises(ProblemFileError, match="missing"):
        async with open_problem_set(str(tmp_path / "missing.jsonl"), problems._grader, cache):
            pass


@pytest.mark.parametrize("answer", [SampleAnswer(f"So:\n```python\n{ECHO}\n```"), SampleAnswer(ECHO, is_code=True)])
async def test_an_answer_with_a_block_and_a_program_are_graded_alike(tmp_path: Path, answer: SampleAnswer) -> None:
    async with offered(tmp_path) as problems:
        problem = problems.problem("echo")
        public = await problems.public_verdict(problem, answer)
        hidden = await problems.hidden_verdict(problem, answer)
        assert public is not None
        assert (public.kind, hidden.kind) == (VerdictKind.ACCEPTED, VerdictKind.ACCEPTED)
        assert await problems.public_verdict(problems.problem("blind"), answer) is None


@pytest.mark.parametrize("code", [BREAKS, FAILS])
async def test_how_a_program_fails_a_hidden_test_is_not_told(tmp_path: Path, code: str) -> None:
    """Before, the kinds of verdict told a hidden input: a digit of base 3 an episode."""
    async with offered(tmp_path) as problems:
        hidden = await problems.hidden_verdict(problems.problem("echo"), SampleAnswer(code, is_code=True))
    assert (hidden.kind, hidden.passed, hidden.detail) == (VerdictKind.WRONG_ANSWER, 0, "")


async def test_public_tests_are_shown_and_hidden_ones_never(tmp_path: Path) -> None:
    """The module's INVARIANT."""
    async with offered(tmp_path) as problems:
        problem = problems.problem("echo")
        public = await problems.public_verdict(problem, SampleAnswer(FAILS, is_code=True))
        hidden = await problems.hidden_verdict(problem, SampleAnswer(FAILS, is_code=True))
        assert public is not None
        assert public.first_failure is not None
        assert public.first_failure.input == "shown"
        assert hidden.kind is VerdictKind.WRONG_ANSWER
        assert (hidden.first_failure, hidden.tests) == (None, ())
        for said in (problem, public, hidden):
            assert SECRET not in json.dumps(asdict(said), default=str)
        lost = SampleAnswer(LOST, is_code=True)
        for verdict in (problems.public_verdict(problem, lost), problems.hidden_verdict(problem, lost)):
            with pytest.raises(NotGraded, match="the machine is gone"):
                await verdict


async def test_hidden_tests_that_cannot_be_read_are_a_fault_of_the_service(tmp_path: Path) -> None:
    async with offered(tmp_path) as problems:
        store = open_blobs(str(tmp_path / "problems.jsonl.index"))
        for found in list(store.list("tests")):
            store.delete(found.name)
        with pytest.raises(NotGraded, match="the tests of blind cannot be read"):
            await problems.hidden_verdict(problems.problem("blind"), SampleAnswer(ECHO, is_code=True))


async def test_the_language_of_a_program_is_one_of_the_problem(tmp_path: Path) -> None:
    both = [{**PROBLEMS[0], "languages": ["python", "bash"]}]
    async with offered(tmp_path, both) as problems:
        problem = problems.problem("echo")
        for language, kind in (("bash", VerdictKind.ACCEPTED), ("", VerdictKind.COMPILE_ERROR)):
            verdict = await problems.hidden_verdict(problem, SampleAnswer("cat -", is_code=True, language=language))
            assert verdict.kind is kind
        with pytest.raises(InvalidSubmission, match="language: 'perl' is none of this problem's: python, bash"):
            await problems.hidden_verdict(problem, SampleAnswer("cat -", is_code=True, language="perl"))
