"""The rows of a data file, one at a time: parquet, JSON lines, a JSON array or CSV, plain or compressed.

INVARIANT: at most one batch of rows of a parquet file, or one record of another file, is in memory. Both are bounded.

The rows of a data set of a hub are read with the library `datasets` while they are downloaded. `hub:ORGANISATION/NAME`
names a data set. What follows a question mark chooses a part of it:
`hub:livecodebench/code_generation_lite?file=test6.jsonl`, or split, subset and revision, joined with &. A local folder
of the same layout can take the place of the name. No program of a data set runs: `datasets` runs none since 4.0.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from nouscoder.data.bounded_files import MAX_LINE_BYTES, FileRefused, bounded_lines, opened
from nouscoder.data.importers.fields import ANSWERS, QUESTIONS, Row, optional_text
from nouscoder.data.json_records import SourceRow, read_records
from nouscoder.data.packages import packages_at
from nouscoder.data.problems import ProblemFileError, ReferencedProblem
from nouscoder.errors import Unusable, did_you_mean, why_unreadable
from nouscoder.input_file import regular
from nouscoder.installation import how_to_install

_BATCH_ROWS = 16
_SMALL_GROUP_BYTES = 64 * 1024**2


def file_rows(path: Path, skip: int) -> Iterator[SourceRow]:
    """The rows of a file without the first `skip`. Raises UnreadableFile and ProblemFileError."""
    if path.suffix == ".parquet":
        yield from _parquet_rows(path, skip)
    elif path.name.removesuffix(".gz").removesuffix(".zst").endswith(".csv"):
        yield from _csv_rows(path, skip)
    else:
        yield from _json_rows(path, skip)


def example_rows(path: Path, skip: int) -> Iterator[SourceRow]:
    """The same rows, where a record that has `examples` and no question or answer stands for its examples.

    BIG-Bench Hard's files are one such record.
    """
    number = 0
    for row in file_rows(path, 0):
        examples = row.value.get("examples") if isinstance(row.value, dict) else None
        if not isinstance(examples, list) or not examples or optional_text(row.value, *QUESTIONS, *ANSWERS):
            examples = [row.value]
        for value in examples:
            number += 1
            if number > skip:
                yield SourceRow(number, value, row.fault)


@dataclass(frozen=True, slots=True)
class Format:
    """`read` makes a problem of a row and its number in the file, counted from 1, or raises Rejected.

    `rows` finds the rows of a file or folder, from the given number of rows on.
    """

    read: Callable[[Row, int], ReferencedProblem]
    about: str
    rows: Callable[[Path, int], Iterator[SourceRow]] = file_rows

    @property
    def reads_a_hub(self) -> bool:
        """Whether rows of a hub have this format, not only files."""
        return self.rows in (file_rows, example_rows)


def num_rows(path: Path) -> int | None:
    """The number of rows, where the file says it."""
    if path.suffix != ".parquet":
        return None
    with _parquet_file(path) as file:
        return int(file.metadata.num_rows)


def column_names(path: Path) -> set[str]:
    """The columns of a parquet file, or the fields of another file's first record. Raises what `file_rows` raises."""
    if path.suffix == ".parquet":
        with _parquet_file(path) as file:
            return set(file.schema_arrow.names)
    first = next(_json_rows(path, 0), None)
    return set(first.value) if first is not None and isinstance(first.value, dict) else set()


def _json_rows(path: Path, skip: int) -> Iterator[SourceRow]:
    for number, record in enumerate(read_records(path), 1):
        if number > skip:
            yield SourceRow(number, record.value, record.fault)


def _csv_rows(path: Path, skip: int) -> Iterator[SourceRow]:
    """The first line has the names of the columns."""
    csv.field_size_limit(MAX_LINE_BYTES)
    try:
        with opened(path) as file:
            lines = (line.decode() for line in bounded_lines(file))
            for number, value in enumerate(csv.DictReader(lines), 1):
                if number > skip:
                    more = len(value.pop(None, ()))
                    yield SourceRow(number, value, f"it has {more} values more than the first line" if more else "")
    except (OSError, ValueError, csv.Error) as error:
        raise ProblemFileError(f"{path} cannot be read: {why_unreadable(error)}") from error


def _parquet_rows(path: Path, skip: int) -> Iterator[SourceRow]:
    with _parquet_file(path) as file:
        number = 0
        for group in range(file.metadata.num_row_groups):
            about = file.metadata.row_group(group)
            if number + about.num_rows <= skip:
                number += about.num_rows
                continue
            # Rows may share one long text, which each of them gets.
            num_rows = _BATCH_ROWS if about.total_byte_size <= _SMALL_GROUP_BYTES else 1
            for batch in file.iter_batches(num_rows, row_groups=[group]):
                if batch.nbytes > MAX_LINE_BYTES:
                    most = f"{MAX_LINE_BYTES // 1024**2} MiB"
                    raise ProblemFileError(f"{path} cannot be read: rows after row {number} are larger than {most}")
                for value in batch.to_pylist():
                    number += 1
                    if number > skip:
                        yield SourceRow(number, value)


