"""Batches as they were leased: batches/00000007.pb, saved before they are trained on, so that they can be replayed.

INVARIANT: a batch that was committed is here until every checkpoint that may be needed holds its effect.
"""

from __future__ import annotations

from pathlib import Path

from nouscoder.atomic_files import numbered, remove, write_whole
from nouscoder.domain.batch import Batch
from nouscoder.errors import NousCoderError
from nouscoder.rpc.rollout_convert import decode_batch, encode_batch

_SUFFIX = ".pb"


class SavedBatchError(NousCoderError):
    """A saved batch cannot be read; the message names it."""


class SavedBatches:
    """The folder batches/. The newest `keep` stay, and all that are newer than the oldest checkpoint that is kept."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def save(self, batch: Batch) -> None:
        """Raises StorageError."""
        write_whole(self._path(batch.batch_id), encode_batch(batch))

    def prune(self, last_unneeded: int) -> None:
        """Remove the batches up to `last_unneeded`, except those among the newest `keep`."""
        for number, path in [*numbered(self._folder, _SUFFIX).items()][: -self._keep]:
            if number <= last_unneeded:
                remove(path)

    def numbers(self) -> list[int]:
        """Which batches are saved, ascending."""
        return [*numbered(self._folder, _SUFFIX)]

    def load(self, batch_id: int) -> Batch:
        """Raises SavedBatchError when it is not there or not a batch."""
        path = self._path(batch_id)
        try:
            return decode_batch(path.read_bytes())
        except OSError as error:
            raise SavedBatchError(f"{path} cannot be read: {error.strerror}") from error
        except Exception as error:
            raise SavedBatchError(f"{path} is not a saved batch: {error}") from error

    def _path(self, batch_id: int) -> Path:
        return self._folder / f"{batch_id:08d}{_SUFFIX}"
