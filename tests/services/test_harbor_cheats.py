"""Answers to Harbor folders that want the reward without the task, in both modes; and honest ones beside them.

In each backend all of them use one slot in turn, which on pods is one warm pod.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio
from tests.harbor_answers import (
    FOLDER,
    HONEST,
    HONEST_FILES,
    HONEST_MODULES,
    KEPT,
    KNOWN,
    LIMITS,
    NEW,
    OF_MODULES,
    PARTLY,
    PLANTED,
    TASK,
)
from tests.isolated_graders import grader_on, isolated
from tests.services.test_harbor_folders import imported, written

from nouscoder.data.problem_parquet import read_parquet
from nouscoder.domain.problem import Problem
from nouscoder.domain.verdict import Verdict
from nouscoder.verifier.grading.grader import Grader

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1800), pytest.mark.alone]


def problem_of(place: Path, mode: str, artifact: str, files: Mapping[str, str]) -> Problem:
    """The folder in one of the two modes, imported."""
    task = TASK.replace("MODE", mode).replace("ARTIFACT", artifact)
    written(place / "task", FOLDER | {"task.toml": task} | dict(files))
    code, text = imported(place / "task", place / "out.parquet")
    assert code == 0, text
    return next(iter(read_parquet(place / "out.parquet"))).problem


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def grader(request: pytest.FixtureRequest) -> AsyncIterator[Grader]:
    """A grader with the backend that a test names."""
    async with grader_on(request, request.param) as made:
        yield made


on_each = pytest.mark.parametrize("grader", isolated(), indirect=True, scope="module")
on_each_long = pytest.mark.parametrize("grader", isolated(long=True), indirect=True, scope="module")


@pytest.fixture(scope="module", params=["separate", "shared"])
def problem(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Problem:
    """The folder in one of the two modes."""
    return problem_of(tmp_path_factory.mktemp(request.param), request.param, "/app/out.txt", {})


@pytest.fixture(scope="module", params=["separate", "shared"])
def open_problem(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Problem:
    """The folder in one of the two modes, which keeps all of /app."""
    return problem_of(tmp_path_factory.mktemp(request.param), request.param, "/app", {})


async def verdict_on(grader: Grader, problem: Problem, answer: str) -> Verdict:
    """The verdict of an answer, in a block as a policy gives it."""
    rules = problem.grading_rules()
    return await grader.grade(rules.submission(problem.tests, f"So:\n```bash\n{answer}\n```"))


async def check(grader: Grader, problem: Problem, answers: Mapping[str, str], wanted: str) -> None:
    """Grade the answers, one after the other. LIMITS has those that are refused in another way."""
    kinds = {name: (await verdict_on(grader, problem, answer)).kind.value for name, answer in answers.items()}
    # gVisor tells less of the time that other work took from a program, and either is a refusal.
    late = ("time_limit_exceeded",) if wanted == "wrong_answer" and grader.backend != "local" else ()
    right = {name: (*LIMITS.get(name, (wanted,)), *late) for name in answers}
    print(f"{grader.backend}: {len(answers)} answers, {sum(kinds[one] in right[one] for one in answers)} {wanted}")
    assert {name: kind for name, kind in kinds.items() if kind not in right[name]} == {}


@on_each
async def test_honest_answers_are_accepted(grader: Grader, problem: Problem) -> None:
    await check(grader, problem, HONEST, "accepted")


@on_each
async def test_dishonest_answers_are_refused(grader: Grader, problem: Problem) -> None:
    await check(grader, problem, KNOWN, "wrong_answer")


@on_each_long
async def test_files_of_an_answer_never_replace_what_tests_are_run_with(grader: Grader, open_problem: Problem) -> None:
    await check(grader, open_problem, PLANTED, "wrong_answer")


@on_each_long
async def test_what_an_answer_leaves_or_takes_over_never_meets_the_tests(grader: Grader, open_problem: Problem) -> None:
    await check(grader, open_problem, NEW, "wrong_answer")


@on_each_long
async def test_what_an_answer_keeps_in_a_sandbox_or_a_pod_meets_no_tests(grader: Grader, open_problem: Problem) -> None:
    await check(grader, open_problem, KEPT, "wrong_answer")


@on_each_long
async def test_honest_answers_are_accepted_where_all_of_app_stays(grader: Grader, open_problem: Problem) -> None:
    await check(grader, open_problem, HONEST | HONEST_FILES, "accepted")


@on_each_long
@pytest.mark.parametrize("mode", ["separate", "shared"])
async def test_tests_can_import_the_modules_of_an_answer(grader: Grader, tmp_path: Path, mode: str) -> None:
    folder = await asyncio.to_thread(problem_of, tmp_path, mode, "/app", OF_MODULES)
    await check(grader, folder, HONEST_MODULES, "accepted")


@on_each
@pytest.mark.parametrize("mode", ["separate", "shared"])
async def test_a_partial_reward_is_no_number_that_the_answer_prints(grader: Grader, tmp_path: Path, mode: str) -> None:
    folder = await asyncio.to_thread(problem_of, tmp_path, mode, "/app/out.txt", PARTLY)
    for said in ("echo 1", "yes 1 | head -c 200000", "echo points 0.9"):
        verdict = await verdict_on(grader, folder, f"echo '{said}' > tool")
        assert (verdict.kind.value, verdict.score) == ("wrong_answer", 0.25), said