def package_rows(path: Path, skip: int, marker: str) -> Iterator[SourceRow]:
    """The name and the files of each package at a path. Raises ProblemFileError when none holds the file `marker`."""
    number = 0
    try:
        for number, (name, files) in enumerate(packages_at(path, marker), 1):
            if number > skip:
                yield SourceRow(number, {"name": name, "files": files})
    except FileRefused as error:
        raise ProblemFileError(f"{path} cannot be read: {error}") from error
    if not number:
        raise ProblemFileError(f"{path} holds no {marker}")


@contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    """Raises ProblemFileError also for what is found out later: pages that are damaged, or too large for the memory."""
    import pyarrow.parquet as parquet
    from pyarrow.lib import ArrowException

    try:
        with parquet.ParquetFile(regular(path)) as file:
            yield file
    except (ArrowException, OSError, UnicodeDecodeError, MemoryError) as error:
        reason = (str(error).splitlines() or ["there is not enough memory"])[0]
        raise ProblemFileError(f"{path} cannot be read: {reason}") from error


PREFIX = "hub:"
_CONTACT_S = 10.0


class HubDataUnusable(Unusable):
    """A data set of a hub cannot be read. The message names it and says why."""


@dataclass(frozen=True, slots=True)
class HubRows:
    """A data set and the part of it that is read. With a `revision` an interrupted import goes on in the same rows."""

    name: str
    split: str = "train"
    subset: str = ""
    file: str = ""
    revision: str = ""

    def __str__(self) -> str:
        chosen = [f"{part}={getattr(self, part)}" for part in _PARTS if getattr(self, part)]
        return f"{PREFIX}{self.name}?{'&'.join(chosen)}"

    def rows(self, skip: int) -> Iterator[SourceRow]:
        """The rows without the first `skip`. Raises HubDataUnusable."""
        load = loader_of_hubs()
        if not Path(self.name).is_dir():
            self._require_hub()
        try:
            data = load(**self._chosen(), split=self.split, streaming=True)
            for number, value in enumerate(data.skip(skip), skip + 1):
                # The library reads texts that are dates as dates; the importers expect what the file has.
                dates = {key: each.isoformat() for key, each in value.items() if isinstance(each, date)}
                yield SourceRow(number, {**value, **dates})
        except Exception as error:  # the library raises errors of the network, of the disk, of pyarrow and of its own
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise HubDataUnusable(f"{self} cannot be read: {reason[:300]}") from error

    def _require_hub(self) -> None:
        """Raises HubDataUnusable at once where there is no way to the hub: the library tries for half a minute."""
        import httpx  # the learner's image has none
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            return  # then the library asks nobody
        try:
            httpx.head(constants.ENDPOINT, timeout=_CONTACT_S)
        except httpx.TransportError as error:
            raise HubDataUnusable(
                f"{self} cannot be read: {constants.ENDPOINT} is not reached: {error}; where there is a connection:"
                f" hf download {self.name} --repo-type dataset --local-dir {self.name}, and put the folder"
                f" {self.name} here, which is read in place of the hub"
            ) from None

    def _chosen(self) -> dict[str, Any]:
        """Arguments of `load_dataset`."""
        if not self.file:
            return {"path": self.name, "name": self.subset or None, "revision": self.revision or None}
        # By its address, because the library refuses each file of a data set that has a program, as LiveCodeBench's.
        revision = f"@{self.revision}" if self.revision else ""
        folder = self.name if Path(self.name).is_dir() else f"hf://datasets/{self.name}{revision}"
        return {
            "path": "parquet" if self.file.endswith(".parquet") else "json",
            "data_files": f"{folder}/{self.file}",
        }


_PARTS = tuple(item.name for item in fields(HubRows) if item.name != "name")


def hub_rows(text: str) -> HubRows:
    """The data set that a text with PREFIX names. Raises HubDataUnusable."""
    name, _, query = text.removeprefix(PREFIX).partition("?")
    chosen = dict(parse_qsl(query, keep_blank_values=True))
    for part in chosen:
        if part not in _PARTS:
            raise HubDataUnusable(
                f"{text}: unknown part {part!r}{did_you_mean(part, _PARTS)} (known: {', '.join(_PARTS)})"
            )
    if not name:
        raise HubDataUnusable(f"{text} names no data set: {PREFIX}ORGANISATION/NAME")
    return HubRows(name, **chosen)


def loader_of_hubs() -> Any:
    """The function that reads a hub's data sets. Raises HubDataUnusable when its library is missing."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise HubDataUnusable(f"data sets of a hub need the library datasets: {how_to_install('hub')}") from None
    logging.getLogger("huggingface_hub").handlers.clear()  # its lines would be shown twice
    return load_dataset


def files_with(path: Path, name: str) -> list[Path]:
    """The data files in a folder whose rows have this column. Raises ProblemFileError."""
    endings = (".parquet", ".jsonl", ".json", ".jsonl.gz", ".jsonl.zst")
    found = [file for file in sorted(path.rglob("*")) if file.name.endswith(endings) and name in column_names(file)]
    if not found:
        raise ProblemFileError(f"{path} is no folder with a file (parquet, JSON lines) that has the column {name}")
    return found
