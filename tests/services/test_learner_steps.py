"""Steps of the trainer: schedule, skipped steps, masked rollouts, entropy control, advantages of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from nouscoder.config import Config, LearnerSection, ScheduleSection
from nouscoder.domain.batch import Batch
from nouscoder.domain.tokens import FinishReason
from nouscoder.learner.loading import prepare_thread
from nouscoder.learner.metrics.prometheus import LearnerMetrics
from nouscoder.learner.model.synthetic import random_batch, random_policy
from nouscoder.learner.scoring import ScoredRollout, score
from nouscoder.learner.state.checkpoint_store import CheckpointStore, Progress, restore
from nouscoder.learner.trainer import Trainer
from nouscoder.objectives.advantage import AdvantageSection, Estimator, Overlong
from nouscoder.objectives.registry import PUBLISHED


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    threads = torch.get_num_threads()
    prepare_thread(1)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def trainer(seed: int = 0, **section: Any) -> Trainer:
    settings = {"steps_per_batch": 2, "learning_rate": 1e-2, **section}
    return Trainer(
        random_policy(seed), Config(learner=LearnerSection.model_validate(settings)), lambda _: random_policy(9)
    )


def weights(one: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in one.model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def with_finish(batch: Batch, finish: dict[int, FinishReason]) -> Batch:
    """The batch with the finish reason of each rollout: `finish` by position, else STOP."""
    return replace(
        batch,
        rollouts=tuple(
            replace(graded, rollout=replace(graded.rollout, finish_reason=finish.get(index, FinishReason.STOP)))
            for index, graded in enumerate(batch.rollouts)
        ),
    )


# ---- schedule ----


def test_the_rate_warms_up_then_falls_by_a_cosine_to_its_floor() -> None:
    schedule = ScheduleSection.model_validate({"warmup_steps": 4, "decay": "cosine", "decay_steps": 104, "floor": 0.1})
    rates = [schedule.factor(step) for step in range(120)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[54] == pytest.approx(0.1 + 0.9 / 2), "half way"
    assert rates[79] == pytest.approx(0.1 + 0.9 * (1 + math.cos(0.75 * math.pi)) / 2)
    assert rates[104:] == pytest.approx([0.1] * 16)
    assert all(a > b for a, b in pairwise(rates[4:105]))


def test_the_optimizer_gets_the_rate_of_the_schedule() -> None:
    one = trainer(schedule={"decay": "cosine", "decay_steps": 4, "floor": 0.5})
    rates = [step.learning_rate for b in (0, 1, 2) for step in one.train_batch(random_batch(b, seed=1)).steps]
    quarter = 0.75 + math.cos(math.pi / 4) / 4
    assert rates == pytest.approx([1e-2, quarter * 1e-2, 0.75e-2, (1.5 - quarter) * 1e-2, 0.5e-2, 0.5e-2])
    assert one.optimizer.param_groups[0]["lr"] == rates[-1]


# ---- skipped steps ----


def test_a_step_with_too_large_a_gradient_changes_nothing_and_is_counted() -> None:
    batch = random_batch(0, seed=1)
    norms = [step.gradient_norm for step in trainer().train_batch(batch).steps]
    one = trainer(skip_gradient_norm=min(norms) / 2)
    before = weights(one)
    trained = one.train_batch(batch)
    assert [step.skipped for step in trained.steps] == [True, True]
    assert [step.step for step in trained.steps] == [1, 2]
    assert equal(weights(one), before)
    assert not one.optimizer.state
    registry = CollectorRegistry()
    LearnerMetrics(registry).trained(trained, 1, 1.0)
    assert registry.get_sample_value("nouscoder_learner_skipped_steps_total") == 2

    other = trainer(skip_gradient_norm=max(norms) * 2)
    assert not any(step.skipped for step in other.train_batch(batch).steps)
    plain = trainer()
    plain.train_batch(batch)
    assert equal(weights(other), weights(plain))


# ---- overlong rollouts ----


def test_masked_rollouts_leave_the_loss_and_its_divisor_and_filtered_ones_only_the_loss() -> None:
    batch = with_finish(random_batch(0, seed=1), {0: FinishReason.LENGTH, 5: FinishReason.LENGTH})
    lengths = [graded.rollout.num_sampled_tokens for graded in batch.rollouts]
    filtered, masked, kept = (
        trainer(advantage={"overlong": kind}, steps_per_batch=1).train_batch(batch).steps[0] for kind in Overlong
    )
    assert filtered.num_tokens == kept.num_tokens == sum(lengths)
    assert masked.num_tokens == sum(lengths) - lengths[0] - lengths[5]
    ratio = filtered.num_tokens / masked.num_tokens
    assert masked.loss == pytest.approx(filtered.loss * ratio, rel=1e-4), "the same sum, another divisor"
    assert masked.gradient_norm == pytest.approx(filtered.gradient_norm * ratio, rel=1e-4)
    assert kept.gradient_norm != pytest.approx(filtered.gradient_norm, rel=1e-3)


def test_groups_of_equal_rewards_may_leave_the_loss_and_its_divisor_without_others_in_their_place() -> None:
    """Skywork-OR1's rejection (verl/trainer/ppo/ray_trainer.py): the loss is the mean over the tokens that are left."""
    batch = with_finish(random_batch(0, seed=1), {})
    first = batch.rollouts[0].rollout.group_id
    equal_group = [graded.rollout.group_id == first for graded in batch.rollouts]
    rollouts = [
        replace(graded, reward=1.0) if is_equal else graded
        for graded, is_equal in zip(batch.rollouts, equal_group, strict=True)
    ]
    batch = replace(batch, rollouts=tuple(rollouts))
    kept, masked = (
        trainer(advantage={"mask_equal_rewards": one}, steps_per_batch=1).train_batch(batch).steps[0]
        for one in (False, True)
    )
    lengths = [graded.rollout.num_sampled_tokens for graded in batch.rollouts]
    left = sum(length for length, is_equal in zip(lengths, equal_group, strict=True) if not is_equal)
    assert (kept.num_tokens, masked.num_tokens) == (sum(lengths), left)
    assert masked.loss == pytest.approx(kept.loss * sum(lengths) / left, rel=1e-4), "the same sum, another divisor"
    with pytest.raises(ValidationError, match="mask_equal_rewards is for estimators of a group"):
        AdvantageSection(mask_equal_rewards=True, estimator=Estimator.BATCH_WHITENED)


