"""Problem files: JSONL, one problem per line, plain or compressed (.zst). Tests have the grading API's JSON form."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import Field, ValidationError

from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import Prelude, Profile
from nouscoder.errors import Unusable
from nouscoder.formats.body import Body, first_fault
from nouscoder.formats.rules import ComparatorBody, LimitsBody
from nouscoder.formats.tests import TestsBody, canonical_json


class ProblemFileError(Unusable):
    """A problem file cannot be used. The message names the file and the line."""


class ReferenceBody(Body):
    """A reference solution: a program that is assumed to be right."""

    code: str
    language: str = "python"


class ProblemBody(Body):
    """One line of a problem file."""

    problem_id: str = Field(min_length=1, max_length=200)
    prompt: str
    tests: TestsBody
    limits: LimitsBody = LimitsBody()
    comparator: ComparatorBody = ComparatorBody()
    prelude: Literal["none", "lcb"] = "none"
    profile: Literal["process", "lcb"] = "process"
    text_is_code: bool = False
    prompt_template: str = ""
    difficulty: str = ""
    source: str = ""
    family: str = ""
    references: list[str | ReferenceBody] = Field([], description="reference solutions, for the audit")

    def record(self) -> Problem:
        """The domain record."""
        return Problem(
            problem_id=self.problem_id,
            prompt=self.prompt,
            tests=self.tests.record(),
            limits=self.limits.record(),
            comparator=self.comparator.record(),
            text_is_code=self.text_is_code,
            family=self.family,
            prelude=Prelude(self.prelude),
            profile=Profile(self.profile),
            prompt_template=self.prompt_template,
            difficulty=self.difficulty,
            source=self.source,
        )


def save_problems(path: Path, problems: Iterable[Problem]) -> None:
    """Write `problems` as JSONL. The file is replaced atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    with _opened(temporary, "wb", path.suffix == ".zst") as file:
        for problem in problems:
            file.write(_line(problem))
    temporary.replace(path)


def read_bodies(path: Path) -> Iterator[ProblemBody]:
    """The lines of a file, parsed. One at a time is in memory.

    Raises ProblemFileError for an invalid line, which it names, and for a file without problems.
    """
    seen: set[str] = set()
    try:
        with _opened(path, "rb", path.suffix == ".zst") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                body = _body(line, f"{path}, line {number}")
                if body.problem_id in seen:
                    raise ProblemFileError(f"{path}, line {number}: problem_id {body.problem_id!r} is there twice")
                seen.add(body.problem_id)
                yield body
    except OSError as error:
        raise ProblemFileError(f"{path} cannot be read: {error}") from error
    if not seen:
        raise ProblemFileError(f"{path} holds no problem")


def read_problems(path: Path) -> Iterator[Problem]:
    """The problems of a file. One at a time is in memory. Raises ProblemFileError like `read_bodies`."""
    return (body.record() for body in read_bodies(path))


def load_problems(path: Path) -> list[Problem]:
    """All problems of a file, in memory. Raises ProblemFileError like `read_bodies`."""
    return list(read_problems(path))


def _body(line: bytes, place: str) -> ProblemBody:
    try:
        return ProblemBody.model_validate_json(line)
    except ValidationError as error:
        field, wrong = first_fault(error)
        raise ProblemFileError(f"{place}: {field}: {wrong}") from None


def _line(problem: Problem) -> bytes:
    limits = {name: getattr(problem.limits, name) for name in LimitsBody.model_fields}
    record: dict[str, Any] = {
        "problem_id": problem.problem_id,
        "prompt": problem.prompt,
        "limits": limits,
        "comparator": ComparatorBody.of(problem.comparator).model_dump(),
        "prelude": problem.prelude.value,
        "profile": problem.profile.value,
        "text_is_code": problem.text_is_code,
        "prompt_template": problem.prompt_template,
        "difficulty": problem.difficulty,
        "source": problem.source,
        "family": problem.family,
    }
    head = json.dumps(record, ensure_ascii=False).encode()
    return head[:-1] + b', "tests": ' + canonical_json(problem.tests) + b"}\n"


@contextmanager
def _opened(path: Path, mode: Literal["rb", "wb"], is_compressed: bool) -> Iterator[IO[bytes]]:
    if not is_compressed:
        with path.open(mode) as plain:
            yield plain
        return
    import zstandard

    try:
        with zstandard.open(path, mode) as packed:
            yield io.BufferedReader(packed, 1024**2) if mode == "rb" else packed
    except zstandard.ZstdError as error:
        raise OSError(f"it is not a complete zstd file: {error}") from error
