"""The problem index: one small record per problem without its tests, in SQLite.

The index is built once from the problem file and kept in a folder next to it. Building it also puts the tests of each
problem into the test store, under their digest. It is built again when the problem file or the store's address changes.

INVARIANT: an index appears complete or not at all. Before it appears, the test store has the tests of every digest in
it. A problem file that is refused leaves no folder behind that was not there before.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from nouscoder.atomic_files import no_link, whole_or_gone
from nouscoder.config import Config
from nouscoder.data.problem_parquet import is_parquet, load_problems, read_problems, read_rows, store_of
from nouscoder.data.problems import ProblemFileError
from nouscoder.data.prompt_lengths import PromptLengths
from nouscoder.domain.problem import GradingRules, Problem, PublicTests, is_held_out
from nouscoder.domain.prompt import PYTHON, PromptText
from nouscoder.domain.submission import Comparator, ComparatorKind, Limits, Prelude, Profile, StdinTests, Tests
from nouscoder.errors import NousCoderError
from nouscoder.formats.body import canonical_json, tests_from_json
from nouscoder.private_folder import is_trusted, temporary_folder
from nouscoder.store.blobs import open_blobs
from nouscoder.store.tests import StoredTests, TestStore

log = logging.getLogger(__name__)

_VERSION = "5"
_INDEX = "problems.sqlite"
_MOST_KEPT = 256  # problems without their tests: some kB each


class NotInIndex(NousCoderError):
    """The problem file does not contain the problem."""

    def __init__(self, problem_id: str) -> None:
        super().__init__(f"there is no problem {problem_id[:100]!r} in the problem file of this run")
        self.problem_id = problem_id


@dataclass(frozen=True, slots=True)
class IndexedProblem:
    """A problem without its hidden tests. `tests_bytes` is the size of their JSON form."""

    problem_id: str
    prompt: str
    prompt_template: str
    rules: GradingRules
    tests_digest: str
    num_tests: int
    tests_bytes: int
    public_tests: PublicTests | None = None
    starter_code: str = ""
    tests_type: str = StdinTests.type

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages that a program may be in."""
        return self.rules.languages

    def with_tests(self, tests: Tests) -> Problem:
        """The whole problem."""
        names = ("limits", "comparator", "text_is_code", "prelude", "profile", "languages", "libraries")
        return Problem(
            self.problem_id,
            self.prompt,
            tests,
            **{name: getattr(self.rules, name) for name in names},
            prompt_template=self.prompt_template,
            public_tests=None if self.public_tests is None else self.public_tests.tests,
            starter_code=self.starter_code,
        )


class ProblemIndex:
    """A complete index without the held-out problems, and the store that has its tests. Not thread-safe.

    `left_out` has the problems whose prompts are too long for the run, with their tokens; `in_others` those with a
    language that the run has not, with their languages. `problem_ids` are the others.
    """

    def __init__(self, file: Path, tests: TestStore, held_out_share: float = 0.0) -> None:
        self.tests = tests
        self.left_out: Mapping[str, int] = {}
        self.in_others: Mapping[str, tuple[str, ...]] = {}
        self._database = sqlite3.connect(f"file:{file}?mode=ro", uri=True, check_same_thread=False)
        rows = self._database.execute("SELECT problem_id FROM problems ORDER BY number")
        self.problem_ids: tuple[str, ...] = tuple(
            problem_id for (problem_id,) in rows if not is_held_out(problem_id, held_out_share)
        )
        # Each rollout of a group asks for the same problem twice.
        self.problem = lru_cache(_MOST_KEPT)(self._read)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    @property
    def all_ids(self) -> tuple[str, ...]:
        """The problems of the run, also those that are left out."""
        return (*self.problem_ids, *self.left_out, *self.in_others)

    def leave_out(self, left_out: Mapping[str, int]) -> None:
        """Leave these problems out; they have so many tokens."""
        self.left_out = left_out
        self._drop(left_out)

    def keep_languages(self, languages: Collection[str]) -> None:
        """Leave out the problems that allow a language which is none of these. Empty: all languages stay."""
        self.in_others = _in_others({name: self.languages.get(name, PYTHON) for name in self.problem_ids}, languages)
        self._drop(self.in_others)

    def _drop(self, names: Collection[str]) -> None:
        if names:
            self.problem_ids = tuple(name for name in self.problem_ids if name not in names)

    @cached_property
    def languages(self) -> dict[str, tuple[str, ...]]:
        """The languages of each problem in the file that is not for Python alone."""
        rows = self._database.execute("SELECT problem_id, languages FROM problems WHERE languages != ?", PYTHON)
        return {problem_id: tuple(languages.split(",")) for problem_id, languages in rows}

    def libraries(self) -> dict[str, str]:
        """The libraries, joined by commas, of each problem in the file that needs some."""
        of_row = "json_extract(CAST(record AS TEXT), '$.rules.libraries')"
        rows = self._database.execute(f"SELECT problem_id, {of_row} FROM problems WHERE {of_row} != '[]'")
        return {problem_id: ",".join(json.loads(names)) for problem_id, names in rows}

    def texts(self) -> dict[str, PromptText]:
        """What the prompts of all problems in the file are made of, by problem, also of held-out ones."""
        rows = self._database.execute("SELECT problem_id, record FROM problems ORDER BY number")
        records = ((name, json.loads(record)) for name, record in rows)
        return {
            name: PromptText(
                *(one["prompt"], one["prompt_template"], one["starter_code"], tuple(one["rules"]["languages"])),
                tests_type=one["tests_type"],
            )
            for name, one in records
        }

    def _read(self, problem_id: str) -> IndexedProblem:
        row = self._database.execute("SELECT record FROM problems WHERE problem_id = ?", (problem_id,)).fetchone()
        if row is None:
            raise NotInIndex(problem_id)
        record = json.loads(row[0])
        rules = _rules(record.pop("rules"))
        public = record.pop("public_tests")
        shown = None if public is None else PublicTests(tests_from_json(public), rules)
        return IndexedProblem(problem_id=problem_id, rules=rules, public_tests=shown, **record)


