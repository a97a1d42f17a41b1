"""The curriculum: pure, complete in every epoch, and resumable from its cursor."""

from __future__ import annotations

from collections import Counter

import pytest

from nouscoder.broker.admission import groups_wanted
from nouscoder.broker.curriculum import Curriculum, task_seed
from nouscoder.broker.rules import Rules
from nouscoder.config import load_config

_IDS = [f"p{i}" for i in range(7)]


def test_every_epoch_has_each_problem_exactly_once() -> None:
    curriculum = Curriculum(_IDS, seed=3)
    epochs = [curriculum.problems_from(7 * epoch, 7) for epoch in range(4)]
    assert all(Counter(epoch) == Counter(_IDS) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_a_new_curriculum_continues_from_any_cursor() -> None:
    whole = Curriculum(_IDS, seed=3).problems_from(0, 40)
    for cursor in (0, 6, 7, 13, 29):
        assert Curriculum(_IDS, seed=3).problems_from(cursor, 11) == whole[cursor : cursor + 11]
    assert Curriculum(_IDS, seed=4).problems_from(0, 40) != whole


def test_an_empty_list_of_problems_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one problem"):
        Curriculum([], seed=0)


def test_task_seeds_differ_by_run_and_rollout_and_fit_every_engine() -> None:
    seeds = {task_seed(seed, f"g{g:06d}-{i}") for seed in range(3) for g in range(50) for i in range(8)}
    assert len(seeds) == 3 * 50 * 8
    assert all(0 < seed < 2**63 for seed in seeds)
    assert task_seed(1, "g000001-1") == task_seed(1, "g000001-1")


def test_a_lease_call_admits_the_groups_that_cover_it() -> None:
    rules = Rules.of(load_config(None, ["broker.group_size=4", "broker.batch_size=8", "broker.pipeline_k=3"]).broker)
    assert [groups_wanted(rules, tasks) for tasks in (1, 4, 5)] == [1, 1, 2]
