"""The answer behind a prompt that was cut is found in linear time, and is the same as by trying each place."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from nouscoder.verifier.api.remote_rewards import answer_in
from nouscoder.verifier.grading.validation import InvalidSubmission


def by_trying(query: str, prompt: str) -> str | None:
    """The begin of the query, 64 characters or all of it, must be in the prompt."""
    for at in [0, *range(1, len(prompt) - min(64, len(query)) + 1)]:
        if query.startswith(prompt[at:]):
            return query[len(prompt) - at :]
    return None


def found(query: str, prompt: str) -> str | None:
    try:
        return answer_in(query, prompt)
    except InvalidSubmission:
        return None


def test_the_longest_end_of_the_prompt_is_taken() -> None:
    draw = random.Random(0)
    for _ in range(3000):
        prompt = "".join(draw.choices("ab", weights=(9, draw.randint(1, 9)), k=draw.randint(1, 400)))
        query = prompt[draw.randint(0, len(prompt) - 1) :] + "".join(draw.choices("abc", k=draw.randint(0, 99)))
        assert found(query, prompt) == by_trying(query, prompt), (query, prompt)


class _Compared(str):
    """Counts the characters that are compared or copied."""

    num = 0

    def __getitem__(self, key: object) -> str:
        part = super().__getitem__(key)  # type: ignore[index]
        _Compared.num += len(part)
        return part


@pytest.mark.parametrize(
    "texts",
    [
        lambda n: ("a" * n + "b", "a" * 2 * n),
        lambda n: ("ab" * n + "c", "ab" * 2 * n),
        lambda n: (("a" * 99 + "b") * (n // 100) + "c", ("a" * 99 + "b") * (n // 50)),
    ],
)
def test_a_prompt_that_repeats_itself_takes_linear_time(texts: Callable[[int], tuple[str, str]]) -> None:
    """One body held the thread for large bodies for 45 s."""
    query, prompt = texts(100_000)
    _Compared.num = 0
    found(_Compared(query), _Compared(prompt))
    assert _Compared.num < 40 * len(prompt)
