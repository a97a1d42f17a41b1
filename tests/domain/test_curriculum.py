"""The curriculum: pure, complete in every epoch, and resumable from its cursor; gates skip places by the statistics."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nouscoder.broker.curriculum import (
    Choice,
    Curriculum,
    OnlineFilter,
    Priorities,
    Schedule,
    Stage,
    fixed_subset,
    open_curriculum,
    potential_stages,
)
from nouscoder.broker.store import RunRules, groups_wanted
from nouscoder.config import ConfigError, load_config
from nouscoder.domain.curriculum import CurriculumState, GroupOutcome, ProblemStatistics, potential, task_seed
from nouscoder.errors import Unusable

_IDS = [f"p{i}" for i in range(7)]
_stages = st.lists(
    st.builds(
        lambda size, epochs: Stage(tuple(f"p{i}" for i in range(size)), epochs), st.integers(1, 9), st.integers(1, 3)
    ),
    min_size=1,
    max_size=4,
)
_records = st.builds(
    ProblemStatistics,
    problem_id=st.just("a problem"),
    groups=st.integers(0, 10**6),
    filtered=st.integers(0, 10**6),
    sampled=st.integers(0, 10**6),
    accepted=st.integers(0, 10**6),
    solved_in_row=st.integers(0, 9),
    place=st.integers(-1, 10**6),
    history=st.lists(st.builds(GroupOutcome, st.integers(0, 99), st.integers(1, 99)), max_size=8).map(tuple),
    no_code=st.integers(0, 10**6),
)


def records_file(file: Path, *records: dict[str, object]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def rates_file(folder: Path, rates: dict[str, float]) -> Path:
    counts = ({"problem_id": name, "passed": round(60 * rate), "sampled": 60} for name, rate in rates.items())
    return records_file(folder / "rates.jsonl", *counts)


def asked(curriculum: Curriculum, place: int, count: int) -> list[str]:
    return [choice.problem_id for choice in curriculum.choices_from(place, count)]


# Schedules


def test_every_epoch_has_each_problem_exactly_once_in_the_order_of_the_seed() -> None:
    curriculum = open_curriculum(load_config(None, ["run.seed=3"]), _IDS)
    epochs = [asked(curriculum, 7 * epoch, 7) for epoch in range(4)]
    assert all(Counter(epoch) == Counter(_IDS) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert epochs[0] == ["p4", "p1", "p6", "p3", "p0", "p5", "p2"], "the order of runs that began before"


@settings(max_examples=30)
@given(stages=_stages, seed=st.integers(0, 5), places=st.lists(st.integers(0, 200), min_size=1, max_size=8))
def test_a_place_has_the_same_problem_whatever_was_asked_before(
    stages: list[Stage], seed: int, places: list[int]
) -> None:
    """The invariant: seed and place decide alone, also in another process."""
    used = Schedule(stages, seed)
    assert [used.at(place) for place in places] == [Schedule(stages, seed).at(place) for place in places]


@settings(max_examples=30)
@given(stages=_stages, seed=st.integers(0, 5))
def test_each_stage_lasts_its_epochs_and_the_last_for_ever(stages: list[Stage], seed: int) -> None:
    schedule, place, epoch = Schedule(stages, seed), 0, 0
    for stage in [*stages[:-1], *stages[-1:] * 5]:
        for _ in range(stage.epochs):
            choices = [schedule.at(place + offset) for offset in range(len(stage.problem_ids))]
            assert Counter(choice.problem_id for choice in choices) == Counter(stage.problem_ids)
            assert {choice.epoch for choice in choices} == {epoch}
            assert {schedule.epoch_of(choice.place) for choice in choices} == {epoch}
            place, epoch = place + len(choices), epoch + 1


def test_a_stage_without_problems_is_an_error() -> None:
    for stages in ([], [Stage(())], [Stage(("a",)), Stage(())]):
        with pytest.raises(ValueError, match="at least one problem"):
            Schedule(stages, seed=0)


@settings(max_examples=20)
@given(rates=st.dictionaries(st.text(max_size=2), st.floats(0, 1), min_size=1, max_size=9), parts=st.integers(1, 5))
def test_each_stage_of_potential_holds_the_one_before_and_the_rest_has_no_more_potential(
    rates: dict[str, float], parts: int
) -> None:
    stages = potential_stages(rates, parts, epochs=2)
    assert [len(stage.problem_ids) for stage in stages] == [-(-len(rates) * i // parts) for i in range(1, parts + 1)]
    for smaller, larger in pairwise(stages):
        assert larger.problem_ids[: len(smaller.problem_ids)] == smaller.problem_ids
    for stage in stages:
        inside = {potential(rates[name]) for name in stage.problem_ids}
        outside = {potential(rate) for name, rate in rates.items() if name not in stage.problem_ids}
        assert not outside or min(inside) >= max(outside)
    assert set(stages[-1].problem_ids) == set(rates)


@settings(max_examples=20)
@given(ids=st.sets(st.text(max_size=2), min_size=2, max_size=9), size=st.integers(1, 10), seed=st.integers(0, 3))
def test_a_fixed_subset_is_the_same_in_another_order_and_loses_only_what_is_gone(
    ids: set[str], size: int, seed: int
) -> None:
    ordered = sorted(ids)
    chosen = set(fixed_subset(ordered, size, seed))
    assert len(chosen) == min(size, len(ids))
    assert set(fixed_subset(ordered[::-1], size, seed)) == chosen
    gone = ordered[0]
    assert chosen - {gone} <= set(fixed_subset(ordered[1:], size, seed))


# Gates


@settings(max_examples=20)
@given(
    solved=st.sets(st.sampled_from(_IDS)),
    retire_after=st.integers(1, 3),
    recheck=st.integers(1, 3),
    start=st.integers(0, 30),
)
def test_a_retired_problem_is_left_out_for_its_epochs_and_asked_again_after_them(
    solved: set[str], retire_after: int, recheck: int, start: int
) -> None:
    """Groups end at once: solved problems always reach the pass rate, the others never."""
    schedule = Schedule([Stage(tuple(_IDS))], seed=1)
    curriculum = Curriculum(schedule, (OnlineFilter(schedule, retire_after, recheck),))
    records: dict[str, ProblemStatistics] = {}
    epochs: dict[str, list[int]] = {name: [] for name in _IDS}
    first = schedule.epoch_of(start + 6)
    for place in range(7 * first, 7 * (first + 12)):
        for choice in curriculum.admitted([schedule.at(place)], records):
            name = choice.problem_id
            epochs[name].append(choice.epoch - first)
            known = records.get(name, ProblemStatistics(name))
            in_row = known.solved_in_row + 1 if name in solved else 0
            records[name] = replace(known, groups=known.groups + 1, solved_in_row=in_row, place=choice.place)
    rechecks = range(retire_after + recheck, 12, recheck + 1)
    for name in _IDS:
        wanted = [*range(retire_after), *rechecks] if name in solved else list(range(12))
        assert epochs[name] == wanted


_POOLS = st.lists(
    st.builds(Stage, st.sets(st.sampled_from(_IDS), min_size=1).map(lambda ids: tuple(sorted(ids))), st.integers(1, 3)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=60, deadline=None)
@given(stages=_POOLS, seed=st.integers(0, 9), retire_after=st.integers(1, 2), data=st.data())
def test_a_problem_that_is_retired_for_good_is_never_asked_again_and_the_last_one_ends_the_schedule(
    stages: list[Stage], seed: int, retire_after: int, data: st.DataObject
) -> None:
    """The invariant of who may be asked: never a retired problem; and nothing is left only when all are retired."""
    schedule = Schedule(stages, seed)
    curriculum = Curriculum(schedule, (OnlineFilter(schedule, retire_after, 0),))
    in_row = dict.fromkeys(_IDS, 0)
    place, last = 0, set(stages[-1].problem_ids)
    for _ in range(60):
        records = {name: ProblemStatistics(name, groups=1, solved_in_row=row) for name, row in in_row.items() if row}
        retired = {name for name, row in in_row.items() if row >= retire_after}
        left = curriculum.admitted(curriculum.choices_from(place, schedule.end_of_round(place) - place), records)
        assert not {choice.problem_id for choice in left} & retired
        assert curriculum.is_exhausted(place, records) is (not left)
        if not left:
            assert last <= retired
            break
        place, name = left[0].place + 1, left[0].problem_id
        in_row[name] = in_row[name] + 1 if data.draw(st.booleans()) else 0
    plain = Curriculum(schedule, (OnlineFilter(schedule, retire_after, 1),))
    solved = {name: ProblemStatistics(name, groups=9, solved_in_row=9) for name in _IDS}
    assert not plain.is_exhausted(place, solved), "retired problems return"
    assert curriculum.is_exhausted(place, solved)
    assert not Curriculum(schedule).is_exhausted(place, solved)


def test_a_problem_that_fails_its_recheck_is_back_in_every_epoch() -> None:
    schedule = Schedule([Stage(tuple(_IDS))], seed=1)
    gate = OnlineFilter(schedule, retire_after=2, recheck_epochs=1)
    failed = ProblemStatistics("p0", groups=3, solved_in_row=0, place=15)
    assert all(gate.admits(Choice(place, schedule.epoch_of(place), "p0"), failed) for place in range(16, 60))


@pytest.mark.parametrize(("rate", "least"), [(0, 0.1), (10, 0.1), (20, 0.1), (20, 0.5)])
def test_priorities_ask_a_problem_in_about_its_share_of_the_places(rate: int, least: float) -> None:
    gate = Priorities(seed=4, least=least)
    record = ProblemStatistics("p0", groups=1, sampled=20, accepted=rate)
    share = max(least, 1 - rate / 20)
    times = sum(gate.admits(Choice(place, 0, "p0"), record) for place in range(1000))
    assert abs(times / 1000 - share) < 0.05, "the same draws in every run of this test"
    weighted = Priorities(seed=4, least=least, weights={"p0": share})
    assert times == sum(weighted.admits(Choice(place, 0, "p0"), None) for place in range(1000))


# Records


@settings(max_examples=30)
@given(record=_records)
def test_a_record_is_the_same_after_its_text(record: ProblemStatistics) -> None:
    assert ProblemStatistics.of_text(record.problem_id, record.to_text()) == record
    earlier = record.to_text().rpartition(" ")[0]
    assert ProblemStatistics.of_text(record.problem_id, earlier) == replace(record, no_code=0)
    state = CurriculumState(7, (record,))
    kept = json.loads(json.dumps(state.to_json()))
    assert CurriculumState.of_records(kept["cursor"], kept["problems"].items()) == state
    with pytest.raises(ValueError, match="not a record"):
        ProblemStatistics.of_text("p", "1 2 3")


# Configurations


def test_each_policy_of_the_configuration_asks_its_problems(tmp_path: Path) -> None:
    rates = {"p0": 0.0, "p1": 0.2, "p2": 0.4, "p3": 0.5, "p4": 0.9, "p5": 1.0}  # p6 has none
    file = rates_file(tmp_path, rates)

    def pool(*settings_: str) -> set[str]:
        config = load_config(None, [f"broker.curriculum.{setting}" for setting in settings_])
        return set(asked(open_curriculum(config, _IDS), 0, 100))

    rated = f'pass_rates="{file}"'
    assert pool("retire_after=1") == set(_IDS)
    assert pool("name=subset", 'problem_ids=["p4", "p1"]') == {"p1", "p4"}
    assert len(pool("name=subset", "size=3")) == 3
    assert pool("name=subset", "size=4", rated) == {"p1", "p2", "p3", "p4"}
    assert pool("name=pass_rates", rated) == {"p0", "p1", "p2", "p3", "p4"}
    assert pool("name=pass_rates", rated, "drop_unsolved=true", "max_pass_rate=0.4") == {"p1", "p2"}
    assert pool("name=pass_rates", rated, "drop_solved=false", "min_pass_rate=0.9") == {"p4", "p5"}
    assert pool("name=pass_rates", rated, "min_pass_rate=0.5", "keep_unknown=true") == {"p3", "p4", "p6"}
    assert pool("name=potential", rated) == set(rates)
    assert pool("name=priorities") == set(_IDS)
    others = rates_file(tmp_path, {"q0": 1.0})
    with pytest.raises(Unusable, match="has the pass rate of no problem of the problem file"):
        pool("name=pass_rates", f'pass_rates="{others}"', "keep_unknown=true")


def test_pools_follow_each_other_and_potential_begins_with_the_highest(tmp_path: Path) -> None:
    file = rates_file(tmp_path, {name: i / 6 for i, name in enumerate(_IDS)})
    toml = tmp_path / "run.toml"
    toml.write_text(
        f'[broker.curriculum]\nname = "pools"\npass_rates = "{file.name}"\n'
        "[[broker.curriculum.stages]]\nepochs = 2\n"
        "[[broker.curriculum.stages]]\nmax_pass_rate = 0.375\n"
    )
    pools = open_curriculum(load_config(toml, []), _IDS)
    assert Counter(asked(pools, 0, 12)) == Counter(_IDS[:6] * 2), "without the solved p6"
    assert set(asked(pools, 12, 50)) == {"p0", "p1", "p2"}
    config = load_config(None, ["broker.curriculum.name=potential", f'broker.curriculum.pass_rates="{file}"'])
    by_potential = open_curriculum(config, _IDS)
    assert set(asked(by_potential, 0, 2)) == {"p3", "p2"}
    assert set(asked(by_potential, 2, 4)) == {"p2", "p3", "p4", "p1"}


@pytest.mark.parametrize(
    ("settings_", "sentence"),
    [
        (["name=quartiles"], "one of epochs, subset, pass_rates"),
        (["name=subset"], "problem_ids or size"),
        (["name=pass_rates"], "pass_rates is needed"),
        (["name=pools", 'pass_rates="x"'], "at least one of stages"),
        (["name=epochs", "size=3"], "broker.curriculum.size is a key for name=subset"),
    ],
)
def test_a_section_that_is_not_whole_is_refused(settings_: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config(None, [f"broker.curriculum.{setting}" for setting in settings_])


def test_a_curriculum_that_the_problems_do_not_allow_is_refused(tmp_path: Path) -> None:
    solved = rates_file(tmp_path, {"p0": 1.0})
    too_high = records_file(tmp_path / "high.jsonl", {"problem_id": "p0", "passed": 8, "sampled": 1})
    no_rate = records_file(tmp_path / "none.jsonl", {"problem_id": "p0", "pass_rate": 0.5})
    nothing = records_file(tmp_path / "nothing.jsonl", {"problem_id": "p0", "priority": 0})
    negative = records_file(tmp_path / "negative.jsonl", {"problem_id": "p0", "priority": -1})
    for settings_, sentence in (
        (["name=subset", 'problem_ids=["p1", "q"]'], "lacks 1 of them, for example 'q'"),
        (["name=subset", "size=8"], "size is 8, and there are only 7"),
        (["name=pass_rates", f'pass_rates="{solved}"'], "leaves no problem"),
        (
            ["name=pass_rates", f'pass_rates="{too_high}"'],
            "high.jsonl, record 1: passed 8 is more than sampled 1",
        ),
        (["name=potential", f'pass_rates="{no_rate}"'], "none.jsonl, record 1: passed: Field required"),
        (["name=priorities", f'priorities="{nothing}"'], "no problem has a priority above 0"),
        (["name=priorities", f'priorities="{negative}"'], "negative.jsonl, record 1: priority: .* than or equal to 0"),
    ):
        config = load_config(None, [f"broker.curriculum.{setting}" for setting in settings_])
        with pytest.raises(Unusable, match=sentence):
            open_curriculum(config, _IDS)


# Seeds and admission


def test_task_seeds_differ_by_run_and_rollout_and_fit_every_engine() -> None:
    seeds = {task_seed(seed, f"g{g:06d}-{i}") for seed in range(3) for g in range(50) for i in range(8)}
    assert len(seeds) == 3 * 50 * 8
    assert all(0 < seed < 2**63 for seed in seeds)
    assert task_seed(1, "g000001-1") == task_seed(1, "g000001-1")


def test_a_lease_call_admits_the_groups_that_cover_it() -> None:
    rules = RunRules.of(load_config(None, ["broker.group_size=4", "broker.batch_size=8", "broker.pipeline_k=3"]).broker)
    assert [groups_wanted(rules, tasks) for tasks in (1, 4, 5)] == [1, 1, 2]


def test_problems_of_equal_potential_are_ordered_by_name_and_not_by_rounding() -> None:
    assert 4 * 0.2 * (1 - 0.2) != 4 * 0.8 * (1 - 0.8), "by rounding"
    assert potential(0.2) == potential(0.8)
    assert potential_stages({"b": 0.2, "a": 0.8}, 2, epochs=1)[0].problem_ids == ("a",)
