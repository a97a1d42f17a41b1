"""The curriculum of a run: made from `broker.curriculum`, and offered to the script that admits groups.

INVARIANT: the cursor and the statistics are in Redis only. An offer is made from them, and the script takes only the
places at or after the cursor, so two brokers on one Redis use no place twice.

The script that completes a group writes the statistics (lua/common.lua). INVARIANT: each problem of the run has at most
one record, of a bounded size. A record from the learner's disk replaces one in Redis only if it counts more groups.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from nouscoder.broker.store import Store, Value
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
from nouscoder.domain.curriculum import (
    Choice,
    Curriculum,
    CurriculumState,
    Gate,
    OnlineFilter,
    Priorities,
    ProblemStatistics,
    Schedule,
    Stage,
    fixed_subset,
    potential_stages,
)
from nouscoder.errors import Unusable
from nouscoder.formats.body import Body

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


# Places whose statistics one command reads: the first time, and at most. Some hold retired problems.
_FIRST_LOOK, _LONGEST_LOOK = 64, 4096


def open_curriculum(config: Config, problem_ids: Sequence[str]) -> Curriculum:
    """The curriculum of a run over the problems of its file. Raises Unusable when it cannot be made."""
    section, seed = config.broker.curriculum, config.run.seed
    try:
        schedule = Schedule(_stages(config, problem_ids), seed)
    except ValueError as error:
        raise Unusable(f"broker.curriculum {section.name} leaves no problem of the problem file: {error}") from error
    gates: list[Gate] = []
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
