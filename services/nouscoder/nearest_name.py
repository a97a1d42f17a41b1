"""The known name that is nearest to an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """The question `: did you mean X?` with the known name X nearest to `wrong`; empty when none is near."""
    found = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f": did you mean {found[0]}?" if found else ""