def open_index(config: Config) -> ProblemIndex:
    """The index of the run's training problems, without those that are left out. Raises what `open_index_of` raises."""
    problems, limit = config.problems, config.generation.max_tokens_total
    index = open_index_of(config.in_run_folder(problems.train), problems.index, problems.tests, problems.held_out_share)
    index.keep_languages(problems.languages)
    lengths = prompt_lengths(config)
    if lengths.has_too_long(limit):
        too_long, asked = lengths.too_long(index.texts(), limit), set(index.problem_ids)
        index.leave_out({name: tokens for name, tokens in too_long.items() if name in asked})
    return index


def has_index(config: Config) -> bool:
    """Whether the index of the run's training problems is there and can be opened without building it."""
    source, problems = config.in_run_folder(config.problems.train), config.problems
    folder = index_folder(config)
    return os.access(folder, os.W_OK) and _key_of(folder / _INDEX) == index_key(source, problems.tests or str(folder))


def index_folder(config: Config) -> Path:
    """Where the index of the run's training problems is, or will be."""
    return _folder_of(config.in_run_folder(config.problems.train), config.problems.index)


def prompt_lengths(config: Config) -> PromptLengths:
    """What is known of the prompts' lengths."""
    return PromptLengths.of(config, index_folder(config))


def open_index_of(source: Path, index: str = "", tests: str = "", held_out_share: float = 0.0) -> ProblemIndex:
    """The index of a problem file. Built first when it is missing or outdated, which may take minutes.

    `index` is its folder and `tests` the place of the test store, both by default next to the file. Raises
    ProblemFileError, Unusable and BlobsUnavailable.
    """
    folder = _folder_of(source, index)
    tests = tests or str(folder)
    key = index_key(source, tests)
    store = TestStore(open_blobs(tests, bulk=True))
    with whole_or_gone(folder), _locked(folder, source):
        if _key_of(folder / _INDEX) != key:
            begun_s = time.monotonic()
            log.info("building the index of the problems", extra={"file": str(source), "folder": str(folder)})
            _write_index(_records(source, store), folder / _INDEX, key, store)
            log.info("index built", extra={"seconds": round(time.monotonic() - begun_s, 1)})
    return ProblemIndex(folder / _INDEX, store, held_out_share)


def held_out_problems(config: Config) -> list[Problem]:
    """The problems for pass@1, without those that are left out. Raises ProblemFileError."""
    return fitting(config, in_languages(config, all_held_out(config)))[0]


def in_languages(config: Config, problems: Sequence[Problem]) -> list[Problem]:
    """The problems whose languages the run has."""
    others = _in_others({one.problem_id: one.languages for one in problems}, config.problems.languages)
    return [one for one in problems if one.problem_id not in others]


