"""The tokens of rollouts that are being sampled, kept so that another worker can continue them.

INVARIANT: what is kept of a rollout is its beginning, as one worker after the other sampled it. Only the holder of the
lease adds to it. It is gone as soon as the rollout is submitted or has ended.

A piece has about 8 bytes a token, and with router replay layers * top_k bytes more. It goes through the script that
checks the lease, so check and append are one step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nouscoder.broker.errors import InvalidRequest, RedisFull
from nouscoder.broker.pressure import MemoryWatch
from nouscoder.broker.store import Store, Value
from nouscoder.broker.streams import Stream, parse_lease
from nouscoder.broker.wakeups import Waits
from nouscoder.domain.partial import EncodedPiece

_ROLLOUT_ID = re.compile(r"g\d+-\d+")
# A piece has an id for each token, and a log-probability for each sampled one.
_MIN_TOKEN_BYTES = 4
_LOST = -1


class Partials:
    """The kept tokens of one run."""

    def __init__(self, store: Store, memory: MemoryWatch, waits: Waits) -> None:
        self._store = store
        self._memory = memory
        self._waits = waits

    async def keep(self, worker_id: str, pieces: Sequence[EncodedPiece]) -> list[int]:
        """Add the pieces; returns for each how many tokens of its rollout are kept then, -1 when the lease is lost.

        A piece from token 0 on replaces what is kept. Any other is added only if it begins where the kept tokens end.
        While no group is admitted, nothing is taken, so that sampled rollouts have the room: raises RedisFull. Raises
        InvalidRequest.
        """
        values = [value for piece in pieces for value in _values(piece)]
        if not values:
            return []
        if not self._memory.pressure.admits:
            raise RedisFull(self._memory.pressure.reason)
        kept = [int(number) for number in await self._store.run("keep_partials", worker_id, *values)]
        if _LOST in kept:
            self._waits.tasks.wake()  # groups that were too old freed slots
        return kept

    async def read(self, rollout_id: str) -> bytes:
        """The pieces of a rollout, one after another; empty when nothing is kept. Raises InvalidRequest."""
        if _ROLLOUT_ID.fullmatch(rollout_id) is None:
            raise InvalidRequest(f"{rollout_id[:100]!r} is not a rollout of this broker")
        return await self._store.get(f"partial:{rollout_id}") or b""


def _values(piece: EncodedPiece) -> list[Value]:
    """As the script takes them. Raises InvalidRequest when the numbers cannot be true."""
    ref, num_tokens = parse_lease(piece.lease_id), piece.end_token - piece.first_token
    if ref.stream is not Stream.TASKS:
        raise InvalidRequest(f"lease {ref} is on {ref.stream}, not on tasks")
    if num_tokens < 1 or len(piece.data) < _MIN_TOKEN_BYTES * num_tokens:
        raise InvalidRequest(f"a piece of {num_tokens} tokens does not have {len(piece.data)} bytes")
    if piece.oldest_version > piece.newest_version:
        raise InvalidRequest("the oldest version of a piece is newer than its newest")
    numbers = (piece.first_token, piece.end_token, piece.oldest_version, piece.newest_version)
    return [ref.entry, ref.ticket, *numbers, piece.data]
