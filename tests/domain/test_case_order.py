"""The order in which tests run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nouscoder.verifier.grading.progress import hardest_first


def test_the_longest_input_runs_first_and_ties_keep_the_order_of_the_request() -> None:
    assert hardest_first([1, 5, 3, 5, 0]) == [1, 3, 2, 0, 4]


def test_a_higher_kill_rate_comes_before_a_longer_input() -> None:
    assert hardest_first([9, 1, 5, 7], [0.1, 0.5, 0.1, 0.5]) == [3, 1, 0, 2]


@given(st.lists(st.tuples(st.integers(min_value=0), st.sampled_from([0.1, 0.25, 0.5]))))
def test_every_test_runs_once_and_harder_tests_run_first(tests: list[tuple[int, float]]) -> None:
    sizes, rates = [size for size, _ in tests], [rate for _, rate in tests]
    order = hardest_first(sizes, rates)
    assert sorted(order) == list(range(len(tests)))
    keys = [(rates[index], sizes[index]) for index in order]
    assert keys == sorted(keys, reverse=True)
    assert hardest_first(sizes, [0.25] * len(sizes)) == hardest_first(sizes)
