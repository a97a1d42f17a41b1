"""How rollout records travel between a worker and the broker.

A worker submits rollouts in messages of bounded size (`messages_of`). It reads ranges of records as a stream of pieces,
and after an interruption asks for what is still missing (`RangeReader`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from nouscoder.domain.rollout import Rollout
from nouscoder.rpc import rollout_convert
from nouscoder.store.record_store import ByteRange
from nouscoder.store.rollout_record import encode_rollout
from nouscoder.v1 import broker_pb2

# The broker holds a whole message in memory while it handles it.
_MESSAGE_BYTES = 2 * 1024**2
_MAX_RANGES = 4096


def messages_of(rollouts: Iterable[tuple[str, Rollout]]) -> Iterator[list[broker_pb2.SubmittedRollout]]:
    """(lease_id, rollout) pairs, cut into messages of at most _MESSAGE_BYTES, or of one rollout that is larger."""
    message: list[broker_pb2.SubmittedRollout] = []
    num_bytes = 0
    for lease_id, rollout in rollouts:
        header, record = encode_rollout(rollout)
        if message and num_bytes + len(record) > _MESSAGE_BYTES:
            yield message
            message, num_bytes = [], 0
        message.append(
            broker_pb2.SubmittedRollout(lease_id=lease_id, header=rollout_convert.header_to(header), record=record)
        )
        num_bytes += len(record)
    if message:
        yield message


class RangeReader:
    """How far the bytes of some ranges have come. Use: send `next_request`, pass each answer to `take`, then `end`.

    After an interruption, do not call `end`: the next request asks for the rest.
    """

    def __init__(self, ranges: Sequence[ByteRange]) -> None:
        self._ranges = ranges
        self._place = 0  # of the range that is being read
        self._offset = 0  # of the next byte in it
        self._base = 0  # the place of the first range of the last request
        self._num_asked = 0

    @property
    def is_complete(self) -> bool:
        """Nothing is left to read."""
        return self._place == len(self._ranges)

    def next_request(self) -> broker_pb2.StreamRecordsRequest:
        """Asks for what is still missing, at most _MAX_RANGES ranges at once."""
        wanted = self._ranges[self._place : self._place + _MAX_RANGES]
        self._base, self._num_asked = self._place, len(wanted)
        rest = [_part_of(wanted[0], self._offset), *(_part_of(part, 0) for part in wanted[1:])]
        return broker_pb2.StreamRecordsRequest(ranges=rest)

    def take(self, answer: broker_pb2.StreamRecordsResponse) -> Iterator[tuple[int, bytes]]:
        """The pieces of an answer: (the range's place, bytes)."""
        for piece in answer.pieces:
            place = self._base + piece.range
            if place > self._place:  # the ranges between are of records that are not there, or too short
                self._place, self._offset = place, 0
            yield place, piece.data
            self._offset += len(piece.data)
            if self._offset == self._ranges[place].num_bytes:
                self._place, self._offset = place + 1, 0

    def end(self) -> None:
        """The broker sent everything that it has for the last request."""
        self._place, self._offset = self._base + self._num_asked, 0


def _part_of(whole: ByteRange, offset: int) -> broker_pb2.RecordRange:
    """A range without its first `offset` bytes."""
    return broker_pb2.RecordRange(record=whole.name, offset=whole.offset + offset, num_bytes=whole.num_bytes - offset)
