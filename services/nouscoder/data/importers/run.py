"""`nouscoder data import`: rows of a data set become problems in parquet, and their tests go to the test store.

INVARIANT: each row is imported or rejected exactly once, also when the import is killed and started again: a part of
the output and the place in the input that it reaches are recorded together. Rows, problems and tests are streamed; in
memory are one part's rows without their tests, and the problem ids.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from nouscoder.atomic_files import naming_storage_faults, remove, storage_fault, write_whole
from nouscoder.data.bounded_files import FileRefused
from nouscoder.data.check import faults_of
from nouscoder.data.importers.fields import Reason, Rejected, with_libraries
from nouscoder.data.importers.formats import format_named
from nouscoder.data.importers.options import Columns, ImportOptions
from nouscoder.data.importers.rows import PREFIX, Format, HubDataUnusable, HubRows, hub_rows, loader_of_hubs, num_rows
from nouscoder.data.json_records import SourceRow
from nouscoder.data.packages import PackageFiles
from nouscoder.data.problem_index import open_index_of
from nouscoder.data.problem_parquet import column, join, read_parquet, require_new, row_of, store_beside, write_rows
from nouscoder.data.problems import save_problems
from nouscoder.domain.problem import language_fault
from nouscoder.domain.prompt import rendered_mark
from nouscoder.errors import Unusable
from nouscoder.progress_bar import progress_bar
from nouscoder.store.blobs import open_blobs
from nouscoder.store.tests import TestStore

_PART_PROBLEMS = 2000
_PART_S = 30.0
_STATE = "state.json"
_HERE = Path()
_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")


RENDERED = (
    "prompts begin with marks of a chat template: a run writes its own template around each, so take the marks off, or"
    ' set generation.environment.prompt_as = "text"'
)
_SYSTEM_BEFORE = "system messages stand before the user's message in the prompt"


class CannotImport(Unusable):
    """The import cannot begin, or go on. The message says what to do."""


@dataclass(frozen=True, slots=True)
class ImportSummary:
    """The result. `rejected` counts the rows by reason; `rejections` is the file that lists them.

    `notes` has sentences about imported rows, each with the number of rows.
    """

    problems: int
    tests: int
    rejected: dict[str, int]
    out: str
    rejections: str
    notes: dict[str, int] = field(default_factory=dict)

    def text(self) -> str:
        """A table for people."""
        total = sum(self.rejected.values())
        rows = [("problems", self.problems), ("tests", self.tests), ("rejected rows", total)]
        rows += [(f"  {reason}", count) for reason, count in sorted(self.rejected.items(), key=lambda one: -one[1])]
        lines = [f"{name:<24}{count:>12}" for name, count in rows]
        lines += [f"reasons of each row: {self.rejections}"] if total else []
        return "\n".join([f"{self.out}:", *lines, *(f"{count} {note}" for note, count in self.notes.items())])


@dataclass(slots=True)
class _State:
    """Where an import is. `request` must be the same when it is started again.

    `skip` rows of file `file` are done, and all `before` rows of the files before it.
    """

    request: dict[str, Any]
    file: int = 0
    skip: int = 0
    before: int = 0
    parts: int = 0
    problems: int = 0
    tests: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    columns_found: list[str] = field(default_factory=list)
    fields_read: list[str] = field(default_factory=list)


Source = Path | HubRows


def import_files(
    name: str, files: Sequence[Source], out: Path, tests: str = "", options: ImportOptions | None = None
) -> ImportSummary:
    """Import files of the format `name` into parquet or JSON lines. An interrupted import goes on where it was.

    `tests` is the place of the test store; empty: the folder OUT.index/. Raises Unusable.
    """
    known = format_named(name)
    for file in files:
        if isinstance(file, Path) and not file.exists():
            raise CannotImport(f"{file} does not exist")
        if isinstance(file, HubRows) and not known.reads_a_hub:
            raise CannotImport(f"{name} is read from files, not from a hub")
    require_new(out, CannotImport, *_LINES)
    if any(isinstance(file, HubRows) for file in files):
        loader_of_hubs()
    options = options or ImportOptions()
    chosen = options.model_dump(mode="json", exclude_defaults=True)
    request = {"format": name, "files": [_identity(file) for file in files], "tests": tests, "options": chosen}
    had_tests = store_beside(out).exists()
    importing = _Import((known, options), files, out, request)
    try:
        importing.run()
        return importing.finish()
    except Exception as error:
        # What a later import can go on with stays.
        half_made = [] if had_tests or importing.has_parts else [store_beside(out), importing.folder]
        for made in [*half_made, *([out, importing.rejections] if storage_fault(error) else [])]:
            remove(made)
        raise


def source_named(text: str, folder: Path = _HERE) -> Source:
    """A file, or a data set of a hub. Relative paths start at `folder`. Raises HubDataUnusable.

    A folder ORGANISATION/NAME there, with the files of that data set, is read in place of the hub.
    """
    if "://" in text:
        raise HubDataUnusable(f"{text:.200} is no file: files of this machine and hub:ORGANISATION/NAME are read")
    if not text.startswith(PREFIX):
        return folder / text
    rows = hub_rows(text)
    place = folder / rows.name
    if rows.file and (place / rows.file).is_file():
        return place / rows.file
    return replace(rows, name=str(place)) if place.is_dir() else rows


def _identity(file: Source) -> list[Any]:
    if isinstance(file, HubRows):
        return [str(file)]
    stat = file.stat()
    return [str(file.resolve()), stat.st_size, stat.st_mtime_ns]


class _Import:
    def __init__(
        self, how: tuple[Format, ImportOptions], files: Sequence[Source], out: Path, request: dict[str, Any]
    ) -> None:
        self._format, self._options = how
        self._files = files
        self._out = out
        self._is_lines = out.suffix != ".parquet"
        self._tests: str = request["tests"] or (str(store_beside(out)) if self._is_lines else "")
        self.folder = out.with_name(f"{out.name}.part")
        self.rejections = out.with_name(f"{out.name}.rejected.jsonl")
        self._store = TestStore(open_blobs(self._tests or str(store_beside(out)), bulk=True))
        self._state = self._begun(request)
        self._columns = Columns(self._options.columns, self._state.columns_found, self._state.fields_read)
        self._rows: list[dict[str, Any]] = []
        self._rejections: list[dict[str, Any]] = []
        self._part_began_s = time.monotonic()
        self._before = self._state.before
        self._ids = {
            problem_id for number in range(self._state.parts) for problem_id in column(self._part(number), "problem_id")
        }

    @property
    def has_parts(self) -> bool:
        """Whether a part is on the disk, with which another import can go on."""
        return (self.folder / _STATE).exists()

    def run(self) -> None:
        """Import all rows that are left."""
        totals = [num_rows(file) if isinstance(file, Path) and file.is_file() else None for file in self._files]
        total = None if None in totals else sum(count or 0 for count in totals)
        with progress_bar("importing", total) as advance:
            done = sum(count or 0 for count in totals[: self._state.file])
            advance(done + self._state.skip)
            for number in range(self._state.file, len(self._files)):
                self._import_file(number, self._state.skip if number == self._state.file else 0, advance)
        self._end_part(len(self._files), 0)

    def finish(self) -> ImportSummary:
        """Join the parts, build the index, and say what was imported. Raises CannotImport when nothing was."""
        state, rejections = self._state, self.rejections
        if fault := self._columns.fault():
            shutil.rmtree(self.folder, ignore_errors=True)
            raise CannotImport(fault)
        rejections.unlink(missing_ok=True)
        if state.rejected:
            with naming_storage_faults(rejections), rejections.open("wb") as listed:
                for number in range(state.parts):
                    listed.write(self._rejected(number).read_bytes())
        if not state.problems:
            # Otherwise the same files could not be imported in another format.
            shutil.rmtree(self.folder, ignore_errors=True)
            if not state.rejected:
                names = ", ".join(str(file) for file in self._files)
                raise CannotImport(f"there is no row in {names}" if names else "give the files to import, or hub:NAME")
            first = next(rejections_of(rejections))["detail"]
            raise CannotImport(f"no row could be imported; {rejections} has the reason of each, such as: {first}")
        parts = [self._part(number) for number in range(state.parts)]
        made_by = {name: state.request[name] for name in ("format", "options")}
        if self._is_lines:
            save_problems(self._out, chain.from_iterable(map(read_parquet, parts)))
            remove(store_beside(self._out))
        else:
            join(parts, self._out, self._tests, made_by)
            open_index_of(self._out, tests=self._tests).close()
        shutil.rmtree(self.folder)
        return ImportSummary(
            state.problems, state.tests, dict(state.rejected), str(self._out), str(rejections), dict(state.notes)
        )

    def _import_file(self, number: int, skip: int, advance: Callable[[float], None]) -> None:
        file = self._files[number]
        for row in file.rows(skip) if isinstance(file, HubRows) else self._format.rows(file, skip):
            self._import_row(file, row)
            skip = row.number
            advance(1)
            if len(self._rows) >= _PART_PROBLEMS or time.monotonic() - self._part_began_s >= _PART_S:
                self._end_part(number, row.number)
        self._before += skip

    def _import_row(self, file: Source, row: SourceRow) -> None:
        try:
            item = self._problem(row)
            stored = self._store.put(item.problem.tests)
        except Rejected as error:
            self._reject(file, row, error.reason, str(error))
        except FileRefused as error:
            self._reject(file, row, Reason.MALFORMED, str(error))
        except MemoryError:
            self._reject(file, row, Reason.TOO_LARGE, "there is not enough memory for it")
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, OverflowError) as error:
            self._reject(file, row, Reason.MALFORMED, f"{type(error).__name__}: {error}")
        else:
            self._ids.add(item.problem.problem_id)
            self._rows.append(row_of(item, stored))
            self._state.problems += 1
            self._state.tests += stored.num_tests
            is_noted = {_SYSTEM_BEFORE: "roles" in item.metadata, RENDERED: bool(rendered_mark(item.problem.prompt))}
            for note in (note for note, applies in is_noted.items() if applies):
                self._state.notes[note] = self._state.notes.get(note, 0) + 1

    def _problem(self, row: SourceRow) -> Any:
        if row.fault:
            raise Rejected(Reason.NOT_JSON, row.fault)
        if not isinstance(row.value, dict):
            raise Rejected(Reason.MALFORMED, "the row is not a record")
        # Rows without a name are named by their number in all files, because many sets are in several.
        item = self._format.read(self._columns.of(row.value), self._before + row.number)
        item = self._options.applied(item)
        one = with_libraries(item.problem)
        one.prompt.encode()  # text that is not Unicode raises ValueError
        if fault := language_fault(one.languages, one.tests.type, one.profile, text_is_code=one.text_is_code):
            raise Rejected(Reason.OTHER_LANGUAGE, fault)
        if wrong := faults_of(one, here=False):
            raise Rejected(Reason.UNGRADABLE, "; ".join(wrong))
        if one.problem_id in self._ids:
            raise Rejected(Reason.DUPLICATE_ID, f"problem_id {one.problem_id!r:.100} was imported before")
        return replace(item, problem=one)

    def _reject(self, file: Source, row: SourceRow, reason: Reason, detail: str) -> None:
        counts = self._state.rejected
        counts[reason.value] = counts.get(reason.value, 0) + 1
        place = file
        if isinstance(file, Path) and isinstance(row.value, dict) and isinstance(row.value.get("files"), PackageFiles):
            place = file / str(row.value.get("name"))  # a package of a folder or an archive
        self._rejections.append({"file": str(place), "row": row.number, "reason": reason.value, "detail": detail[:500]})

    def _end_part(self, file: int, skip: int) -> None:
        """Write the rows so far as a part, then record it together with the place in the input."""
        state = self._state
        if self._rows or self._rejections:
            self._store.sync()
            self.folder.mkdir(parents=True, exist_ok=True)
            write_rows(self._part(state.parts), self._rows, self._tests)
            self._rejected(state.parts).write_text("".join(json.dumps(one) + "\n" for one in self._rejections))
            state.parts += 1
        state.file, state.skip, state.before = file, skip, self._before
        state.columns_found, state.fields_read = sorted(self._columns.found), sorted(self._columns.read)
        if self.folder.exists():
            write_whole(self.folder / _STATE, json.dumps(asdict(state)).encode())
        self._rows, self._rejections = [], []
        self._part_began_s = time.monotonic()

    def _begun(self, request: dict[str, Any]) -> _State:
        try:
            record = json.loads((self.folder / _STATE).read_text())
        except FileNotFoundError:
            return _State(request)
        except ValueError as error:
            raise CannotImport(f"{self.folder / _STATE} is broken: delete {self.folder}") from error
        if record["request"] != request:
            others = "other files or with other options"
            raise CannotImport(f"{self.folder} holds an import of {others}: finish it, or delete the folder")
        return _State(**record)

    def _part(self, number: int) -> Path:
        return self.folder / f"{number:06}.parquet"

    def _rejected(self, number: int) -> Path:
        return self.folder / f"{number:06}.rejected.jsonl"


def rejections_of(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file of rejections."""
    with file.open(encoding="utf8") as lines:
        for line in lines:
            yield json.loads(line)