def test_a_step_whose_rollouts_are_all_masked_is_skipped() -> None:
    batch = random_batch(0, seed=1)
    cut = with_finish(batch, dict.fromkeys(range(len(batch.rollouts)), FinishReason.LENGTH))
    one = trainer(advantage={"overlong": "masked"})
    before = weights(one)
    steps = one.train_batch(cut).steps
    assert [(step.skipped, step.loss, step.num_tokens, step.step) for step in steps] == [
        (True, 0, 0, 1),
        (True, 0, 0, 2),
    ]
    assert equal(weights(one), before)


# ---- advantages ----


def advantages(batch: Batch, **settings: Any) -> list[ScoredRollout]:
    return [item for group in score(batch, AdvantageSection.model_validate(settings)) for item in group]


def test_an_advantage_of_the_batch_has_mean_zero_over_rollouts_or_over_tokens() -> None:
    batch = with_finish(random_batch(0, seed=3, num_groups=5), {})
    of_rollouts = advantages(batch, estimator=Estimator.BATCH_WHITENED)
    assert sum(item.advantage for item in of_rollouts) == pytest.approx(0.0, abs=1e-9)
    assert sum(item.advantage**2 for item in of_rollouts) == pytest.approx(len(of_rollouts))
    of_tokens = advantages(batch, estimator=Estimator.BATCH_TOKEN_WHITENED)
    counts = [item.graded.rollout.num_sampled_tokens for item in of_tokens]
    total = sum(count * item.advantage for count, item in zip(counts, of_tokens, strict=True))
    assert total == pytest.approx(0.0, abs=1e-9)
    assert [item.graded.rollout.rollout_id for item in of_tokens] == [g.rollout.rollout_id for g in batch.rollouts]


