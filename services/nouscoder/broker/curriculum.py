"""Which problem a group gets, and which seed a rollout: pure functions of the run's seed and a number.

INVARIANT: every epoch asks each problem exactly once, in an order fixed by the seed, so the number of the next group
(kept in Redis) is the whole state and a restarted broker goes on exactly.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence


class Curriculum:
    """Shuffled epochs over `problem_ids`. Raises ValueError when there is none."""

    def __init__(self, problem_ids: Sequence[str], seed: int) -> None:
        if not problem_ids:
            raise ValueError("a curriculum needs at least one problem")
        self._problem_ids = tuple(problem_ids)
        self._seed = seed
        self._epoch = -1
        self._order: list[str] = []

    def problem_of(self, group_number: int) -> str:
        """The problem of the group with this number, counted from 0 over the run."""
        epoch, place = divmod(group_number, len(self._problem_ids))
        if epoch != self._epoch:
            self._order = list(self._problem_ids)
            random.Random(f"nouscoder:{self._seed}:{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._order[place]

    def problems_from(self, group_number: int, count: int) -> list[str]:
        """The problems of `count` groups from this number on."""
        return [self.problem_of(number) for number in range(group_number, group_number + count)]


def task_seed(run_seed: int, rollout_id: str) -> int:
    """The seed of one rollout's random stream, in [1, 2^63): the same however often it is sampled again."""
    digest = hashlib.sha256(f"{run_seed}:{rollout_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % (2**63 - 1) + 1
