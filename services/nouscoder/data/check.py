"""The one check of a problem file: `data inspect`, `data import`, `data filter`, `init` and `train` use it.

A problem is checked as the grading service checks a submission for it: by `validation.faults`, and by making the judge
of its tests, which also finds values that cannot be encoded and test code that is not Python. No sandbox runs anything.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nouscoder.config import VerifierSection
from nouscoder.data.problem_parquet import read_problem_file
from nouscoder.data.problems import FileFault, ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.prompt import PROMPT, rendered_mark
from nouscoder.domain.submission import AssertTests, StdinCase, StdinTests, Submission, Tests
from nouscoder.verifier.grading.runs import CANNOT_IMPORT, judge_for
from nouscoder.verifier.grading.validation import Bounds, InvalidSubmission, NotInstalled, faults
from nouscoder.verifier.judges.asserting import is_short, require_long_python

_MOST_SHOWN = 100
Reader = Callable[[Path, list[FileFault]], Iterator[ReferencedProblem]]


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """What a file holds, and all its faults in their order. `num_problems` counts the faulty ones too.

    `num_rendered` counts the prompts that a chat template has written already, `libraries` the problems that need
    these ones, joined by commas.
    """

    num_problems: int
    num_tests: int
    num_with_references: int
    tests_by_type: dict[str, int]
    faults: tuple[FileFault, ...]
    num_rendered: int = 0
    libraries: dict[str, int] = field(default_factory=dict)

    @property
    def num_faulty(self) -> int:
        """How many problems cannot be graded."""
        return len({fault.where for fault in self.faults})

    def text(self, most: int = _MOST_SHOWN) -> str:
        """All faults for a person, one a line, at most so many; empty when there is none."""
        if not self.faults:
            return ""
        lines = [f"{self.num_faulty} of {self.num_problems} problems cannot be graded:", *map(str, self.faults[:most])]
        if len(self.faults) > most:
            lines.append(f"and {len(self.faults) - most} more faults")
        return "\n".join(lines)


def check_file(path: Path, *, here: bool = True, read: Reader = read_problem_file) -> CheckedFile:
    """Check every problem of a file. One at a time is in memory. Blocks, so not for use inside an event loop.

    `here`: this machine grades, so what is not installed here is a fault; without it, as for runner pods, it is none.
    `read` gives the problems, and adds wrong lines to the list.
    Raises Unusable for a file that cannot be read as a whole.
    """
    found: list[FileFault] = []
    num_tests = num_with_references = num_rendered = 0
    types, libraries = Counter[str](), Counter[str]()
    for item in read(path, found):
        problem = item.problem
        types[type(problem.tests).__name__] += 1
        num_tests += len(problem.tests.cases)
        num_with_references += bool(item.references)
        num_rendered += bool(rendered_mark(problem.prompt))
        if all(map(str.isidentifier, problem.libraries)):  # others are a fault of the problem
            libraries[",".join(problem.libraries)] += 1
        found += (FileFault(problem.problem_id, fault) for fault in faults_of(problem, here=here))
    num_problems = types.total() + sum(fault.is_of_line for fault in found)
    del libraries[""]
    return CheckedFile(
        num_problems, num_tests, num_with_references, dict(types), tuple(found), num_rendered, dict(libraries)
    )


def faults_of(problem: Problem, *, here: bool = True) -> list[str]:
    """Why programs for a problem cannot be graded, each naming its field; empty: they can. `here`: see check_file."""
    found = []
    if not "".join((problem.prompt, problem.starter_code, problem.prompt_template.replace(PROMPT, ""))).strip():
        found.append("prompt: is empty")
    found += _faults(problem, problem.tests, here=here)
    if problem.public_tests is not None:
        found += (
            f"public_{fault}" for fault in _faults(problem, problem.public_tests, here=here) if fault not in found
        )
    return found


def _faults(problem: Problem, tests: Tests, *, here: bool) -> list[str]:
    submission = problem.grading_rules().submission(tests, "", problem.problem_id)
    found = [fault for fault in faults(submission, Bounds()) if here or not isinstance(fault, NotInstalled)]
    if not found:
        try:
            judge_for(submission)
            if isinstance(tests, AssertTests) and submission.language == "python" and not is_short(tests):
                asyncio.run(require_long_python(tests))
        except InvalidSubmission as fault:
            found.append(fault)
    return list(map(str, found))


async def library_fault(
    grade: Callable[[Submission], Awaitable[object]], needed: Mapping[str, int], of: str, *errors: type[Exception]
) -> str:
    """One sentence when candidates cannot import what problems need; empty: they can. Grades an empty program.

    `needed` counts the problems that need these libraries, joined by commas, `of` says of what they are a part.
    `errors` are what `grade` raises for a submission that it refuses; others of them are raised.
    """
    wanted = tuple(sorted({name for names in needed for name in names.split(",")}))
    if not wanted:
        return ""
    try:
        await grade(Submission(StdinTests((StdinCase("", ""),)), "", libraries=wanted))
    except errors as error:
        _, found, rest = str(error).partition(CANNOT_IMPORT)
        if not found:
            raise
        missing = rest.partition(" (")[0].split(", ")
        number = sum(count for names, count in needed.items() if not set(missing).isdisjoint(names.split(",")))
        return (
            f"{number} of {of} need {', '.join(missing)}, which candidates cannot import: install it where they run"
            " (verifier.libraries, verifier.sandbox.site_packages or the image), or leave these problems out"
        )
    return ""


def library_fault_here(section: VerifierSection, needed: Mapping[str, int], of: str) -> str:
    """As `library_fault`, by a sandbox of this machine. Starts none where nothing is needed. Not in an event loop."""

    async def ask() -> str:
        from nouscoder.verifier.grading.grader import local_grader  # the learner's image lacks its packages

        async with local_grader(section) as grader:
            return await library_fault(grader.grade, needed, of, InvalidSubmission)

    return asyncio.run(ask()) if needed else ""
