"""How rollout records travel between a worker and the broker.

A worker submits rollouts, and pieces of those that are being sampled, in messages of bounded size, because the broker
holds a whole message in memory while it handles it. It reads ranges of records as a stream of pieces, and after an
interruption asks for what is still missing (`RangeReader`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from nouscoder.domain.partial import EncodedPiece, PartialRollout
from nouscoder.domain.rollout import Rollout
from nouscoder.rpc.pairs import HEADER, PIECE, RANGE
from nouscoder.store.partial_record import encode_piece
from nouscoder.store.record_store import ByteRange
from nouscoder.store.rollout_record import encode_rollout
from nouscoder.v1 import broker_pb2

_MESSAGE_BYTES = 2 * 1024**2
_MAX_RANGES = 4096

Item = TypeVar("Item")


def messages_of(rollouts: Iterable[tuple[str, Rollout]]) -> Iterator[list[broker_pb2.SubmittedRollout]]:
    """(lease_id, rollout) pairs, cut into messages of at most _MESSAGE_BYTES, or of one rollout that is larger."""
    return _bounded((_submitted(lease_id, rollout) for lease_id, rollout in rollouts), lambda item: len(item.record))


def partial_messages(pieces: Mapping[str, PartialRollout]) -> Iterator[list[broker_pb2.PartialPiece]]:
    """The pieces by lease id, cut into messages of at most _MESSAGE_BYTES, or of one piece that is larger."""
    return _bounded((_piece(lease_id, piece) for lease_id, piece in pieces.items()), lambda item: len(item.data))


def _submitted(lease_id: str, rollout: Rollout) -> broker_pb2.SubmittedRollout:
    header, record = encode_rollout(rollout)
    return broker_pb2.SubmittedRollout(lease_id=lease_id, header=HEADER.encode(header), record=record)


def _piece(lease_id: str, piece: PartialRollout) -> broker_pb2.PartialPiece:
    versions = (piece.oldest_version, piece.newest_version)
    return PIECE.to(EncodedPiece(lease_id, piece.first_token, piece.end_token, *versions, encode_piece(piece)))


def _bounded(items: Iterable[Item], size_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    message: list[Item] = []
    num_bytes = 0
    for item in items:
        if message and num_bytes + size_of(item) > _MESSAGE_BYTES:
            yield message
            message, num_bytes = [], 0
        message.append(item)
        num_bytes += size_of(item)
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
        rest = [_without_first(wanted[0], self._offset), *wanted[1:]]
        return broker_pb2.StreamRecordsRequest(ranges=map(RANGE.to, rest))

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


def _without_first(whole: ByteRange, num_bytes: int) -> ByteRange:
    return replace(whole, offset=whole.offset + num_bytes, num_bytes=whole.num_bytes - num_bytes)
