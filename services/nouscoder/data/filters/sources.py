"""The inputs of a selection as problems without tests, from problem files of every form.

A parquet file is read where it is. Other files are first staged: their tests go to a store in a folder of the
selection, and the rest to parquet files beside it.

INVARIANT: the tests of one problem at most are in memory; of the other columns, the references are in memory for one
batch of rows only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nouscoder.data.filters.step import Candidate, CannotFilter
from nouscoder.data.problem_parquet import ParquetRow, is_parquet, read_rows, row_of, store_of, write_rows
from nouscoder.data.reading import read_referenced
from nouscoder.data.references import Reference
from nouscoder.store.blobs import open_blobs
from nouscoder.store.tests import TestStore

_PART_PROBLEMS = 2000


class Sources:
    """The inputs. `staging` is a folder for what they are turned into."""

    def __init__(self, inputs: Sequence[Path], staging: Path) -> None:
        self._files: list[Path] = []
        for number, path in enumerate(inputs):
            self._files += [path] if is_parquet(path) else _staged(path, staging / str(number))

    def candidates(self) -> list[Candidate]:
        """All problems. Raises CannotFilter when two have the same problem id."""
        found: dict[str, Candidate] = {}
        for number, path in enumerate(self._files):
            store = store_of(path)
            for at, row in enumerate(read_rows(path)):
                references = row.values.pop("references")
                one = Candidate(number, at, row, len(references), store)
                if one.problem_id in found:
                    raise CannotFilter(f"problem_id {one.problem_id!r:.100} is in the inputs twice")
                found[one.problem_id] = one
        return list(found.values())

    def rows(self, chosen: Sequence[Candidate]) -> Iterator[tuple[Candidate, ParquetRow]]:
        """The whole rows of some problems, in the order of the inputs."""
        by_place = {(one.file, one.row): one for one in chosen}
        for number, path in enumerate(self._files):
            if not any(one.file == number for one in chosen):
                continue
            for at, row in enumerate(read_rows(path)):
                if (number, at) in by_place:
                    yield by_place[number, at], row

    def references(self, chosen: Sequence[Candidate]) -> Iterator[tuple[Candidate, tuple[Reference, ...]]]:
        """The reference solutions of some problems, in the order of the inputs."""
        for one, row in self.rows(chosen):
            yield one, tuple(Reference(found["code"], found["language"]) for found in row.values["references"])


def _staged(path: Path, folder: Path) -> list[Path]:
    """The parquet files that a file of another form becomes."""
    folder.mkdir(parents=True)
    place = str(folder / "tests")
    store = TestStore(open_blobs(place, bulk=True))  # staging need not survive a power failure
    parts: list[Path] = []
    rows: list[dict[str, Any]] = []
    for item in read_referenced(path):
        rows.append(row_of(item, store.put(item.problem.tests)))
        if len(rows) == _PART_PROBLEMS:
            parts.append(_part(folder, len(parts), rows, place))
            rows = []
    return [*parts, *([_part(folder, len(parts), rows, place)] if rows else [])]


def _part(folder: Path, number: int, rows: list[dict[str, Any]], place: str) -> Path:
    path = folder / f"{number:06}.parquet"
    write_rows(path, rows, place)
    return path
