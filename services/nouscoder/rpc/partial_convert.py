"""Pieces of rollouts that are being sampled: protocol <-> domain, and in messages of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nouscoder.domain.partial import EncodedPiece, PartialRollout
from nouscoder.store.partial_record import encode_piece
from nouscoder.v1 import broker_pb2

# The broker holds a whole message in memory while it handles it.
_MESSAGE_BYTES = 2 * 1024**2


def piece_to(lease_id: str, piece: PartialRollout) -> broker_pb2.PartialPiece:
    """Domain -> protocol."""
    return broker_pb2.PartialPiece(
        lease_id=lease_id,
        first_token=piece.first_token,
        end_token=piece.end_token,
        oldest_version=piece.oldest_version,
        newest_version=piece.newest_version,
        data=encode_piece(piece),
    )


def piece_from(message: broker_pb2.PartialPiece) -> EncodedPiece:
    """Protocol -> domain."""
    return EncodedPiece(
        message.lease_id,
        message.first_token,
        message.end_token,
        message.oldest_version,
        message.newest_version,
        message.data,
    )


def partial_messages(pieces: Mapping[str, PartialRollout]) -> Iterator[list[broker_pb2.PartialPiece]]:
    """The pieces by lease id, cut into messages of at most _MESSAGE_BYTES, or of one piece that is larger."""
    message: list[broker_pb2.PartialPiece] = []
    num_bytes = 0
    for lease_id, piece in pieces.items():
        item = piece_to(lease_id, piece)
        if message and num_bytes + len(item.data) > _MESSAGE_BYTES:
            yield message
            message, num_bytes = [], 0
        message.append(item)
        num_bytes += len(item.data)
    if message:
        yield message
