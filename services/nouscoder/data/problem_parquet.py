"""Problem files in parquet: one row a problem, with the digest of its tests. The tests are in a test store.

The store is the folder FILE.index/ next to the file, where the problem index is as well, or the place that the file's
schema names. INVARIANT: every digest of a file was in its store before the file got its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from nouscoder.atomic_files import naming_storage_faults, whole_or_gone
from nouscoder.data.problems import FileFault, Reference, ReferenceBody, ReferencedProblem, import_hint, read_bodies
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import Comparator, ComparatorKind, Limits, Prelude, Profile, Tests
from nouscoder.errors import Unusable
from nouscoder.formats.body import canonical_json, tests_from_json
from nouscoder.installation import how_to_install
from nouscoder.store.blobs import open_blobs
from nouscoder.store.tests import StoredTests, TestStore

_PLACE = b"nouscoder.tests"
_IMPORT = b"nouscoder.import"
_BATCH_ROWS = 256
_PART_ROWS = 2000
_MOST_RULES = 256
_TEXTS = ("problem_id", "prompt", "prompt_template", "difficulty", "source", "family", "prelude", "profile")


class ParquetUnusable(Unusable):
    """A parquet file is no problem file, or the library to read it is missing. The message names it."""


@dataclass(frozen=True, slots=True)
class ParquetRow:
    """A row: everything but the tests, and where these are."""

    values: dict[str, Any]
    stored: StoredTests

    def problem(self, tests: Tests) -> Problem:
        """The domain record with these tests."""
        texts = {name: self.values[name] for name in _TEXTS if name not in ("prelude", "profile")}
        return Problem(
            tests=tests,
            limits=_limits(self.values["limits"]),
            comparator=_comparator(self.values["comparator"]),
            prelude=Prelude(self.values["prelude"]),
            profile=Profile(self.values["profile"]),
            text_is_code=self.values["text_is_code"],
            public_tests=tests_from_json(public) if (public := self.values.get("public_tests")) else None,
            starter_code=self.values.get("starter_code", ""),  # files of before have no such column
            languages=tuple(self.values.get("languages") or ("python",)),
            libraries=tuple(self.values.get("libraries") or ()),
            **texts,
        )


def is_parquet(path: Path) -> bool:
    """Whether the file is parquet, by its name."""
    return path.suffix == ".parquet"


def store_beside(path: Path) -> Path:
    """The folder of the tests of a file that names no other place."""
    return path.with_name(f"{path.name}.index")


def row_of(item: ReferencedProblem, stored: StoredTests) -> dict[str, Any]:
    """A problem as a row. Its tests are put into the store."""
    problem = item.problem
    return {
        **{name: str(getattr(problem, name)) for name in _TEXTS},
        "text_is_code": problem.text_is_code,
        "limits": _as_json(problem.limits),
        "comparator": _as_json(problem.comparator),
        "public_tests": "" if problem.public_tests is None else canonical_json(problem.public_tests).decode(),
        "tests_type": problem.tests.type,
        "tests_digest": stored.digest,
        "num_tests": stored.num_tests,
        "tests_bytes": stored.num_bytes,
        "file_bytes": stored.file_bytes,
        "references": [{"language": one.language, "code": one.code} for one in item.references],
        "metadata": json.dumps(item.metadata),
        "starter_code": problem.starter_code,
        "languages": list(problem.languages),
        "libraries": list(problem.libraries),
    }


# Most problems of a set have the same limits and the same comparator.
@lru_cache(_MOST_RULES)
def _as_json(rules: Limits | Comparator) -> str:
    return json.dumps(asdict(rules))


@lru_cache(_MOST_RULES)
def _limits(text: str) -> Limits:
    return Limits(**json.loads(text))


@lru_cache(_MOST_RULES)
def _comparator(text: str) -> Comparator:
    record = json.loads(text)
    return Comparator(**record | {"kind": ComparatorKind(record["kind"])})


def require_new(out: Path, refused: Callable[[str], Unusable], *endings: str) -> None:
    """Before long work: a new parquet file, or of one of `endings`. Raises `refused`, and ParquetUnusable."""
    if not out.name.endswith((".parquet", *endings)):
        raise refused(f"--out {out} must end in {' or '.join(('.parquet', *endings[:1]))}")
    if out.exists():
        raise refused(f"{out} exists already: give another --out, or delete it")
    _libraries()


def write_rows(path: Path, rows: list[dict[str, Any]], tests: str) -> None:
    """Write a file of rows. `tests` is the place of the store; empty: beside the file."""
    arrow, parquet = _libraries()
    schema = _schema(arrow, tests)
    with naming_storage_faults(path):
        parquet.write_table(arrow.Table.from_pylist(rows, schema=schema), path, compression="zstd")


def write_parts(folder: Path, rows: Iterable[dict[str, Any]], tests: str) -> list[Path]:
    """Write rows to several files in a folder, which can be joined. At most the rows of one file are in memory."""
    parts, left = list[Path](), iter(rows)
    while part := list(islice(left, _PART_ROWS)):
        parts.append(folder / f"{len(parts):06}.parquet")
        write_rows(parts[-1], part, tests)
    return parts


def join(parts: list[Path], path: Path, tests: str, made_by: dict[str, Any] | None = None) -> None:
    """Write the rows of several files to one. The file is replaced atomically. `made_by`: the import that made it."""
    arrow, parquet = _libraries()
    temporary = path.with_name(f".part-{path.name}")
    schema = _schema(arrow, tests)
    if made_by is not None:
        schema = schema.with_metadata({**schema.metadata, _IMPORT: json.dumps(made_by).encode()})
    with whole_or_gone(temporary), naming_storage_faults(path):
        with parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
            for part in parts:
                writer.write_table(parquet.read_table(part).cast(schema))
        temporary.replace(path)


def column(path: Path, name: str) -> list[Any]:
    """One column of a file."""
    _, parquet = _libraries()
    values: list[Any] = parquet.read_table(path, columns=[name]).column(name).to_pylist()
    return values


def read_rows(path: Path) -> Iterator[ParquetRow]:
    """The rows of a file. A batch of them is in memory, without their tests. Raises ParquetUnusable."""
    for batch in _opened(path).iter_batches(_BATCH_ROWS):
        for values in batch.to_pylist():
            stored = StoredTests(
                values["tests_digest"], values["num_tests"], values["tests_bytes"], values["file_bytes"]
            )
            yield ParquetRow(values, stored)


def store_of(path: Path) -> TestStore:
    """The store that has the tests of a file. Raises ParquetUnusable."""
    place = (_opened(path).schema_arrow.metadata or {}).get(_PLACE, b"").decode()
    return TestStore(open_blobs(place or str(store_beside(path))))


def made_by(path: Path) -> dict[str, Any] | None:
    """The import that made a file; None when the file does not say it. Raises ParquetUnusable."""
    text = (_opened(path).schema_arrow.metadata or {}).get(_IMPORT)
    made: dict[str, Any] | None = None if text is None else json.loads(text)
    return made


def read_parquet(path: Path) -> Iterator[ReferencedProblem]:
    """The problems of a file, one at a time, each with its tests in memory. Raises ParquetUnusable, UnknownTests."""
    store = store_of(path)
    for row in read_rows(path):
        with store.opened(row.stored.digest) as tests:
            cases: Any = tuple(tests.cases)
            whole = replace(tests, cases=cases)
        found = tuple(Reference(one["code"], one["language"]) for one in row.values["references"])
        yield ReferencedProblem(row.problem(whole), found, json.loads(row.values["metadata"]))


def read_problem_file(path: Path, refused: list[FileFault] | None = None) -> Iterator[ReferencedProblem]:
    """The problems of a file, parquet or JSON lines, with their references. Raises Unusable.

    With `refused`, wrong lines of JSON lines are added to it and left out.
    """
    if is_parquet(path):
        return read_parquet(path)
    return (
        ReferencedProblem(body.record(), tuple(_reference(one) for one in body.references), body.metadata)
        for body in read_bodies(path, refused)
    )


def _reference(given: str | ReferenceBody) -> Reference:
    return Reference(given) if isinstance(given, str) else Reference(given.code, given.language)


def _opened(path: Path) -> Any:
    _, parquet = _libraries()
    from pyarrow.lib import ArrowException

    try:
        file = parquet.ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise ParquetUnusable(f"{path} cannot be read: {error}") from error
    if _PLACE not in (file.schema_arrow.metadata or {}):
        raise ParquetUnusable(f"{path} is no problem file{import_hint(path, file.schema_arrow.names)}")
    return file


def _schema(arrow: Any, tests: str) -> Any:
    text, count = arrow.string(), arrow.int64()
    reference = arrow.struct([("language", text), ("code", text)])
    fields = [
        *((name, text) for name in _TEXTS),
        ("text_is_code", arrow.bool_()),
        *((name, text) for name in ("limits", "comparator", "public_tests", "tests_type", "tests_digest")),
        *((name, count) for name in ("num_tests", "tests_bytes", "file_bytes")),
        ("references", arrow.list_(reference)),
        ("metadata", text),
        ("starter_code", text),
        ("languages", arrow.list_(text)),
        ("libraries", arrow.list_(text)),
    ]
    return arrow.schema(fields, metadata={_PLACE: tests.encode()})


def _libraries() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ParquetUnusable(f"parquet needs the library pyarrow: {how_to_install('data')}") from None
    return pyarrow, pyarrow.parquet


def read_problems(path: Path) -> Iterator[Problem]:
    """The problems of a problem file. One at a time is in memory. Raises Unusable, naming the file and the line."""
    if is_parquet(path):
        return (item.problem for item in read_parquet(path))
    return (body.record() for body in read_bodies(path))


def load_problems(path: Path) -> list[Problem]:
    """All problems of a problem file, in memory. Raises what `read_problems` raises."""
    return list(read_problems(path))
