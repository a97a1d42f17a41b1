"""The pool of proposed problems that a self-play trains on: which are added, and which are retired.

INVARIANT: a problem is in the pool at most once, the pool has at most `size` problems, and a problem is trained on in
at most `max_age` rounds. Each problem that leaves the pool, or finds no room in it, has exactly one reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from nouscoder.domain.curriculum import ProblemStatistics, potential


class Retired(StrEnum):
    """Why a problem left the pool."""

    SOLVED = "solved"
    NEVER_SOLVED = "never solved"
    OLD = "old"
    NO_ROOM = "no room"


@dataclass(frozen=True, slots=True)
class PoolRules:
    """`max_age` is in rounds. A problem is solved when a round's training solves it at this rate or more."""

    size: int = 256
    max_age: int = 4
    solved_at: float = 0.95


@dataclass(frozen=True, slots=True)
class PooledProblem:
    """A proposed problem. `pass_rate` is the last one known, `age` the rounds that trained with it in the pool.

    `groups`: how many groups of its rollouts were sampled in those rounds.
    """

    problem_id: str
    pass_rate: float
    age: int = 0
    groups: int = 0


@dataclass(frozen=True, slots=True)
class PoolChange:
    """The pool after a change, in order of admission, and the problems that are not in it any more."""

    pool: tuple[PooledProblem, ...]
    retired: Mapping[str, Retired]


def next_pool(
    pool: Sequence[PooledProblem],
    trained: Mapping[str, ProblemStatistics],
    accepted: Sequence[PooledProblem],
    rules: PoolRules,
) -> PoolChange:
    """The pool of the next round. `trained` is what the last round's training found, `accepted` are new problems.

    When there is no room for all, those of the highest potential 4p(1 - p) stay; of equal ones the younger.
    """
    retired: dict[str, Retired] = {}
    found: dict[str, PooledProblem] = {}
    for problem in pool:
        older = _older(problem, trained.get(problem.problem_id))
        reason = _reason(older, trained.get(problem.problem_id), rules)
        if reason is None:
            found[older.problem_id] = older
        else:
            retired[older.problem_id] = reason
    for problem in accepted:
        if problem.problem_id not in retired:
            found.setdefault(problem.problem_id, problem)
    ranked = sorted(found.values(), key=lambda one: (-potential(one.pass_rate), one.age))
    retired |= {one.problem_id: Retired.NO_ROOM for one in ranked[rules.size :]}
    return PoolChange(tuple(one for one in found.values() if one.problem_id not in retired), retired)


def _older(problem: PooledProblem, trained: ProblemStatistics | None) -> PooledProblem:
    """The problem after one more round."""
    if trained is None or not trained.sampled:
        return replace(problem, age=problem.age + 1)
    return PooledProblem(problem.problem_id, trained.pass_rate, problem.age + 1, problem.groups + trained.groups)


def _reason(problem: PooledProblem, trained: ProblemStatistics | None, rules: PoolRules) -> Retired | None:
    if trained is not None and trained.sampled:
        if trained.pass_rate >= rules.solved_at:
            return Retired.SOLVED
        if not trained.accepted:
            return Retired.NEVER_SOLVED
    return Retired.OLD if problem.age >= rules.max_age else None
