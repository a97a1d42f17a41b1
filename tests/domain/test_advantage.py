"""Group advantages: normalised, invariant to shift and scale, zero for overlong rollouts and zero-variance groups."""

from __future__ import annotations

import statistics
from math import sqrt

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nouscoder.domain.signal import has_signal
from nouscoder.objectives.advantage import Estimator, batch_advantages, group_advantages

rewards_of_a_group = st.lists(st.integers(-8, 8).map(lambda eighths: eighths / 8), min_size=2, max_size=16)


@given(rewards_of_a_group)
def test_advantages_have_mean_zero_and_variance_one(rewards: list[float]) -> None:
    assume(has_signal(rewards))
    advantages = group_advantages(rewards, [False] * len(rewards))
    assert sum(advantages) == pytest.approx(0.0, abs=1e-9)
    assert sqrt(sum(a * a for a in advantages) / len(advantages)) == pytest.approx(1.0)


@given(rewards_of_a_group, st.integers(1, 10), st.integers(-5, 5))
def test_advantages_do_not_change_with_shift_and_scale(rewards: list[float], scale: int, shift: int) -> None:
    changed = [scale * reward + shift for reward in rewards]
    no_cut = [False] * len(rewards)
    assert group_advantages(changed, no_cut) == pytest.approx(group_advantages(rewards, no_cut), abs=1e-9)


@given(rewards_of_a_group, st.data())
def test_a_better_reward_never_has_a_worse_advantage(rewards: list[float], data: st.DataObject) -> None:
    advantages = group_advantages(rewards, [False] * len(rewards))
    i, j = data.draw(st.tuples(*[st.integers(0, len(rewards) - 1)] * 2))
    if rewards[i] > rewards[j]:
        assert advantages[i] > advantages[j]


@given(rewards_of_a_group, st.data())
def test_overlong_rollouts_get_zero_but_count_in_the_statistics(rewards: list[float], data: st.DataObject) -> None:
    overlong = data.draw(st.lists(st.booleans(), min_size=len(rewards), max_size=len(rewards)))
    whole = group_advantages(rewards, [False] * len(rewards))
    cut = group_advantages(rewards, overlong)
    assert cut == [0.0 if is_cut else value for value, is_cut in zip(whole, overlong, strict=True)]


@given(st.floats(-1, 1), st.integers(1, 8))
def test_a_group_with_equal_rewards_has_no_signal(reward: float, size: int) -> None:
    assert not has_signal([reward] * size)
    assert group_advantages([reward] * size, [False] * size) == [0.0] * size


@given(st.lists(st.floats(0.001, 100).map(lambda term: round(term, 3)), min_size=2, max_size=12), st.data())
def test_rewards_that_differ_by_rounding_only_have_no_signal(terms: list[float], data: st.DataObject) -> None:
    orders = data.draw(st.lists(st.permutations(terms), min_size=2, max_size=8))
    rewards = [sum(order) for order in orders]
    no_cut = [False] * len(rewards)
    assert not has_signal(rewards)
    for estimator in (Estimator.GROUP_MEAN_STD, Estimator.GROUP_MEAN, Estimator.LEAVE_ONE_OUT):
        assert group_advantages(rewards, no_cut, estimator) == [0.0] * len(rewards)
    assert batch_advantages(rewards, no_cut, [1] * len(rewards)) == [0.0] * len(rewards)


@pytest.mark.parametrize("rewards", [[0.1 + 0.2, 0.3], [0.1 + 0.2 - 0.3, 0.0], [-0.1 - 0.2, -0.3], [0.7 + 0.1, 0.8]])
def test_two_rewards_that_differ_by_rounding_have_no_signal(rewards: list[float]) -> None:
    assert group_advantages(rewards, [False, False]) == [0.0, 0.0]


@given(st.floats(-1e6, 1e6), st.floats(1e-9, 1))
def test_small_true_differences_keep_their_advantage(reward: float, share: float) -> None:
    rewards = [reward, reward + share * max(abs(reward), 1e-3)]
    assert has_signal(rewards)
    assert group_advantages(rewards, [False, False])[0] == pytest.approx(-1, abs=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_raises(bad: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([1.0, bad], [False, False])


def test_unequal_lengths_raise() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        group_advantages([1.0, -1.0], [False])


@given(rewards_of_a_group)
def test_each_estimator_is_its_formula(rewards: list[float]) -> None:
    assume(has_signal(rewards))
    whole, count = [False] * len(rewards), len(rewards)
    means, loo, sample = [], [], []
    for index, reward in enumerate(rewards):
        means.append(reward - sum(rewards) / count)
        loo.append(reward - sum(rewards[:index] + rewards[index + 1 :]) / (count - 1))
        sample.append((reward - sum(rewards) / count) / statistics.stdev(rewards))
    assert group_advantages(rewards, whole, Estimator.GROUP_MEAN) == pytest.approx(means, abs=1e-12)
    assert group_advantages(rewards, whole, Estimator.LEAVE_ONE_OUT) == pytest.approx(loo, abs=1e-12)
    assert group_advantages(rewards, whole, Estimator.GROUP_MEAN_STD, ddof=1) == pytest.approx(sample, abs=1e-9)
    verl = [value * (std := statistics.stdev(rewards)) / (std + 1e-2) for value in sample]
    assert group_advantages(rewards, whole, ddof=1, epsilon=1e-2) == pytest.approx(verl, abs=1e-9)
    assert group_advantages(rewards, [True] * count, Estimator.LEAVE_ONE_OUT) == [0.0] * count


@given(rewards_of_a_group, st.data())
def test_whitening_over_tokens_counts_a_rollout_once_for_each_token(rewards: list[float], data: st.DataObject) -> None:
    assume(has_signal(rewards))
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=len(rewards), max_size=len(rewards)))
    of_tokens = [reward for reward, length in zip(rewards, lengths, strict=True) for _ in range(length)]
    spread = statistics.pstdev(of_tokens)
    expected = [(reward - statistics.fmean(of_tokens)) / spread for reward in rewards]
    found = batch_advantages(rewards, [False] * len(rewards), lengths)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
    once = batch_advantages(rewards, [False] * len(rewards), [1] * len(rewards))
    assert once == pytest.approx(group_advantages(rewards, [False] * len(rewards)), abs=1e-9)


def test_an_estimator_of_the_batch_needs_the_whole_batch() -> None:
    with pytest.raises(ValueError, match="whole batch"):
        group_advantages([1.0, 0.0], [False, False], Estimator.BATCH_WHITENED)
    assert batch_advantages([1.0, 1.0], [False, False], [1, 1]) == [0.0, 0.0]
    with pytest.raises(ValueError, match="weights differ"):
        batch_advantages([1.0, 0.0], [False, False], [1])


def test_nouscoder_rewards_by_hand() -> None:
    assert group_advantages([1.0, -1.0, -1.0, -1.0], [False] * 4) == pytest.approx([sqrt(3), *[-1 / sqrt(3)] * 3])
