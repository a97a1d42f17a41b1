"""Where rollout records are kept while their rollouts are in flight: one interface, chosen by `broker.records`.

A record is opaque bytes under a name that is never used twice for different bytes. Who writes it has noted the name
before (broker/lua/announce_records.lua), so that a record whose rollout was refused is found and deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    async def put(self, name: str, record: bytes) -> None:
        """Keep a record. The same record again is welcome."""
        ...

    async def read(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """The bytes of each range: empty where there is no such record, shorter where it ends."""
        ...

    async def delete(self, names: Sequence[str]) -> None:
        """Forget records; names of none are ignored."""
        ...
