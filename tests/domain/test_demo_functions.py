"""The problems of `nouscoder demo --real`: disjoint splits, and tests that tell every task from every other."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from random import Random
from typing import Any

import pytest

from nouscoder.demo.functions import KINDS, Kind, Task, cases_of, function_problems, split_of
from nouscoder.demo.problems import Split
from nouscoder.domain.submission import CallTests


def variants(task: Task) -> list[Any]:
    return list(task.constants) or [None]


def results(kind: Kind, task: Task, constant: Any, of: Task, its_constant: Any) -> list[Any]:
    """What `task` returns for the arguments of the tests of another one; its errors too."""
    known = () if constant is None else (constant,)
    found: list[Any] = []
    for case in cases_of(kind, of, its_constant, Random(7)):
        try:
            found.append(task.function(*case.args, *known))
        except ArithmeticError as error:
            found.append(repr(error))
    return found


def expected(kind: Kind, task: Task, constant: Any) -> list[Any]:
    return [case.expected for case in cases_of(kind, task, constant, Random(7))]


def test_no_task_passes_the_tests_of_another() -> None:
    alike = [
        (mine.what, theirs.what)
        for kind in KINDS
        for one, other in combinations(kind.tasks, 2)
        for mine, theirs in ((one, other), (other, one))
        if results(kind, mine, variants(mine)[0], theirs, variants(theirs)[-1])
        == expected(kind, theirs, variants(theirs)[-1])
    ]
    assert not alike


def test_another_constant_fails_the_tests() -> None:
    alike = [
        (task.what, one, other)
        for kind in KINDS
        for task in kind.tasks
        for one, other in combinations(task.constants, 2)
        if results(kind, task, one, task, other) == expected(kind, task, other)
    ]
    assert not alike


def test_no_task_is_in_both_splits_whatever_the_seeds() -> None:
    prompts: dict[Split, set[str]] = {split: set() for split in Split}
    tasks: dict[Split, set[str]] = {split: set() for split in Split}
    for split, size in ((Split.TRAIN, 400), (Split.HELD_OUT, 80)):
        for seed in range(3):
            made = function_problems(split, size, seed=seed)
            assert len({problem.prompt for problem in made}) == len({problem.problem_id for problem in made}) == size
            prompts[split] |= {problem.prompt for problem in made}
            tasks[split] |= {problem.problem_id.split("-")[0] for problem in made}
    assert not prompts[Split.TRAIN] & prompts[Split.HELD_OUT]
    assert not tasks[Split.TRAIN] & tasks[Split.HELD_OUT]
    sizes = Counter(split_of(kind, task) for kind in KINDS for task in kind.tasks)
    assert sizes[Split.HELD_OUT] > 40, "enough tasks are held out to measure on"


def test_a_problem_names_its_function_and_the_same_seed_makes_the_same() -> None:
    made = function_problems(Split.HELD_OUT, 80, seed=1)
    assert made == function_problems(Split.HELD_OUT, 80, seed=1)
    assert made != function_problems(Split.HELD_OUT, 80, seed=2)
    for problem in made:
        assert isinstance(problem.tests, CallTests)
        assert f"`{problem.tests.entry_point}(" in problem.prompt
        assert len(problem.tests.cases) == 20
    with pytest.raises(ValueError, match="fewer than the 5000 requested"):
        function_problems(Split.TRAIN, 5000, seed=0)
