"""Where rollout records are kept while their rollouts are in flight: one interface, chosen by `broker.records`.

A record is opaque bytes. A name is never used twice for different bytes. The writer announces the name first
(broker/lua/announce_records.lua), so that the record of a refused rollout is found and deleted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class RecordStoreError(Exception):
    """The store does not answer or cannot write; the same call may work later."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`num_bytes` of the record `name` from `offset` on."""

    name: str
    offset: int
    num_bytes: int


class RecordStore(Protocol):
    """Raises RecordStoreError."""

    async def put(self, records: Mapping[str, bytes]) -> None:
        """Keep records by name. After an error some are kept; putting the same ones again is allowed."""
        ...

    async def read(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """The bytes of each range: empty where there is no such record, shorter where it ends."""
        ...

    async def delete(self, names: Sequence[str]) -> None:
        """Forget records; names of none are ignored."""
        ...
