"""Best of n: the probability that the sample with the highest score among n samples of a problem is right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import comb


def best_of_n(scores: Sequence[float], right: Sequence[bool], n: int) -> float:
    """The mean over all sets of n of the samples; among equal scores each is as likely.

    For n = 1 it is the share that is right, and for the number of samples it says whether the best of all is right. It
    is unbiased, as pass@k is (domain/pass_at_k.py). Raises ValueError unless 1 <= n <= samples.
    """
    if not 1 <= n <= len(scores):
        raise ValueError(f"the best of {n} of {len(scores)} samples is not defined")
    groups: dict[float, list[bool]] = defaultdict(list)
    for score, is_right in zip(scores, right, strict=True):
        groups[score].append(is_right)
    sets, lower, total = comb(len(scores), n), 0, 0.0
    for score in sorted(groups):
        equal = groups[score]
        # The highest score of a set is this one if the set has one of `equal` and none that is higher.
        probability = (comb(lower + len(equal), n) - comb(lower, n)) / sets
        total += probability * sum(equal) / len(equal)
        lower += len(equal)
    return total
