"""Which examples a fine-tuning keeps, and the order of its batches."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.config import SftSection
from nouscoder.sft.choice import Dropped, EpochOrder, ExampleCandidate, choose, is_held_out

SIZES = st.integers(1, 40)


def answers(problem: str, num_right: int, num_wrong: int) -> list[ExampleCandidate]:
    """Answers to a problem, each with tokens of its own."""
    right = [ExampleCandidate(f"{problem}/right/{number}", problem, True, 10) for number in range(num_right)]
    return right + [ExampleCandidate(f"{problem}/wrong/{number}", problem, False, 10) for number in range(num_wrong)]


@given(SIZES, SIZES, st.integers(1, 4), st.integers(0, 5))
def test_each_epoch_has_every_example_once_in_an_order_that_the_seed_decides(
    num_examples: int, batch_size: int, epochs: int, seed: int
) -> None:
    order = EpochOrder(num_examples, batch_size, epochs, seed)
    batches = [order.at(step) for step in range(order.num_steps)]
    assert batches == [EpochOrder(num_examples, batch_size, epochs, seed).at(step) for step in range(order.num_steps)]
    for epoch in range(epochs):
        of_epoch = batches[epoch * order.steps_per_epoch : (epoch + 1) * order.steps_per_epoch]
        assert sorted(number for batch in of_epoch for number in batch) == list(range(num_examples))
        assert all(len(batch) == batch_size for batch in of_epoch[:-1])


def test_an_answer_that_was_cut_off_counts_as_wrong_and_is_not_taught() -> None:
    cut = [ExampleCandidate("", "p", False, 0)] * 3
    numbers, dropped = choose([*answers("p", 1, 1), *cut], SftSection(wrong_below=0.3), 0)
    assert numbers == [0, 1]
    assert dropped == {Dropped.UNFINISHED: 3}


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    one, other = (EpochOrder(50, 50, 2, seed) for seed in (0, 1))
    assert len({one.at(0), one.at(1), other.at(0), other.at(1)}) == 4


@pytest.mark.parametrize(
    ("wrong_below", "kept"),
    [
        (0.0, {"easy/right": 3, "hard/right": 1}),
        (0.5, {"easy/right": 3, "hard/right": 1, "hard/wrong": 3, "never/wrong": 2}),
        (1.0, {"easy/right": 3, "easy/wrong": 1, "hard/right": 1, "hard/wrong": 3, "never/wrong": 2}),
    ],
)
def test_wrong_answers_are_kept_for_hard_problems_only(wrong_below: float, kept: dict[str, int]) -> None:
    candidates = answers("easy", 3, 1) + answers("hard", 1, 3) + answers("never", 0, 2)
    numbers, dropped = choose(candidates, SftSection(wrong_below=wrong_below), seed=0)
    found = Counter(candidates[number].key.rpartition("/")[0] for number in numbers)
    assert found == kept
    assert dropped[Dropped.WRONG] == len(candidates) - len(numbers)


def test_an_answer_that_nobody_has_graded_counts_as_right() -> None:
    candidates = [ExampleCandidate("a", "p", None, 5), ExampleCandidate("b", "p", False, 5)]
    assert choose(candidates, SftSection(), seed=0) == ([0], {Dropped.WRONG: 1})


def test_repeated_and_long_examples_are_dropped_and_counted() -> None:
    candidates = [
        ExampleCandidate("a", "", None, 5),
        ExampleCandidate("a", "", None, 5),
        ExampleCandidate("b", "", None, 6),
    ]
    assert choose(candidates, SftSection(max_tokens=5), seed=0) == ([0], {Dropped.REPEATED: 1, Dropped.TOO_LONG: 1})


def test_the_seed_chooses_among_too_many_examples_of_a_problem() -> None:
    candidates = answers("p", 20, 0) + answers("q", 2, 0) + [ExampleCandidate("alone", "", None, 1)]
    chosen = {seed: choose(candidates, SftSection(max_per_problem=3), seed) for seed in range(3)}
    for numbers, dropped in chosen.values():
        assert Counter(candidates[number].problem for number in numbers) == {"p": 3, "q": 2, "alone": 1}
        assert dropped == {Dropped.OVER_LIMIT: 17}
    assert len({tuple(numbers) for numbers, _ in chosen.values()}) > 1


def test_about_the_asked_share_of_problems_is_held_out() -> None:
    names = [f"problem-{number}" for number in range(2000)]
    held_out = [name for name in names if is_held_out(name, 0.2)]
    assert 330 < len(held_out) < 470  # 400 with a standard deviation of 18
    assert held_out == [name for name in names if is_held_out(name, 0.2)]
    assert not any(is_held_out(name, 0.0) for name in names)
