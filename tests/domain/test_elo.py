"""The Elo rating of a model: where its expected score is the score, and an interval that holds it."""

from __future__ import annotations

from math import log10
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.domain.estimates import Elo, RatedResult, elo_rating, elo_text, expected_score

RATINGS = st.integers(8, 35).map(lambda hundreds: 100.0 * hundreds)
SCORES = st.integers(0, 8).map(lambda accepted: accepted / 8)
RESULTS = st.lists(st.builds(RatedResult, RATINGS, SCORES), min_size=1, max_size=30)


def bounded(found: Elo) -> tuple[float, float, float]:
    """The low end, the rating and the high end, none of which is open."""
    assert found.low is not None
    assert found.value is not None
    assert found.high is not None
    return found.low, found.value, found.high


def mixed(results: list[RatedResult]) -> list[RatedResult]:
    """The results with one problem more that is half solved, so that the rating has both bounds."""
    return [*results, RatedResult(1500.0, 0.5)]


def test_the_expected_score_is_that_of_elo() -> None:
    assert expected_score(1500, 1500) == 0.5
    assert expected_score(1900, 1500) == pytest.approx(10 / 11)
    assert expected_score(1100, 1500) == pytest.approx(1 / 11)
    assert expected_score(1e6, 0) == 1.0
    assert expected_score(0, 1e6) == 0.0


@given(RESULTS)
def test_a_model_of_the_rating_is_expected_to_score_what_was_scored(results: list[RatedResult]) -> None:
    every = mixed(results)
    low, value, high = bounded(elo_rating(every))
    assert sum(expected_score(value, one.rating) for one in every) == pytest.approx(sum(one.score for one in every))
    assert low < value < high


@given(RESULTS, st.integers(-2000, 2000))
def test_harder_problems_with_the_same_scores_give_a_rating_that_is_higher_by_as_much(
    results: list[RatedResult], more: int
) -> None:
    every = mixed(results)
    moved = elo_rating([RatedResult(one.rating + more, one.score) for one in every])
    assert bounded(moved) == pytest.approx([each + more for each in bounded(elo_rating(every))], abs=1e-4)


@given(RESULTS, st.data())
def test_a_better_score_gives_a_higher_rating(results: list[RatedResult], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(results) - 1))
    results[at] = RatedResult(results[at].rating, min(results[at].score, 7 / 8))
    better = [*results[:at], RatedResult(results[at].rating, results[at].score + 1 / 8), *results[at + 1 :]]
    for worse, good in zip(bounded(elo_rating(mixed(results))), bounded(elo_rating(mixed(better))), strict=True):
        assert worse < good


@given(RESULTS)
def test_more_problems_of_the_same_kind_give_the_same_rating_and_a_narrower_interval(
    results: list[RatedResult],
) -> None:
    once, often = bounded(elo_rating(mixed(results))), bounded(elo_rating(mixed(results) * 4))
    assert often[1] == pytest.approx(once[1], abs=1e-4)
    assert once[0] < often[0]
    assert often[2] < once[2]


@given(st.floats(800, 3500), st.lists(RATINGS, min_size=1, max_size=30))
def test_the_rating_that_made_the_scores_is_found(rating: float, problems: list[float]) -> None:
    found = elo_rating([RatedResult(problem, expected_score(rating, problem)) for problem in problems])
    assert found.value == pytest.approx(rating, abs=1e-3)


@given(st.lists(RATINGS, min_size=1, max_size=30))
def test_a_rating_without_a_bound_says_so(problems: list[float]) -> None:
    solved = elo_rating([RatedResult(problem, 1.0) for problem in problems])
    failed = elo_rating([RatedResult(problem, 0.0) for problem in problems])
    assert (solved.value, solved.high, failed.value, failed.low) == (None, None, None, None)
    assert solved.low is not None
    assert failed.high is not None
    # The two are the same question asked from the other side.
    mirrored = elo_rating([RatedResult(-problem, 1.0) for problem in problems])
    assert mirrored.low == pytest.approx(-failed.high, abs=1e-4)


def test_the_bound_of_one_solved_problem_is_where_the_likelihood_falls_to_that_of_the_test() -> None:
    # E(r) = exp(-1.9207), so the odds are E / (1 - E) below the problem's.
    odds = 0.14650 / (1 - 0.14650)
    assert elo_rating([RatedResult(2000, 1.0)]).low == pytest.approx(2000 + 400 * log10(odds), abs=0.1)


def test_ninety_five_of_a_hundred_intervals_hold_the_true_rating() -> None:
    draw = Random(0)
    num_holding, num_trials = 0, 400
    for _ in range(num_trials):
        rating = draw.uniform(1200, 2000)
        problems = [100.0 * draw.randint(8, 24) for _ in range(60)]
        played = [RatedResult(problem, float(draw.random() < expected_score(rating, problem))) for problem in problems]
        low, _, high = bounded(elo_rating(played))
        num_holding += low <= rating <= high
    # Three standard deviations of a share of 0.95 in 400 trials are 0.033.
    assert 0.917 <= num_holding / num_trials <= 0.983


def test_a_rating_is_written_with_the_bounds_that_it_has() -> None:
    assert elo_text(Elo(1523.4, 1402.0, 1650.2)) == "1523 (1402 to 1650)"
    assert elo_text(Elo(None, 2100.0, None)) == "at least 2100"
    assert elo_text(Elo(None, None, 900.0)) == "at most 900"


def test_no_problem_and_a_score_above_one_are_errors() -> None:
    with pytest.raises(ValueError, match="no problem"):
        elo_rating([])
    with pytest.raises(ValueError, match="outside of 0 to 1"):
        elo_rating([RatedResult(1500, 1.5)])
