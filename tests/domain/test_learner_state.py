"""The learner's state: a set of groups as a bitmap that Redis reads as its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.domain.learner_state import TrainedGroups, group_number

_batches = st.lists(st.integers(0, 300), max_size=40, unique=True)


@given(_batches)
def test_a_set_of_groups_holds_what_was_added_and_nothing_else(numbers: list[int]) -> None:
    groups = TrainedGroups()
    for place in range(0, len(numbers), 3):
        groups = groups.plus(numbers[place : place + 3])
    assert [number for number in range(400) if number in groups] == sorted(numbers)
    assert groups.next_group == max(numbers, default=-1) + 1


@given(_batches.filter(bool))
def test_a_group_is_added_once(numbers: list[int]) -> None:
    groups = TrainedGroups().plus(numbers)
    with pytest.raises(ValueError, match=f"group {numbers[0]} was trained on before"):
        groups.plus([500, numbers[0]])


def test_the_bits_are_those_that_redis_sets() -> None:
    assert TrainedGroups().plus([0, 9]).bits == b"\x80\x40"


def test_the_number_of_a_group_is_in_its_id() -> None:
    assert group_number("g000012") == 12
    assert group_number("g1234567") == 1234567
    for wrong in ("g12", "000012", "g000012-3", "b0g1", ""):
        with pytest.raises(ValueError, match="not the id of a group"):
            group_number(wrong)
