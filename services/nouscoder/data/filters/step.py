"""What a filter is: settings, and a function from problems to the ones that it drops."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nouscoder.config import VerifierSection
from nouscoder.data.problem_parquet import ParquetRow
from nouscoder.data.references import Reference
from nouscoder.errors import Unusable
from nouscoder.formats.body import Body
from nouscoder.store.tests import TestStore


class CannotFilter(Unusable):
    """A selection cannot be made, or not now. The message says what to do."""


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
    def metadata(self) -> dict[str, str]:
        """Other facts."""
        found: dict[str, str] = json.loads(self.record.values["metadata"])
        return found


@dataclass(frozen=True, slots=True)
class Grading:
    """Where programs are graded: at the URL `server`, else on this machine with the settings of `verifier`."""

    verifier: VerifierSection = field(default_factory=VerifierSection)
    server: str | None = None
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """What a step may use besides the problems.

    `folder`: relative paths of the recipe start here. `evidence`: a file for what cannot be computed again, such as
    verdicts and votes; it is kept, so that the selection can be repeated. `references`: the problems' reference
    solutions, read from the disk in the order of the problems.
    """

    folder: Path
    evidence: Path
    grading: Grading
    references: Callable[[Sequence[Candidate]], Iterator[tuple[Candidate, tuple[Reference, ...]]]]


@dataclass(slots=True)
class Outcome:
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
        """The files that it reads, as the recipe names them."""
        return ()

    @abstractmethod
    def apply(self, candidates: Sequence[Candidate], context: Context) -> Outcome:
        """Which of these problems it drops. Raises CannotFilter."""


class Rule(Step):
    """Base of the filters that look at one problem at a time."""

    def apply(self, candidates: Sequence[Candidate], context: Context) -> Outcome:
        """See Step."""
        reasons = ((one.problem_id, self.reason(one)) for one in candidates)
        return Outcome({problem_id: reason for problem_id, reason in reasons if reason})

    @abstractmethod
    def reason(self, candidate: Candidate) -> str:
        """Why this problem is dropped; empty: it is kept."""
