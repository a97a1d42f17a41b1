"""pass@k: the probability that at least one of k rollouts of a problem is right."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

USUAL_K = (1, 2, 4, 5, 8, 10, 16, 32, 50, 64, 100, 128)


def pass_at_k(num_rollouts: int, num_right: int, k: int) -> float:
    """The unbiased estimate 1 - C(n - c, k) / C(n, k) from n rollouts of which c are right.

    Chen et al. 2021, 2107.03374, equation 1. Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= num_rollouts or not 0 <= num_right <= num_rollouts:
        raise ValueError(f"pass@{k} of {num_right} right in {num_rollouts} rollouts is not defined")
    return 1.0 - comb(num_rollouts - num_right, k) / comb(num_rollouts, k)


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> float | None:
    """The mean over problems of (rollouts, right); None when a problem has fewer than k rollouts, or there is none."""
    if not counts or min(num_rollouts for num_rollouts, _ in counts) < k:
        return None
    return sum(pass_at_k(num_rollouts, num_right, k) for num_rollouts, num_right in counts) / len(counts)
