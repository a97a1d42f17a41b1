"""The curriculum of a run: made from `broker.curriculum`, and offered to the script that admits groups.

A curriculum is a schedule and gates. The schedule puts a problem at each place 0, 1, 2, ...: stages of shuffled epochs
over pools of problems. A gate skips places because of the statistics of their problems.

INVARIANT: the choice depends only on seed, place and statistics, so a restarted broker continues with the same choices.
Every epoch has each problem of its pool at exactly one place.

INVARIANT: the cursor and the statistics are in Redis only. An offer is made from them, and the script takes only the
places at or after the cursor, so two brokers on one Redis use no place twice.

The script that completes a group writes the statistics (lua/common.lua). INVARIANT: each problem of the run has at most
one record, of a bounded size. A record from the learner's disk replaces one in Redis only if it counts more groups.
"""

from __future__ import annotations

import hashlib
import logging
import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from nouscoder.config import Config
from nouscoder.config.broker import (
    EpochsCurriculum,
    PassRatesCurriculum,
    PoolsCurriculum,
    PotentialCurriculum,
    PrioritiesCurriculum,
    SubsetCurriculum,
)
from nouscoder.data.json_records import checked_records
from nouscoder.data.pass_rates import read_pass_rates
from nouscoder.domain.curriculum import CurriculumState, ProblemStatistics, potential
from nouscoder.errors import Unusable
from nouscoder.formats.body import Body

if TYPE_CHECKING:  # a learner's image, which asks for the order of problems, has no client of Redis
    from nouscoder.broker.store import Store, Value

log = logging.getLogger(__name__)

KEY = "problem_statistics"
# Records that one script writes.
_CHUNK = 1000


async def read_records(store: Store, problem_ids: Sequence[str]) -> dict[str, ProblemStatistics]:
    """The records of these problems; those without a complete group are left out."""
    if not problem_ids:
        return {}
    ids = list(dict.fromkeys(problem_ids))
    texts = await store.fields(KEY, *ids)
    return {
        problem_id: ProblemStatistics.of_text(problem_id, text.decode())
        for problem_id, text in zip(ids, texts, strict=True)
        if text is not None
    }


async def read_state(store: Store) -> CurriculumState:
    """Cursor and all records at one instant."""
    cursor, flat = await store.run("read_curriculum")
    pairs = ((problem_id.decode(), text.decode()) for problem_id, text in zip(flat[::2], flat[1::2], strict=True))
    return CurriculumState.of_records(int(cursor), pairs)


async def restore_state(store: Store, state: CurriculumState) -> int:
    """Write the records that Redis lost, and raise the cursor if it is lower; returns how many records."""
    restored = 0
    for first in range(0, max(1, len(state.problems)), _CHUNK):
        values: list[Value] = [state.cursor]
        for record in state.problems[first : first + _CHUNK]:
            values += [record.problem_id, record.groups, record.to_text()]
        restored += int(await store.run("restore_curriculum", *values))
    return restored


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
    gates: tuple[OnlineFilter | Priorities, ...] = ()

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


# Places whose statistics one command reads: the first time, and at most. Some hold retired problems.
_FIRST_LOOK, _LONGEST_LOOK = 64, 4096


def open_curriculum(config: Config, problem_ids: Sequence[str]) -> Curriculum:
    """The curriculum of a run over the problems of its file. Raises Unusable when it cannot be made."""
    section, seed = config.broker.curriculum, config.run.seed
    try:
        schedule = Schedule(_stages(config, problem_ids), seed)
    except ValueError as error:
        raise Unusable(f"broker.curriculum {section.name} leaves no problem of the problem file: {error}") from error
    gates: list[OnlineFilter | Priorities] = []
    if section.retire_after:
        gates.append(OnlineFilter(schedule, section.retire_after, section.recheck_epochs))
    if isinstance(section, PrioritiesCurriculum):
        weights = _weights(Path(section.priorities)) if section.priorities else None
        gates.append(Priorities(seed, section.least, weights))
    return Curriculum(schedule, tuple(gates))


