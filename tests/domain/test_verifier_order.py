"""The order in which tests are run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nouscoder.verifier.order import hardest_first


def test_longest_input_first_and_ties_in_the_order_of_the_request() -> None:
    assert hardest_first([1, 5, 3, 5, 0]) == [1, 3, 2, 0, 4]


@given(st.lists(st.integers(min_value=0)))
def test_every_test_is_run_once(sizes: list[int]) -> None:
    assert sorted(hardest_first(sizes)) == list(range(len(sizes)))
