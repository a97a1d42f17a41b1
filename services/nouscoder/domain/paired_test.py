"""The exact sign test, for two results on the same problems.

With one sample a problem it is McNemar's exact test.
"""

from __future__ import annotations

from math import comb


def sign_test(num_better: int, num_worse: int) -> float:
    """The two-sided p-value of `num_better` wins and `num_worse` losses; ties do not count. 1.0 without either.

    Each problem is a win with probability 1/2 when both models are equally good (Dixon and Mood 1946; for one sample a
    problem McNemar 1947, exact form). Raises ValueError for a negative number.
    """
    if num_better < 0 or num_worse < 0:
        raise ValueError(f"{num_better} better and {num_worse} worse are no counts")
    total = num_better + num_worse
    tail: int = sum(comb(total, count) for count in range(min(num_better, num_worse) + 1))
    # Integers are divided, because 2.0**total overflows above 1023.
    return float(min(1.0, 2 * tail / 2**total))