def _stages(config: Config, problem_ids: Sequence[str]) -> list[Stage]:
    section = config.broker.curriculum
    match section:
        case EpochsCurriculum() | PrioritiesCurriculum():
            return [Stage(tuple(problem_ids))]
        case SubsetCurriculum():
            return [Stage(_subset(section, problem_ids, config.run.seed))]
        case PassRatesCurriculum():
            rates = _known_rates(section.pass_rates, problem_ids)
            return [Stage(tuple(name for name in problem_ids if section.keeps(rates.get(name))))]
        case PoolsCurriculum():
            rates = _known_rates(section.pass_rates, problem_ids)
            pools = [tuple(name for name in problem_ids if pool.keeps(rates.get(name))) for pool in section.stages]
            return [Stage(names, pool.epochs) for names, pool in zip(pools, section.stages, strict=True)]
        case PotentialCurriculum():
            return potential_stages(_known_rates(section.pass_rates, problem_ids), section.parts, section.epochs)


def _subset(section: SubsetCurriculum, problem_ids: Sequence[str], seed: int) -> tuple[str, ...]:
    if section.size:
        pool: Sequence[str] = problem_ids
        if section.pass_rates:
            rates = _known_rates(section.pass_rates, problem_ids)
            pool = [name for name, rate in rates.items() if 0 < rate < 1]
        if len(pool) < section.size:
            raise Unusable(f"broker.curriculum.size is {section.size}, and there are only {len(pool)} problems for it")
        return fixed_subset(pool, section.size, seed)
    known = set(problem_ids)
    unknown = [problem_id for problem_id in section.problem_ids if problem_id not in known]
    if unknown:
        raise Unusable(
            f"broker.curriculum.problem_ids: the problem file lacks {len(unknown)} of them, for example"
            f" {unknown[0][:100]!r}"
        )
    wanted = set(section.problem_ids)
    return tuple(problem_id for problem_id in problem_ids if problem_id in wanted)


def _known_rates(file: str, problem_ids: Sequence[str]) -> dict[str, float]:
    """The base pass rates of the run's problems that have one, in the order of the problem file. Raises Unusable."""
    counts = read_pass_rates(Path(file))
    found = {problem_id: counts[problem_id].rate for problem_id in problem_ids if problem_id in counts}
    if problem_ids and not found:
        raise Unusable(f"broker.curriculum.pass_rates: {file} has the pass rate of no problem of the problem file")
    if len(found) < len(problem_ids):
        missing = len(problem_ids) - len(found)
        log.warning("problems have no base pass rate", extra={"file": file, "problems": missing})
    return found


class PriorityBody(Body):
    """One record of a file of priorities."""

    problem_id: str
    priority: float = Field(ge=0)


def _weights(file: Path) -> dict[str, float]:
    """Priorities divided by the highest one. Raises Unusable."""
    priorities = {body.problem_id: body.priority for body in checked_records(file, PriorityBody)}
    highest = max(priorities.values(), default=0.0)
    if not highest:
        raise Unusable(f"{file}: no problem has a priority above 0")
    return {problem_id: priority / highest for problem_id, priority in priorities.items()}


async def offer(store: Store, curriculum: Curriculum, cursor: int, count: int) -> list[Choice]:
    """Up to `count` of the next problems that the gates admit, from the place `cursor` on. Raises BrokerUnavailable.

    None are found only when all problems are retired for good. The search ends: after a round over all problems what
    was found is enough, a retired problem comes again after broker.curriculum.recheck_epochs unless it is retired for
    good, and priorities admit each at a share of at least broker.curriculum.least.
    """
    if not curriculum.gates:
        return curriculum.choices_from(cursor, count)
    found: list[Choice] = []
    look = max(_FIRST_LOOK, 2 * count)
    start, end = cursor, curriculum.schedule.end_of_round(cursor)
    records: dict[str, ProblemStatistics] = {}
    while len(found) < count and not (cursor >= end and (found or curriculum.is_exhausted(start, records))):
        choices = curriculum.choices_from(cursor, look)
        records |= await read_records(store, [choice.problem_id for choice in choices])
        found += curriculum.admitted(choices, records)
        cursor, look = cursor + look, min(2 * look, _LONGEST_LOOK)
    return found[:count]
