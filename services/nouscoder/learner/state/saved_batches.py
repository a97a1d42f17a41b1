"""Leased batches, saved to batches/00000007.batch before training, so that they can be replayed.

A file holds the bytes of the broker and of generation unchanged: b"NCBATCH2", the size of the index (8 bytes,
little-endian), the index (nouscoder.v1.Batch: headers, verdicts, rewards), zeros up to a multiple of 8, then the
rollout records in the order of the index, without gaps. Records are read in place, through a memory map.

INVARIANT: a batch is trained only from its saved file, so a replay reads the same bytes as the training. A committed
batch is kept until every checkpoint that may be needed includes it.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from nouscoder.atomic_files import numbered, remove, whole_file
from nouscoder.domain.batch import Batch, GradedRollout, RecordedBatch
from nouscoder.errors import ExitCode, NousCoderError
from nouscoder.rpc.pairs import BATCH, PASSED_BATCH, VERDICT
from nouscoder.store.rollout_record import decode_rollout, size_of_record

_SUFFIX = ".batch"

_MAGIC = b"NCBATCH2"

_START = len(_MAGIC) + 8


class SavedBatchError(NousCoderError):
    """A saved batch cannot be read. The message names it."""

    exit_code = ExitCode.DAMAGED


class RecordsMissing(SavedBatchError):
    """The broker sent fewer bytes of records than the batch has, because Redis forgot some."""


@dataclass(frozen=True, slots=True)
class SavedBatches:
    """The folder batches/. The newest `keep` are kept, and all that are newer than the oldest kept checkpoint."""

    folder: Path
    keep: int

    async def save(self, batch: RecordedBatch, records: AsyncIterable[bytes]) -> None:
        """Save a batch. `records` are the bytes of its records, in order, in pieces of any size.

        Raises RecordsMissing for too few bytes, SavedBatchError for too many, and StorageError.
        """
        path, index, num_bytes = self._path(batch.batch_id), batch.index or BATCH.encode(batch), 0
        with ExitStack() as stack:
            file = stack.enter_context(whole_file(path))
            file.write(_MAGIC + len(index).to_bytes(8, "little") + index + bytes(-len(index) % 8))
            async for data in records:
                file.write(data)
                num_bytes += len(data)
            if num_bytes != batch.num_bytes:
                kind = RecordsMissing if num_bytes < batch.num_bytes else SavedBatchError
                raise kind(f"{path} got {num_bytes} bytes of records, not {batch.num_bytes}")
            await asyncio.to_thread(stack.pop_all().close)  # flushes to the disk

    def prune(self, last_unneeded: int) -> None:
        """Remove the batches up to `last_unneeded`, except those among the newest `keep`."""
        for number, path in [*numbered(self.folder, _SUFFIX).items()][: -self.keep]:
            if number <= last_unneeded:
                remove(path)

    def numbers(self) -> list[int]:
        """The ids of the saved batches, ascending."""
        return [*numbered(self.folder, _SUFFIX)]

    def load(self, batch_id: int) -> Batch:
        """Load a batch. Raises SavedBatchError when it is missing or invalid."""
        path = self._path(batch_id)
        try:
            with path.open("rb") as file:
                view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            if view[: len(_MAGIC)] != _MAGIC:
                raise ValueError("it does not begin with the bytes of a batch")
            index_bytes = int.from_bytes(view[len(_MAGIC) : _START], "little")
            index = PASSED_BATCH.decode(bytes(view[_START : _START + index_bytes]))
            offset = _START + index_bytes + -index_bytes % 8
            rollouts = []
            for recorded in index.rollouts:
                end = offset + size_of_record(view[offset:])
                verdict = VERDICT.decode(recorded.verdict)
                rollouts.append(GradedRollout(decode_rollout(view[offset:end]), verdict, recorded.reward))
                offset = end
            if offset != len(view):
                raise ValueError(f"its records end at byte {offset} of {len(view)}")
            return Batch(index.batch_id, tuple(rollouts), index.policy_version, index.completed)
        except OSError as error:
            later = "" if path.exists() else "; after a restore from a backup the run's keys in Redis must go"
            raise SavedBatchError(f"{path} cannot be read: {error.strerror}{later}") from error
        except Exception as error:
            raise SavedBatchError(f"{path} is not a saved batch: {error}") from error

    def before(self, batch_id: int, count: int) -> list[Batch]:
        """The `count` batches before this one, or as many as there are, the oldest first. Raises SavedBatchError."""
        return [self.load(number) for number in range(max(0, batch_id - count), batch_id)]

    def _path(self, batch_id: int) -> Path:
        return self.folder / f"{batch_id:08d}{_SUFFIX}"
