"""Places that clients share: for completions that are sampled, and for agents that wait for a session.

INVARIANT: at most `most` places are taken, and no client has more of them than it leaves free. So a client alone gets
half of them, and there is always one for another client until many clients are here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from nouscoder.generation.openai.schema import busy


class Shares:
    """`what` names the holders of places in the refusal."""

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self._taken: Counter[str] = Counter()

    @contextmanager
    def place(self, client: str) -> Iterator[None]:
        """A place of this client. Raises ApiFault (429) when it has none left."""
        taken = self._taken.total()
        if self._taken[client] >= self._most - taken:
            raise busy(
                f"{taken} of {self._most} {self._what}, {self._taken[client]} of them yours: a client has at most half"
                " of the places that others leave; retry later"
            )
        self._taken[client] += 1
        try:
            yield
        finally:
            self._taken[client] -= 1
            self._taken += Counter()  # without clients that have none
