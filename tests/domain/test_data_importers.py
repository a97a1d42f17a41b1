"""The asserts of LeetCodeDataset are parsed, and other statements are refused."""

from __future__ import annotations

import pytest

from nouscoder.data.importers.fields import Rejected
from nouscoder.data.importers.functions import call_cases
from nouscoder.domain.submission import CallCase


def test_asserts_become_call_cases() -> None:
    first, second = "assert candidate(a = [1, -2], b = 'x') == [True, None]", "assert candidate(3) == 2.5"
    check = f"def check(candidate):\n    {first}\n    {second}"
    assert list(call_cases(check)) == [
        CallCase((), {"a": [1, -2], "b": "x"}, [True, None]),
        CallCase((3,), {}, 2.5),
    ]


@pytest.mark.parametrize(
    "statement",
    [
        "assert candidate(1)",
        "assert other(1) == 2",
        "candidate(1)",
        "assert candidate(1) != 2",
        "assert candidate(x) == 2",
        "assert candidate({1}) == 2",
        "assert candidate(**{}) == 2",
    ],
)
def test_other_statements_are_refused(statement: str) -> None:
    with pytest.raises(Rejected, match=r"not of the form|not a literal|not a JSON value|\*\* argument"):
        list(call_cases(f"def check(candidate):\n    {statement}"))
