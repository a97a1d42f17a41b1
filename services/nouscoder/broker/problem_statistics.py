"""The records of the problems in Redis. The script that completes a group writes them (lua/common.lua).

INVARIANT: each problem of the run has at most one record, of a bounded size. A record from the learner's disk replaces
one in Redis only if it counts more groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from nouscoder.broker.store import Store, Value
from nouscoder.domain.curriculum import CurriculumState, ProblemStatistics

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
