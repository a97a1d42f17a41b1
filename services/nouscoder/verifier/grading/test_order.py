"""The order in which the tests of a submission run.

A wrong program fails most often on its hardest test, so running that test first ends grading early. The hardest test is
the one that has failed the largest share of programs so far (kill_rates.py). Where no rates are known, it is the one
with the longest input. Outcomes keep the indices of the request.
"""

from __future__ import annotations

from collections.abc import Sequence


def hardest_first(input_sizes: Sequence[int], kill_rates: Sequence[float] | None = None) -> list[int]:
    """Test indices [num_tests]: highest kill rate first, then longest input, then the order of the request."""
    rates = kill_rates if kill_rates is not None else [0.0] * len(input_sizes)
    return sorted(range(len(input_sizes)), key=lambda index: (-rates[index], -input_sizes[index]))
