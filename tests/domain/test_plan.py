"""Plans: which stage is next, from which policy, when a run ends early, and stages as changes of one configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.cli.recipes import plan_text
from nouscoder.config import ConfigError, dump_config, load_config
from nouscoder.domain.plan import EarlyEnd, Evaluated, NextStage, StageHistory, StartFrom, best_of, next_stage
from nouscoder.objectives.dapo import Dapo

SCORES = st.lists(st.integers(0, 1000).map(lambda one: one / 1000), min_size=1, max_size=8)


def evaluations(*scores: float) -> tuple[Evaluated, ...]:
    """One evaluation every ten versions."""
    return tuple(Evaluated(10 * index, score) for index, score in enumerate(scores))


@given(SCORES)
def test_the_best_is_the_earliest_of_the_highest(scores: list[float]) -> None:
    best = best_of(evaluations(*scores))
    assert best.pass_at_1 == max(scores)
    assert best.policy_version == 10 * scores.index(max(scores))


@pytest.mark.parametrize(
    ("end", "scores", "over"),
    [
        (EarlyEnd(), (0.1, 1.0, 0.0, 0.0), False),
        (EarlyEnd(pass_at_1=0.5), (0.1, 0.49), False),
        (EarlyEnd(pass_at_1=0.5), (0.1, 0.5), True),
        (EarlyEnd(pass_at_1=0.5), (0.1, 0.6, 0.2), True),
        (EarlyEnd(no_gain=2), (0.5, 0.4), False),
        (EarlyEnd(no_gain=2), (0.5, 0.4, 0.5), True),
        (EarlyEnd(no_gain=2), (0.5, 0.4, 0.6), False),
        (EarlyEnd(no_gain=2), (0.5, 0.6, 0.4), False),
        (EarlyEnd(no_gain=2), (0.5, 0.6, 0.4, 0.6), True),
    ],
)
def test_a_run_ends_early_at_its_pass_rate_or_without_a_gain(
    end: EarlyEnd, scores: tuple[float, ...], over: bool
) -> None:
    assert (end.reason(evaluations(*scores)) is not None) == over


@given(SCORES, st.integers(1, 4))
def test_a_rising_pass_rate_never_ends_for_want_of_a_gain(scores: list[float], patience: int) -> None:
    assert EarlyEnd(no_gain=patience).reason(evaluations(*sorted(set(scores)))) is None


def test_the_next_stage_is_the_first_unfinished_one_and_begins_with_the_chosen_policy() -> None:
    starts = (StartFrom.LAST, StartFrom.BEST, StartFrom.LAST)
    new, begun = StageHistory(), StageHistory(begun=True, evaluations=evaluations(0.2))
    done = StageHistory(begun=True, finished=True, evaluations=evaluations(0.1, 0.4, 0.3))
    assert next_stage(starts, (new, new, new)) == NextStage(0, begun=False, policy_version=None)
    assert next_stage(starts, (begun, new, new)) == NextStage(0, begun=True, policy_version=None)
    assert next_stage(starts, (done, new, new)) == NextStage(1, begun=False, policy_version=10)
    assert next_stage(starts, (done, begun, new)) == NextStage(1, begun=True, policy_version=10)
    assert next_stage(starts, (done, done, new)) == NextStage(2, begun=False, policy_version=20)
    assert next_stage(starts, (done, done, done)) is None


def test_a_history_that_no_plan_makes_is_refused() -> None:
    starts = (StartFrom.LAST, StartFrom.LAST)
    with pytest.raises(ValueError, match="stage 1 is not finished"):
        next_stage(starts, (StageHistory(begun=True), StageHistory(begun=True)))
    with pytest.raises(ValueError, match="has no evaluation"):
        next_stage(starts, (StageHistory(begun=True, finished=True), StageHistory()))


PLAN = """
[run]
name = "mine"
root = "runs"

[evaluation]
every_batches = 2

[learner.objective]
name = "gspo"
clip_low = 1e-3

[[plan.stages]]
name = "short"
set.run.total_batches = 5

