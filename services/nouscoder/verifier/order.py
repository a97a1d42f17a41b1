"""In which order a submission's tests are run.

A wrong program most often fails on its hardest test, so running that first stops grading early; which test is hardest
is guessed from the length of its input. Indices in outcomes stay those of the request.
"""

from __future__ import annotations

from collections.abc import Sequence


def hardest_first(input_sizes: Sequence[int]) -> list[int]:
    """Test indices, longest input first; equal lengths keep the order of the request."""
    return sorted(range(len(input_sizes)), key=lambda index: -input_sizes[index])
