"""In which order a submission's tests are run.

A wrong program most often fails on its hardest test, so running that first stops grading early. Which test is hardest
is told by how often it has failed a program before (kill_rates.py), where that is known, and else guessed from the
length of its input. Indices in outcomes stay those of the request.
"""

from __future__ import annotations

from collections.abc import Sequence


def hardest_first(input_sizes: Sequence[int], kill_rates: Sequence[float] | None = None) -> list[int]:
    """Test indices [num_tests], highest kill rate first, of equal ones longest input first, then as in the request."""
    rates = kill_rates if kill_rates is not None else [0.0] * len(input_sizes)
    return sorted(range(len(input_sizes)), key=lambda index: (-rates[index], -input_sizes[index]))
