"""Which problem a group gets, and which seed a rollout: pure functions of the seed, a place and the statistics.

A curriculum is a schedule and gates. The schedule puts a problem at each place 0, 1, 2, ...: stages of shuffled epochs
over pools of problems. A gate skips places because of the statistics of their problems.

INVARIANT: the choice depends only on seed, place and statistics, so a restarted broker continues with the same choices.
Every epoch has each problem of its pool at exactly one place.

The statistics say what a run has learned of each problem: how often it was sampled and accepted, and its last pass
rates. The record of a problem changes in the script that completes a group (broker/lua/common.lua). Its text form is
"GROUPS FILTERED SAMPLED ACCEPTED SOLVED_IN_ROW PLACE HISTORY", where HISTORY is "ACCEPTED/SAMPLED,..." of the last
groups.

INVARIANT: of two records of one problem in one run, the one with more groups is the later one, so a copy never
overwrites what came after it.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


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
    `history` has the last groups, the newest at the end.
    """

    problem_id: str
    groups: int = 0
    filtered: int = 0
    sampled: int = 0
    accepted: int = 0
    solved_in_row: int = 0
    place: int = -1
    history: tuple[GroupOutcome, ...] = ()

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
        return f"{' '.join(map(str, counts))} {history}"

    @classmethod
    def of_text(cls, problem_id: str, text: str) -> ProblemStatistics:
        """From `to_text`. Raises ValueError."""
        try:
            *counts, history = text.split(" ")
            groups, filtered, sampled, accepted, solved_in_row, place = map(int, counts)
            pairs = [entry.split("/") for entry in history.split(",") if entry]
            outcomes = tuple(GroupOutcome(int(accepted), int(sampled)) for accepted, sampled in pairs)
        except ValueError as error:
            raise ValueError(f"{text[:100]!r} is not a record of a problem") from error
        return cls(problem_id, groups, filtered, sampled, accepted, solved_in_row, place, outcomes)


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


@dataclass(frozen=True, slots=True)
class Stage:
    """A pool of problems and its number of epochs. The last stage of a schedule never ends."""

    problem_ids: tuple[str, ...]
    epochs: int = 1


@dataclass(frozen=True, slots=True)
class Choice:
    """The problem at a place. `epoch` counts from 0 over all stages."""

    place: int
    epoch: int
    problem_id: str


