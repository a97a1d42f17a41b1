"""A problem file loses problems within a run: leases go on, and what cannot be asked any more is counted by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nouscoder.broker.core import Broker
from nouscoder.broker.errors import Refused
from nouscoder.cli.status import status_lines
from nouscoder.data.problem_index import ProblemIndex, build_index
from nouscoder.domain.learner_state import RunIdentity, TrainedGroups, TrainedState
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import StdinCase, StdinTests
from nouscoder.rpc.pairs import HEADER
from nouscoder.store.blobs import FolderBlobs
from nouscoder.store.tests import TestStore

GEN = "generation-h-0-1"
BEGUN = TrainedState(RunIdentity("ab" * 16, "/runs/test", 0, 4), 0, 0, 0, TrainedGroups(), None)


def index_of(folder: Path, *problem_ids: str) -> ProblemIndex:
    store = TestStore(FolderBlobs(folder))
    problems = [Problem(name, f"problem {name}", StdinTests((StdinCase("1\n", "1\n"),))) for name in problem_ids]
    build_index(problems, folder / "problems.sqlite", store)
    return ProblemIndex(folder / "problems.sqlite", store)


async def test_groups_whose_problem_is_gone_are_given_up_and_counted_and_leases_go_on(
    tmp_path: Path, new_broker: Callable[..., Broker], broker_rig: Any
) -> None:
    before = new_broker("broker.pipeline_k=3")
    await before.restore_run(BEGUN)
    await before.publish_policy(broker_rig.manifest(0))
    await broker_rig.sample(before, 12)
    held = (await before.lease_tasks(GEN, 6, 0)).tasks
    await broker_rig.impatient_sweep(before)
    asked = {item.task.problem_id for item in held}
    gone = held[0].task.problem_id

    kept = [problem.problem_id for problem in broker_rig.problems if problem.problem_id != gone]
    after = Broker(before._config, broker_rig.url, index_of(tmp_path, *kept))
    await after.check_state()
    again = (await after.lease_tasks(GEN, 100, 0)).tasks
    assert asked - {gone} <= {item.task.problem_id for item in again}
    assert gone not in {item.task.problem_id for item in again}
    gradings = (await after.lease_grading("verifier-h-0-1", 100, 0)).gradings
    assert gradings
    assert gone not in {HEADER.decode(item.header).problem_id for item in gradings}
    status = await after.status()
    assert status.ledger.balanced
    assert status.missing_problems == {gone: status.ledger.abandoned}
    assert status.ledger.abandoned % 4 == 0
    assert f"problem {gone} is gone from the problem file: {status.ledger.abandoned} rollouts abandoned" in "\n".join(
        status_lines(status)
    )
    await after.close()


async def test_a_problem_file_with_other_problems_is_refused_by_name(
    tmp_path: Path, new_broker: Callable[..., Broker], broker_rig: Any
) -> None:
    began = new_broker()
    await began.restore_run(BEGUN)
    other = Broker(began._config, broker_rig.url, index_of(tmp_path, "p0", "q7"))
    sentence = "is not the one that run test-.* began with: 1 of its 2 problems are new, for example 'q7'"
    with pytest.raises(Refused, match=sentence):
        await other.check_state()
    with pytest.raises(Refused, match=sentence):
        await other.restore_run(BEGUN)
    await other.close()
