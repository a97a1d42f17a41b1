"""Preference pairs, RM-Bench's accuracies, correlation and best of n, each against its definition in plain loops."""

from __future__ import annotations

import statistics
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.domain.estimates import best_of_n, correlation
from nouscoder.reward_model.evaluate import style_accuracy
from nouscoder.reward_model.pairs import PairRule, preference_pairs

SCORES = st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.4, 0.5, 0.8, 0.9, 1.0]), max_size=12)


@given(SCORES)
def test_pairs_are_those_of_acecoder(scores: list[float]) -> None:
    expected = []
    for i, better in enumerate(scores):
        for j, worse in enumerate(scores):
            if better > worse + 0.4 and better > 0.8 and worse > 0:
                expected.append((i, j))
    assert preference_pairs(scores, PairRule()) == expected


def test_bounds_are_exclusive() -> None:
    assert preference_pairs([0.8, 0.2, 0.9, 0.5, 0.0], PairRule()) == [(2, 1)]
    assert preference_pairs([29 / 35, 15 / 35], PairRule()) == [], "0.4 apart, and a rounding of it"
    assert preference_pairs([1.0, 0.0], PairRule()) == []
    assert preference_pairs([1.0, 0.0], PairRule(rejected_above=-1.0)) == [(0, 1)]


@given(SCORES, st.integers(1, 5), st.text(max_size=3))
def test_a_bound_on_pairs_chooses_some_of_them_by_the_seed(scores: list[float], at_most: int, seed: str) -> None:
    everything = preference_pairs(scores, PairRule())
    some = preference_pairs(scores, PairRule(), at_most, seed)
    assert len(some) == min(at_most, len(everything))
    assert set(some) <= set(everything)
    assert some == preference_pairs(scores, PairRule(), at_most, seed)


def test_the_three_accuracies_of_rm_bench() -> None:
    """The model likes elaborate styles: it fails where the wrong answer is the more elaborate one."""
    accuracy = style_accuracy([1.0, 2.0, 3.0], [0.5, 1.5, 2.5])
    assert (accuracy.hard, accuracy.normal, accuracy.easy, accuracy.mean) == (0.0, 1.0, 1.0, 2 / 3)
    assert style_accuracy([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]).mean == 0
    with pytest.raises(ValueError, match="2 right and 3 wrong"):
        style_accuracy([1.0, 2.0], [1.0, 2.0, 3.0])


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=2, max_size=20))
def test_correlation_is_pearsons(pairs: list[tuple[int, int]]) -> None:
    xs, ys = [float(x) for x, _ in pairs], [float(y) for _, y in pairs]
    found = correlation(xs, ys)
    if len(set(xs)) == 1 or len(set(ys)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(statistics.correlation(xs, ys), abs=1e-9)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=7), st.data())
def test_best_of_n_is_the_mean_over_all_sets(samples: list[tuple[int, bool]], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(samples)))
    values = []
    for chosen in combinations(samples, n):
        top = [right for score, right in chosen if score == max(score for score, _ in chosen)]
        values.append(sum(top) / len(top))
    scores, right = [float(score) for score, _ in samples], [right for _, right in samples]
    assert best_of_n(scores, right, n) == pytest.approx(sum(values) / len(values))


def test_the_ends_of_best_of_n() -> None:
    scores, right = [0.1, 0.9, 0.5], [True, False, True]
    assert best_of_n(scores, right, 1) == pytest.approx(2 / 3)
    assert best_of_n(scores, right, 3) == 0
    with pytest.raises(ValueError, match="best of 4 of 3"):
        best_of_n(scores, right, 4)
