"""The interface of the stores that keep rollout records while their rollouts are in flight (`broker.records`).

A record is opaque bytes. A name is never used for different bytes. The broker announces a name before it writes the
record (broker/lua/announce_records.lua), so the record of a refused rollout can be found and deleted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class RecordStoreError(Exception):
    """The store does not answer or cannot write; the same call may succeed later."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`num_bytes` of the record `name` from `offset` on."""

    name: str
    offset: int
    num_bytes: int


class RecordStore(Protocol):
    """Every method raises RecordStoreError."""

    async def put(self, records: Mapping[str, bytes]) -> None:
        """Keep records by name. After an error some are kept; putting the same ones again is allowed."""

    async def read(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """The bytes of each range: none if there is no such record, fewer if the record ends before."""

    async def delete(self, names: Sequence[str]) -> None:
        """Delete records. Names without a record are ignored."""
