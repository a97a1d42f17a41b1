"""A policy version that all ranks write: each its own rows, and what changed in them since the version before.

No rank gathers the weights. The ranks share the run folder, and the files of a version have the same tensors at the
same places as those of the version before, which this process has written. So a rank knows where its rows lie.

    rank 0      makes the files, with the headers of those before     begin
    each rank   copies its rows, then trains on                        own_rows
                reads the same rows of the version before,
                writes its rows, and a file of what changed            write_rows
    rank 0      waits for all, and makes the deltas of the changes     finish

INVARIANT: files and deltas have, byte for byte, what one process would write (publisher.py, delta.py). A version in
which a rank could not write its part does not appear.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.distributed_c10d import Store
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from nouscoder.atomic_files import StorageError, whole_folder
from nouscoder.learner.model.weights import DTYPES, own_weights
from nouscoder.learner.parallel.ranks import RankLost, Ranks
from nouscoder.policy_folder.delta import write_changes
from nouscoder.policy_folder.weights_files import INDEX_FILE, LENGTH_BYTES, TensorSpan, header_length, spans_of

_LOOK_AGAIN_S = 0.02
_DONE = "done"
_CHANGES = ".changes-"  # of a file's name, before the number of the rank

Layout = dict[str, TensorSpan]  # by the name of the tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Neighbouring rows of a tensor: their bytes, uint8, and the place of the first in the bytes of the tensor."""

    start: int
    data: npt.NDArray[np.uint8]


def own_rows(model: PreTrainedModel, dtypes: Mapping[str, torch.dtype], rank: int) -> dict[str, Rows]:
    """A copy of what this rank has of each weight, by name. Rank 0 has the tensors that are not divided."""
    found: dict[str, Rows] = {}
    for name, tensor in own_weights(model).items():
        first, part = 0, tensor
        if isinstance(tensor, DTensor):
            _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            first, part = offset[0], tensor.to_local()
        elif rank:
            continue
        data = part.to("cpu", dtypes.get(name, part.dtype), copy=True).contiguous()
        if data.numel():
            found[name] = Rows(
                first * (data.nbytes // max(1, len(data)) if data.ndim else 0),
                data.reshape(-1).view(torch.uint8).numpy(),
            )
    return found


def _layout_of(file: Path) -> tuple[bytes, Layout]:
    """The first bytes of a file, up to the tensors, and where these lie. Raises OSError and WeightsUnusable."""
    with file.open("rb") as opened:
        length = opened.read(LENGTH_BYTES)
        header = opened.read(header_length(length))
    return length + header, {span.name: span for span in spans_of(header)}


def fits(model: PreTrainedModel, dtypes: Mapping[str, torch.dtype], files: Sequence[Path]) -> bool:
    """Whether the tensors of the files are those of the model, in these types: no experts, no adapters."""
    spans = chain.from_iterable(_layout_of(file)[1].values() for file in files)
    stored = {span.name: (DTYPES.get(span.dtype), span.shape) for span in spans}
    own = own_weights(model).items()
    return stored == {name: (dtypes.get(name, tensor.dtype), tuple(tensor.shape)) for name, tensor in own}


class VersionByRanks:
    """Rank 0's side of a version that all ranks write."""

    def __init__(self, final: Path, before: Sequence[Path], ranks: Ranks) -> None:
        """Make the files of a version, with the headers and sizes of those before. Raises StorageError."""
        self.before = tuple(before)
        self.rows: Mapping[str, Rows] = {}
        self._ranks = ranks
        with ExitStack() as opened:
            self.folder = opened.enter_context(whole_folder(final))
            for index in before[0].parent.glob(INDEX_FILE):
                shutil.copyfile(index, self.folder / index.name)
            for file in before:
                with (self.folder / file.name).open("wb") as made:
                    made.write(_layout_of(file)[0])
                    made.truncate(file.stat().st_size)
            self._open = opened.pop_all()

    def copy_rows(self, model: PreTrainedModel, dtypes: Mapping[str, torch.dtype]) -> None:
        """Copy this rank's rows, so that training can go on."""
        self.rows = own_rows(model, dtypes, 0)

    def finish(self) -> tuple[str, ...]:
        """Write the own rows, wait for all ranks, and make the deltas; their names. Raises StorageError, RankLost."""
        ranks = self._ranks
        assert ranks.store is not None, "a learner of one rank has nobody to wait for"
        with self._open:
            write_rows(self.rows, self.before[0].parent, self.folder, 0)
            for rank in range(1, ranks.size):
                key = f"{self.folder.name}/{rank}"
                until = time.monotonic() + ranks.patience_s
                while not ranks.store.check([key]):
                    if time.monotonic() > until:
                        raise RankLost(
                            f"rank {rank} of the learner did not write its part of a policy within"
                            f" {ranks.patience_s:.0f} s"
                        )
                    time.sleep(_LOOK_AGAIN_S)
                said = ranks.store.get(key).decode()
                ranks.store.delete_key(key)
                if said != _DONE:
                    raise StorageError(f"rank {rank} of the learner could not write its part of a policy: {said}")
            return tuple(_made_delta(self.folder / file.name, ranks.size) for file in self.before)


def write_rows(rows: Mapping[str, Rows], before: Path, folder: Path, rank: int) -> None:
    """Write rows of the tensors into the files in `folder`, and what changes those in `before`. Raises OSError."""
    for file in sorted(before.glob("*.safetensors")):
        begin, layout = _layout_of(file)
        places: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
        added: list[npt.NDArray[np.uint16]] = [np.empty(0, np.uint16)]
        with file.open("rb") as old, (folder / file.name).open("r+b") as new:
            for name in layout.keys() & rows.keys():
                place, data = len(begin) + layout[name].start + rows[name].start, rows[name].data
                old.seek(place)
                words = np.frombuffer(old.read(len(data)), "<u2")
                changed = np.flatnonzero(data.view("<u2") != words)
                places.append(changed + place // 2)
                added.append(data.view("<u2")[changed] - words[changed])
                new.seek(place)
                new.write(data.data)
        np.savez(_changes_of(folder / file.name, rank), places=np.concatenate(places), added=np.concatenate(added))


def write_own_rows(rows: Mapping[str, Rows], before: Path, folder: Path, rank: int, store: Store) -> None:
    """As `write_rows` of another rank than 0, which is told how it ended."""
    said = _DONE
    try:
        write_rows(rows, before, folder, rank)
    except Exception as error:  # rank 0 says it and ends; this thread has nobody to tell
        said = str(error) or type(error).__name__
    store.set(f"{folder.name}/{rank}", said)


def _changes_of(file: Path, rank: int) -> Path:
    return file.with_name(f"{file.name}{_CHANGES}{rank}.npz")


def _made_delta(file: Path, num_ranks: int) -> str:
    """Make the delta of a file of what the ranks have changed."""
    parts = []
    for rank in range(num_ranks):
        with np.load(_changes_of(file, rank)) as found:
            parts.append((found["places"], found["added"]))
        _changes_of(file, rank).unlink()
    places, added = (np.concatenate(side) for side in zip(*parts, strict=True))
    order = np.argsort(places)
    delta = file.with_suffix(".delta")
    write_changes(places[order], added[order], file.stat().st_size, delta)
    return delta.name
