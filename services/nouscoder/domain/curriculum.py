"""What a run has learned of each problem: how often it was sampled and accepted, and its last pass rates.

The record of a problem changes in the script that completes a group (broker/lua/common.lua). Its text form is
"GROUPS FILTERED SAMPLED ACCEPTED SOLVED_IN_ROW PLACE HISTORY", where HISTORY is "ACCEPTED/SAMPLED,..." of the last
groups.

INVARIANT: of two records of one problem in one run, the one with more groups is the later one, so a copy never
overwrites what came after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from nouscoder.domain.signal import SCORE_DIGITS


class GroupOutcome(NamedTuple):
    """Rollouts of one complete group."""

    accepted: int
    sampled: int


@dataclass(frozen=True, slots=True)
class ProblemStatistics:
    """The complete groups of one problem.

    `groups` are those with a graded rollout, `filtered` those of equal rewards that were filtered. `sampled` and
    `accepted` are rollouts over the run. `solved_in_row` counts the last groups in a row whose pass rate reached
    broker.curriculum.retire_pass_rate. `place` is the place in the curriculum of the latest group, -1 if none had one.
    `history` has the last groups, the newest at the end. `no_code` are rollouts without code.
    """

    problem_id: str
    groups: int = 0
    filtered: int = 0
    sampled: int = 0
    accepted: int = 0
    solved_in_row: int = 0
    place: int = -1
    history: tuple[GroupOutcome, ...] = ()
    no_code: int = 0

    @property
    def pass_rate(self) -> float:
        """Accepted rollouts by graded rollouts over the run; 0 without one."""
        return self.accepted / self.sampled if self.sampled else 0.0

    @property
    def last_pass_rate(self) -> float:
        """The pass rate of the last group; 0 without one."""
        return self.history[-1].accepted / self.history[-1].sampled if self.history else 0.0

    def to_text(self) -> str:
        """As Redis keeps it."""
        history = ",".join(f"{accepted}/{sampled}" for accepted, sampled in self.history)
        counts = (self.groups, self.filtered, self.sampled, self.accepted, self.solved_in_row, self.place)
        return f"{' '.join(map(str, counts))} {history} {self.no_code}"

    @classmethod
    def of_text(cls, problem_id: str, text: str) -> ProblemStatistics:
        """From `to_text`; records of earlier releases end with the history. Raises ValueError."""
        try:
            *counts, history, no_code = text.split(" ") if text.count(" ") > 6 else [*text.split(" "), "0"]
            groups, filtered, sampled, accepted, solved_in_row, place = map(int, counts)
            pairs = [entry.split("/") for entry in history.split(",") if entry]
            outcomes = tuple(GroupOutcome(int(accepted), int(sampled)) for accepted, sampled in pairs)
        except ValueError as error:
            raise ValueError(f"{text[:100]!r} is not a record of a problem") from error
        return cls(problem_id, groups, filtered, sampled, accepted, solved_in_row, place, outcomes, int(no_code))


@dataclass(frozen=True, slots=True)
class CurriculumState:
    """The place that the curriculum uses next, and the records of the problems."""

    cursor: int = 0
    problems: tuple[ProblemStatistics, ...] = ()

    def to_json(self) -> dict[str, object]:
        """For a file."""
        return {"cursor": self.cursor, "problems": {each.problem_id: each.to_text() for each in self.problems}}

    @classmethod
    def of_records(cls, cursor: int, records: Iterable[tuple[str, str]]) -> CurriculumState:
        """From pairs of problem id and text. Raises ValueError."""
        return cls(cursor, tuple(ProblemStatistics.of_text(problem_id, text) for problem_id, text in records))


def potential(pass_rate: float) -> float:
    """4p(1 - p) (R1-Code-Interpreter): 1 for a problem that is solved half of the time, 0 for always or never."""
    return round(4 * pass_rate * (1 - pass_rate), SCORE_DIGITS)


def task_seed(run_seed: int, rollout_id: str) -> int:
    """The seed of one rollout's random stream, in [1, 2^63): the same however often it is sampled again."""
    digest = hashlib.sha256(f"{run_seed}:{rollout_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % (2**63 - 1) + 1
