"""What a filter is: settings, and a function from problems to the ones that it drops.

The inputs of a selection are problems without tests, from problem files of every form. A parquet file is read where it
is. Other files are first staged: their tests go to a store in a folder of the selection, and the rest to parquet files
beside it.

INVARIANT: the tests of one problem at most are in memory; of the other columns, the references are in memory for one
batch of rows only.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nouscoder.data.check import check_file
from nouscoder.data.importers.formats import read_referenced
from nouscoder.data.problem_parquet import ParquetRow, is_parquet, read_rows, row_of, store_of, write_parts
from nouscoder.data.problems import Reference
from nouscoder.errors import Unusable
from nouscoder.formats.body import Body
from nouscoder.grade_files.answers import GradingTarget
from nouscoder.store.blobs import open_blobs
from nouscoder.store.tests import TestStore


class CannotFilter(Unusable):
    """A selection cannot be made, or not now. The message says what to do."""


def asked_text(prompt: str, starter_code: str) -> str:
    """The text that holds the question: the prompt, with the starter code where that is longer, as in MultiPL-E."""
    return f"{prompt}\n\n{starter_code}" if len(starter_code) > len(prompt) else prompt


@dataclass(frozen=True, slots=True)
class Candidate:
    """A problem without its tests and references, and where they are: row `row` of input `file`, and `store`."""

    file: int
    row: int
    record: ParquetRow
    num_references: int
    store: TestStore

    @property
    def problem_id(self) -> str:
        """Its name."""
        return str(self.record.values["problem_id"])

    @property
    def prompt(self) -> str:
        """What the policy is asked."""
        return str(self.record.values["prompt"])

    @property
    def starter_code(self) -> str:
        """The code to begin with."""
        return str(self.record.values["starter_code"])

    @property
    def asked(self) -> str:
        """What duplicates and leaks compare."""
        return asked_text(self.prompt, self.starter_code)

    @property
    def metadata(self) -> dict[str, str]:
        """Other facts."""
        found: dict[str, str] = json.loads(self.record.values["metadata"])
        return found


@dataclass(frozen=True, slots=True)
class Context:
    """What a step may use besides the problems.

    `folder`: relative paths of the recipe start here. `evidence`: a file for what cannot be computed again, such as
    verdicts and votes; it is kept, so that the selection can be repeated. `references`: the problems' reference
    solutions, read from the disk in the order of the problems.
    """

    folder: Path
    evidence: Path
    grading: GradingTarget
    references: Callable[[Sequence[Candidate]], Iterator[tuple[Candidate, tuple[Reference, ...]]]]


@dataclass(slots=True)
class StepOutcome:
    """The result of a step. `dropped`: problem id -> reason, `notes`: problem id -> facts for its metadata.

    `table` has counts for people, such as problems by pass rate. A reason begins with its kind, then a colon.
    """

    dropped: dict[str, str] = field(default_factory=dict)
    notes: dict[str, Mapping[str, str]] = field(default_factory=dict)
    table: dict[str, int] = field(default_factory=dict)


class Step(Body):
    """Base of the filters. The field `filter` of each names it in a recipe."""

    filter: str

    def files(self) -> tuple[str, ...]:
        """The files that it reads, as the recipe names them: its `file`, and the sets it is `against`."""
        return tuple(filter(None, (getattr(self, "file", ""), *getattr(self, "against", ()))))

    def how_to_get(self, file: Path, problems: Path) -> str:
        """The end of the message that one of these files is missing. `problems` is the first input."""
        return ": an evaluation set, made with `nouscoder data import`"

    @abstractmethod
    def apply(self, candidates: Sequence[Candidate], context: Context) -> StepOutcome:
        """Which of these problems it drops. Raises CannotFilter."""


class Rule(Step):
    """Base of the filters that look at one problem at a time."""

    def apply(self, candidates: Sequence[Candidate], context: Context) -> StepOutcome:
        reasons = ((one.problem_id, self._reason(one)) for one in candidates)
        return StepOutcome({problem_id: reason for problem_id, reason in reasons if reason})

    @abstractmethod
    def _reason(self, candidate: Candidate) -> str:
        """Why this problem is dropped; empty: it is kept."""


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
    """The parquet files that a file of another form becomes. Raises CannotFilter for one that cannot be graded."""
    if wrong := check_file(path, here=False, read=read_referenced).text():
        raise CannotFilter(f"{path}: {wrong}")
    folder.mkdir(parents=True)
    place = str(folder / "tests")
    store = TestStore(open_blobs(place, bulk=True))  # staging need not survive a power failure
    parts = write_parts(folder, (row_of(item, store.put(item.problem.tests)) for item in read_referenced(path)), place)
    store.sync()
    return parts