[[plan.stages]]
name = "long"
from = "best"
set.evaluation.end_after_no_gain = 3
set.problems.train = "hard.jsonl"
set.generation.sampling.temperature = 0.5
set.learner.objective.name = "dapo"
"""


def test_a_stage_is_the_configuration_with_its_changes(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(PLAN)
    config = load_config(file)
    short, long = config.of_stage(0), config.of_stage(1)
    assert (short.run.folder, long.run.folder) == (
        tmp_path / "runs/mine/01-short",
        tmp_path / "runs/mine/02-long",
    )
    assert (short.run.total_batches, long.run.total_batches) == (5, config.run.total_batches)
    assert (short.generation.sampling.temperature, long.generation.sampling.temperature) == (1.0, 0.5)
    assert long.problems.train == tmp_path / "hard.jsonl"  # relative to the file, as every path
    assert (short.learner.objective.name, long.learner.objective.name) == ("gspo", "dapo")
    assert isinstance(long.learner.objective, Dapo)
    assert long.learner.objective.clip_low == 0.2  # another objective begins with its own defaults
    assert not short.plan.stages
    recorded = tmp_path / "config.toml"
    recorded.write_text(dump_config(config))
    assert load_config(recorded) == config


def test_plan_show_prints_what_each_stage_changes(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(PLAN)
    text = plan_text(load_config(file), as_json=False)
    first, second = text.split("\n\n")
    assert first.splitlines()[0] == "1. short: begins with the first policy; not begun"
    assert "   run.total_batches = 5  (was 30)" in first
    assert second.splitlines()[0] == "2. long: begins with the best policy of the stage before; not begun"
    assert "   generation.sampling.temperature = 0.5  (was 1.0)" in second
    assert second.splitlines()[-1] == "   ends after 30 batches, or 3 evaluations without a gain"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("set.learner.lr = 1", "in plan.stages, a: unknown key learner.lr"),
        ("set.broker.batch_size = 3", "in plan.stages, a: broker: batch_size 3 must be a multiple"),
        ('from = "best"', "the first stage begins with policy.path"),
        ('set.run.name = "x"', "a stage cannot set run.name"),
        ('set.policy.path = "x"', "a stage cannot set policy.path"),
        ("set.evaluation.end_at_pass_at_1 = 0.5", "need every_batches"),
        (
            'set.broker.curriculum = {name = "pass_rates", pass_rates = "stage://a"}',
            "in plan.stages, a: broker.curriculum.pass_rates stage://a: no stage before it has that name",
        ),
        ("yarn.factor = 2.0", "yarn needs a factor above 1 and original_tokens"),
        ('from = "first"', "must be 'last' or 'best'"),
        ('[[plan.stages]]\nname = "a"', "two stages have one name"),
        ('[run]\nservices = "external"', "keeps its stage in Redis: set broker.redis_url_file"),
        (
            'set.verifier.max_queued = 1\n[broker]\nredis_url = "redis://r"\n[run]\nservices = "external"',
            "in plan.stages, a: external services have one verifier for all stages",
        ),
    ],
)
def test_a_faulty_stage_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'[[plan.stages]]\nname = "a"\n{text}\n')
    with pytest.raises(ConfigError) as fault:
        load_config(file)
    assert sentence in str(fault.value)
    assert len(str(fault.value).splitlines()) == 1


def test_evaluations_that_differ_by_rounding_alone_are_equal() -> None:
    """The mean of the same shares is 0.19999999999999998 or 0.20000000000000004, by their order."""
    low, high = (Evaluated(version, sum(each) / 3) for version, each in enumerate([(0.1, 0.4, 0.1), (0.1, 0.1, 0.4)]))
    assert low.pass_at_1 < 0.2 < high.pass_at_1, "by rounding"
    assert best_of([low, high]) == best_of([high, low]) == low
    assert EarlyEnd(no_gain=1).reason([low, high]) is not None
    assert EarlyEnd(pass_at_1=0.2).reason([low]) is not None
