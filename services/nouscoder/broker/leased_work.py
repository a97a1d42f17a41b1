"""What a worker gets with a lease: the task, or the rollout to grade, of each entry that was leased from a stream."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from nouscoder.broker import streams
from nouscoder.broker.store import Store
from nouscoder.broker.streams import LeasedEntry
from nouscoder.config import Config
from nouscoder.data.problem_index import NotInIndex, ProblemIndex
from nouscoder.domain.curriculum import task_seed
from nouscoder.domain.lease import Lease, LeasedTask, RecordedGrading
from nouscoder.domain.rollout import Sampling, Task
from nouscoder.rpc.rollout_convert import decode_header

log = logging.getLogger(__name__)

Leased = TypeVar("Leased")


class LeasedWork:
    """Builds leased work from entries and problems. It gives up groups whose problem is not in the index any more.

    `run_all_tests`: graders run all tests of a rollout, also after one failed.
    """

    def __init__(self, store: Store, config: Config, problems: ProblemIndex, *, run_all_tests: bool) -> None:
        self._store = store
        self._config = config
        self._problems = problems
        self._run_all_tests = run_all_tests

    async def tasks(self, entries: Sequence[LeasedEntry]) -> tuple[LeasedTask, ...]:
        """The rollouts to sample."""
        return await self._without_missing(entries, self._task)

    async def gradings(self, entries: Sequence[LeasedEntry]) -> tuple[RecordedGrading, ...]:
        """The rollouts to grade."""
        return await self._without_missing(entries, self._grading)

    async def _without_missing(
        self, entries: Sequence[LeasedEntry], leased: Callable[[LeasedEntry], Leased]
    ) -> tuple[Leased, ...]:
        found, missing = [], {}
        for entry in entries:
            try:
                found.append(leased(entry))
            except NotInIndex as error:
                missing[entry.group_id] = error.problem_id
        if missing:
            dropped = await streams.drop_groups(self._store, missing)
            log.warning("groups given up: their problems are gone", extra={"problems": missing, "rollouts": dropped})
        return tuple(found)

    def _task(self, entry: LeasedEntry) -> LeasedTask:
        problem_id, group_id, min_version = entry.values[0].decode(), entry.values[1].decode(), int(entry.values[2])
        problem = self._problems.problem(problem_id)
        seed = task_seed(self._config.run.seed, entry.rollout_id)
        task = Task(
            rollout_id=entry.rollout_id,
            group_id=group_id,
            problem_id=problem_id,
            prompt=problem.prompt,
            sampling=self._config.generation.sampling.record(Sampling, seed=seed),
            min_policy_version=min_version,
            prompt_template=problem.prompt_template,
            public_tests=problem.public_tests,
        )
        return LeasedTask(self._lease(entry), task, num_kept_tokens=int(entry.values[3]))

    def _grading(self, entry: LeasedEntry) -> RecordedGrading:
        header, record = decode_header(entry.values[0]), entry.values[1].decode()
        problem = self._problems.problem(header.problem_id)
        rules = replace(problem.rules, run_all_tests=self._run_all_tests)
        return RecordedGrading(self._lease(entry), header, record, problem.tests_digest, rules)

    def _lease(self, entry: LeasedEntry) -> Lease:
        return Lease(str(entry.ref), self._config.broker.lease_s, entry.ref.delivery)
