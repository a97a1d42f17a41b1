"""The rows of a data file, one at a time: parquet, JSON lines or a JSON array, plain or compressed.

INVARIANT: at most one batch of rows of a parquet file, or one record of another file, is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nouscoder.data.json_records import read_records
from nouscoder.data.problems import ProblemFileError

_BATCH_ROWS = 16


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row and its number in the file, counted from 1. `fault`: it cannot be read."""

    number: int
    value: Any
    fault: str = ""


def file_rows(path: Path, skip: int) -> Iterator[SourceRow]:
    """The rows of a file without the first `skip`. Raises UnreadableFile and ProblemFileError."""
    rows = _parquet_rows(path, skip) if path.suffix == ".parquet" else _json_rows(path, skip)
    yield from rows


def num_rows(path: Path) -> int | None:
    """The number of rows, where the file says it."""
    if path.suffix != ".parquet":
        return None
    return int(_parquet_file(path).metadata.num_rows)


def _json_rows(path: Path, skip: int) -> Iterator[SourceRow]:
    number = 0
    for record in read_records(path):
        # BIG-Bench Hard's files are one object that holds the rows.
        examples = record.value.get("examples") if isinstance(record.value, dict) else None
        for value in examples if isinstance(examples, list) else [record.value]:
            number += 1
            if number > skip:
                yield SourceRow(number, value, record.fault)


def _parquet_rows(path: Path, skip: int) -> Iterator[SourceRow]:
    file = _parquet_file(path)
    number = 0
    for group in range(file.metadata.num_row_groups):
        in_group = file.metadata.row_group(group).num_rows
        if number + in_group <= skip:
            number += in_group
            continue
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group]):
            for value in batch.to_pylist():
                number += 1
                if number > skip:
                    yield SourceRow(number, value)


def _parquet_file(path: Path) -> Any:
    import pyarrow.parquet as parquet
    from pyarrow.lib import ArrowException

    try:
        return parquet.ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise ProblemFileError(f"{path} cannot be read: {error}") from error