class Schedule:
    """Stages of shuffled epochs. Raises ValueError when there is no stage, or one without a problem."""

    def __init__(self, stages: Sequence[Stage], seed: int) -> None:
        if not stages or not all(stage.problem_ids for stage in stages):
            raise ValueError("a curriculum needs at least one problem in each stage")
        self._stages = tuple(stages)
        self._seed = seed
        self._first_places, self._first_epochs = [0], [0]
        for stage in stages[:-1]:
            self._first_places.append(self._first_places[-1] + stage.epochs * len(stage.problem_ids))
            self._first_epochs.append(self._first_epochs[-1] + stage.epochs)
        self._shuffled: tuple[int, list[str]] = (-1, [])  # epoch, its order

    def at(self, place: int) -> Choice:
        """The problem at a place, counted from 0."""
        stage, epoch, offset = self._find(place)
        if epoch != self._shuffled[0]:
            order = list(stage.problem_ids)
            random.Random(f"nouscoder:{self._seed}:{epoch}").shuffle(order)
            self._shuffled = (epoch, order)
        return Choice(place, epoch, self._shuffled[1][offset])

    def end_of_round(self, place: int) -> int:
        """The place before which each problem comes, of all that come at `place` or later."""
        first, last = self._first_places[-1], len(self._stages[-1].problem_ids)
        return first + (max(0, place - first) // last + (2 if place > first else 1)) * last

    def epoch_of(self, place: int) -> int:
        """The epoch of a place; 0 for one before the first."""
        return self._find(max(0, place))[1]

    def _find(self, place: int) -> tuple[Stage, int, int]:
        """Stage, epoch, and the place within the epoch."""
        number = bisect_right(self._first_places, place) - 1
        stage = self._stages[number]
        epoch, offset = divmod(place - self._first_places[number], len(stage.problem_ids))
        return stage, self._first_epochs[number] + epoch, offset


class Gate(Protocol):
    """Decides whether the problem at a place is used there."""

    def admits(self, choice: Choice, record: ProblemStatistics | None) -> bool:
        """`record` is None while no group of the problem is complete."""
        ...


@dataclass(frozen=True, slots=True)
class OnlineFilter:
    """Retires a problem after `retire_after` solved groups in a row; uses it again after `recheck_epochs` epochs.

    INVARIANT: with `recheck_epochs` 0 a retired problem is never used again.
    """

    schedule: Schedule
    retire_after: int
    recheck_epochs: int

    def admits(self, choice: Choice, record: ProblemStatistics | None) -> bool:
        """Whether the problem is not retired."""
        if not self.is_retired(record):
            return True
        if record is None or self.recheck_epochs == 0:
            return False
        return choice.epoch - self.schedule.epoch_of(record.place) > self.recheck_epochs

    def is_retired(self, record: ProblemStatistics | None) -> bool:
        """Whether the last groups of the problem were solved."""
        return record is not None and record.solved_in_row >= self.retire_after


@dataclass(frozen=True, slots=True)
class Priorities:
    """Uses a problem at a share of its places: its weight, or its failure rate in the run if there are no weights.

    The share is at least `least`, so each problem is used again.
    """

    seed: int
    least: float
    weights: Mapping[str, float] | None = None

    def admits(self, choice: Choice, record: ProblemStatistics | None) -> bool:
        """Draws from a random stream that belongs to the place."""
        if self.weights is not None:
            share = self.weights.get(choice.problem_id, 0.0)
        else:
            share = 1.0 - record.pass_rate if record is not None else 1.0
        return random.Random(f"nouscoder:{self.seed}:priority:{choice.place}").random() < max(self.least, share)


@dataclass(frozen=True, slots=True)
class Curriculum:
    """A schedule with gates; a place is used when every gate admits it."""

    schedule: Schedule
    gates: tuple[Gate, ...] = ()

    def choices_from(self, place: int, count: int) -> list[Choice]:
        """The problems at `count` places from this one on, before the gates."""
        return [self.schedule.at(number) for number in range(place, place + count)]

    def admitted(
        self, choices: Sequence[Choice], records: Mapping[str, ProblemStatistics] | None = None
    ) -> list[Choice]:
        """Those that every gate admits, by the records of their problems."""
        known = records or {}
        return [c for c in choices if all(gate.admits(c, known.get(c.problem_id)) for gate in self.gates)]

    def is_exhausted(self, place: int, records: Mapping[str, ProblemStatistics]) -> bool:
        """Whether no problem can come at `place` or later, because all that could are retired for good."""
        for_good = [gate for gate in self.gates if isinstance(gate, OnlineFilter) and gate.recheck_epochs == 0]
        if not for_good:
            return False
        left = {self.schedule.at(number).problem_id for number in range(place, self.schedule.end_of_round(place))}
        return all(any(gate.is_retired(records.get(name)) for gate in for_good) for name in left)


def potential(pass_rate: float) -> float:
    """4p(1 - p) (R1-Code-Interpreter): 1 for a problem that is solved half of the time, 0 for always or never."""
    return 4 * pass_rate * (1 - pass_rate)


def potential_stages(pass_rates: Mapping[str, float], num_stages: int, epochs: int) -> list[Stage]:
    """Stage i of n has the i / n of the problems with the highest potential, so the last has all."""
    ranked = sorted(pass_rates, key=lambda problem_id: (-potential(pass_rates[problem_id]), problem_id))
    sizes = [-(-len(ranked) * number // num_stages) for number in range(1, num_stages + 1)]
    return [Stage(tuple(ranked[:size]), epochs) for size in sizes]


def fixed_subset(problem_ids: Sequence[str], size: int, seed: int) -> tuple[str, ...]:
    """`size` of the problems, chosen by seed and id: another order, or other problems, change as little as possible."""
    ranked = sorted(problem_ids, key=lambda problem_id: hashlib.sha256(f"{seed}:{problem_id}".encode()).digest())
    chosen = set(ranked[:size])
    return tuple(problem_id for problem_id in problem_ids if problem_id in chosen)


def task_seed(run_seed: int, rollout_id: str) -> int:
    """The seed of one rollout's random stream, in [1, 2^63): the same however often it is sampled again."""
    digest = hashlib.sha256(f"{run_seed}:{rollout_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % (2**63 - 1) + 1