def test_the_length_reward_makes_the_shorter_of_two_right_rollouts_better() -> None:
    batch = with_finish(random_batch(0, seed=3, num_groups=8), {})
    for plain, shaped in zip(
        score(batch, AdvantageSection(estimator=Estimator.GROUP_MEAN)),
        score(batch, AdvantageSection(estimator=Estimator.GROUP_MEAN, length_weight=0.5)),
        strict=True,
    ):
        right = sorted((item.graded.rollout.num_sampled_tokens, -item.advantage) for item in shaped if item.accepted)
        assert [-advantage for _, advantage in right] == sorted((-a for _, a in right), reverse=True)
        assert len({item.advantage for item in plain if item.accepted}) == 1


# ---- entropy control ----


def test_the_coefficient_follows_the_entropy_within_its_limits() -> None:
    """The formulas of objectives/entropy.py, by hand."""
    section = LearnerSection.model_validate({"entropy": {"target": 0.2, "delta": 5e-4, "maximum": 1e-3}}).entropy
    coefficient, seen = 0.0, []
    for entropy in (0.1, 0.15, 0.19, 0.2, 0.3, 0.1, 0.5, 0.5, 0.5):
        seen.append((section.active(coefficient, entropy), coefficient))
        coefficient = section.following(coefficient, entropy)
    expected = [(0, 0), (5, 5), (10, 10), (10, 10), (0, 10), (5, 5), (0, 10), (0, 5), (0, 0)]
    assert seen == [pytest.approx((a / 1e4, c / 1e4)) for a, c in expected]
    assert coefficient == 0.0


def test_the_entropy_coefficient_is_constant_in_a_batch_and_part_of_the_checkpoint(tmp_path: Path) -> None:
    """A resumed trainer gives the same bits as one that was not stopped."""
    settings: dict[str, Any] = {"entropy": {"target": 100.0, "delta": 0.01, "maximum": 0.05}}
    whole = trainer(**settings)
    coefficients = [
        [step.diagnostics["entropy_coefficient"] for step in whole.train_batch(random_batch(b, seed=1)).steps]
        for b in range(3)
    ]
    assert coefficients == [pytest.approx([c, c], rel=1e-6) for c in (0.0, 0.01, 0.02)]
    assert whole.entropy_coefficient == pytest.approx(0.03)

    first = trainer(**settings)
    for b in (0, 1):
        first.train_batch(random_batch(b, seed=1))
    checkpoint = CheckpointStore(tmp_path, 2).begin(first, Progress(first.step, 1)).finish()
    resumed = trainer(seed=5, **settings)
    restore(resumed, checkpoint)
    steps = resumed.train_batch(random_batch(2, seed=1)).steps
    assert [step.diagnostics["entropy_coefficient"] for step in steps] == coefficients[2]
    assert equal(weights(resumed), weights(whole))
    assert resumed.entropy_coefficient == whole.entropy_coefficient


def test_an_entropy_bonus_raises_the_entropy() -> None:
    batch = random_batch(0, seed=1)
    flat = replace(batch, rollouts=tuple(replace(graded, reward=0.0) for graded in batch.rollouts))
    one = trainer(entropy={"coefficient": 1.0}, learning_rate=1e-3, steps_per_batch=1)
    entropies = [one.train_batch(replace(flat, batch_id=b)).steps[0].diagnostics["entropy"] for b in range(3)]
    assert entropies[0] < entropies[1] < entropies[2]


# ---- every objective, through the trainer ----


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_objective_trains_and_does_not_depend_on_micro_batches(name: str) -> None:
    settings: dict[str, Any] = {
        "objective": PUBLISHED[name].model_dump(mode="json"),
        "reference_kl": {"coefficient": 0.01},
        "learning_rate": 1e-3,
    }
    runs = []
    for microbatch_tokens in (100_000, 80):
        one = trainer(microbatch_tokens=microbatch_tokens, **settings)
        runs.append([step for b in (0, 1) for step in one.train_batch(random_batch(b, seed=1)).steps])
    for whole, cut in zip(*runs, strict=True):
        assert (cut.loss, cut.gradient_norm) == pytest.approx((whole.loss, whole.gradient_norm), rel=1e-3, abs=1e-6)
        assert whole.gradient_norm > 0
        assert whole.diagnostics["reference_kl"] > 0