def _in_others(found: Mapping[str, tuple[str, ...]], languages: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The problems with a language that is none of these; none where no language is given."""
    return {name: own for name, own in found.items() if languages and not set(own) <= set(languages)}


def fitting(config: Config, problems: Sequence[Problem]) -> tuple[list[Problem], dict[str, int]]:
    """The problems that are not too long for an evaluation; and the others by name, with their tokens."""
    texts = {one.problem_id: PromptText.of(one) for one in problems}
    too_long = prompt_lengths(config).too_long(texts, config.evaluating.generation.max_tokens_total)
    return [one for one in problems if one.problem_id not in too_long], too_long


def all_held_out(config: Config) -> list[Problem]:
    """Of evaluation.problems, else a share of the training file, else problems.held_out. Raises ProblemFileError."""
    if config.evaluation.problems:
        return load_problems(Path(config.evaluation.problems))
    share = config.problems.held_out_share
    if not share:
        return load_problems(config.in_run_folder(config.problems.held_out))
    file = config.in_run_folder(config.problems.train)
    found = [problem for problem in read_problems(file) if is_held_out(problem.problem_id, share)]
    if not found:
        raise ProblemFileError(f"{file}: problems.held_out_share {share} holds out none of its problems; take more")
    return found


def index_key(source: Path, tests: str) -> str:
    """The key of an index: size and modification time of the problem file, and the address of the test store."""
    try:
        stat = source.stat()
    except OSError as error:
        raise ProblemFileError(f"{source} cannot be read: {error.strerror or error}") from error
    return f"{_VERSION} {stat.st_size} {stat.st_mtime_ns} {tests}"


def build_index(problems: Iterable[Problem], file: Path, store: TestStore, key: str = "") -> None:
    """Put the tests of `problems` into `store`, then write the index to `file`."""
    _write_index(_stored(problems, store), file, key, store)


_Row = tuple[str, str, bytes]  # the name of a problem, its languages joined by commas, and its record


def _row(problem: Problem, kept: StoredTests, tests_type: str) -> _Row:
    return problem.problem_id, ",".join(problem.languages), _record(problem, kept, tests_type)


def _write_index(records: Iterable[_Row], file: Path, key: str, store: TestStore) -> None:
    """Write the index, after the tests, which `store` has got when their record is given, are on the disk."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".part-{file.name}")
    part.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(part)) as database:
            database.executescript(
                "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;"
                "CREATE TABLE about (key TEXT);"
                "CREATE TABLE problems"
                " (number INTEGER PRIMARY KEY, problem_id TEXT UNIQUE, languages TEXT, record BLOB);"
            )
            database.execute("INSERT INTO about VALUES (?)", (key,))
            rows = ((number, *record) for number, record in enumerate(records))
            database.executemany("INSERT INTO problems VALUES (?, ?, ?, ?)", rows)
            database.commit()
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    with part.open("rb") as written:
        os.fsync(written.fileno())
    store.sync()
    part.replace(file)


def _stored(problems: Iterable[Problem], store: TestStore) -> Iterator[_Row]:
    return (_row(problem, store.put(problem.tests), problem.tests.type) for problem in problems)


def _records(source: Path, store: TestStore) -> Iterator[_Row]:
    """The rows of a file's problems, their tests being stored. Tests that are there are not read again."""
    if not is_parquet(source):
        yield from _stored(read_problems(source), store)
        return
    own = store_of(source)
    for row in read_rows(source):
        stored = row.stored
        with ExitStack() as stack:
            if not store.has(stored.digest):
                stored = store.put(stack.enter_context(own.opened(stored.digest)))
            problem = row.problem(StdinTests(()))  # the record holds no tests
            yield _row(problem, stored, str(row.values["tests_type"]))


def _record(problem: Problem, kept: StoredTests, tests_type: str) -> bytes:
    return to_json(
        {
            "prompt": problem.prompt,
            "prompt_template": problem.prompt_template,
            "rules": problem.grading_rules(),
            "tests_digest": kept.digest,
            "num_tests": kept.num_tests,
            "tests_bytes": kept.num_bytes,
            "public_tests": None if problem.public_tests is None else canonical_json(problem.public_tests).decode(),
            "starter_code": problem.starter_code,
            "tests_type": tests_type,
        }
    )


def _rules(record: dict[str, Any]) -> GradingRules:
    comparator = record["comparator"]
    return GradingRules(
        limits=Limits(**record["limits"]),
        comparator=Comparator(**comparator | {"kind": ComparatorKind(comparator["kind"])}),
        prelude=Prelude(record["prelude"]),
        profile=Profile(record["profile"]),
        text_is_code=record["text_is_code"],
        languages=tuple(record["languages"]),
        libraries=tuple(record["libraries"]),
    )


def _key_of(file: Path) -> str | None:
    if not file.is_file():
        return None
    database = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
    try:
        row = database.execute("SELECT key FROM about").fetchone()
    except sqlite3.DatabaseError:
        return None
    finally:
        database.close()
    return None if row is None else str(row[0])


def _folder_of(source: Path, configured: str) -> Path:
    """The folder of the index: as configured, else next to the file, else in the temporary folder.

    Next to the file is not taken where this user may not write, or where another user than the file's own could.
    """
    if configured:
        return Path(configured)
    adjacent = source.with_name(f"{source.name}.index")
    if os.access(adjacent if adjacent.exists() else source.parent, os.W_OK) and _is_of_the_owner(adjacent, source):
        return adjacent
    return temporary_folder("nouscoder-problems") / hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:16]


def _is_of_the_owner(folder: Path, source: Path) -> bool:
    """Whether the folder is missing, or was made by this user, by root or by whoever wrote the problem file."""
    if not os.path.lexists(folder):
        return True
    return is_trusted(folder) or (folder.lstat().st_uid == source.stat().st_uid and not folder.is_symlink())


@contextmanager
def _locked(folder: Path, source: Path) -> Iterator[None]:
    """Lock the folder of the index, made if missing. Raises ProblemFileError when it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.stat().st_uid not in (0, os.geteuid(), source.stat().st_uid):
            raise ProblemFileError(f"the folder of the problem index, {folder}, belongs to another user: remove it")
        with open(folder / "lock", "w", opener=no_link) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except (OSError, sqlite3.Error) as error:
        raise ProblemFileError(f"the folder of the problem index, {folder}, cannot be written: {error}") from error
