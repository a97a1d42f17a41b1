"""`nouscoder data synthesize`: models write problems with tests from seeds, and a solver's programs choose the tests.

The model writes its tests as asserts, which are parsed and never executed here. Each `assert f(literals) == literal`
becomes a call test, whose expected value no program can see; other asserts are left out.

    seeds -> writer -> written problems -> solver -> programs -> verifier -> tests that pass -> problem file
             written.jsonl                 solved.jsonl          results.jsonl

The three logs are in OUT.parquet.evidence/, OUT.parquet.rejected.jsonl has the reason of each seed that became no
problem. INVARIANT: each seed becomes one problem or is rejected once. The output depends on the seeds, the settings and
the answers in the logs alone, so a command that was killed and is started again ends with the same output.

The verifier runs the programs, here or as a service. INVARIANT: each result is in the log before it is used, never that
of an internal_error, and what is in the log is not graded again.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import Field

from nouscoder.atomic_files import lock_file, naming_storage_faults, write_whole
from nouscoder.client import GradingFailed
from nouscoder.data.asking import ChatQuestion, NotAnswered, ServedModel, ask_all, fill, open_answers
from nouscoder.data.bounded_files import checked_records
from nouscoder.data.importers.fields import Rejected
from nouscoder.data.importers.functions import call_case
from nouscoder.data.problem_index import open_index_of
from nouscoder.data.problem_parquet import join, require_new, row_of, store_beside, write_rows
from nouscoder.data.problems import Reference, ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import CallCase, CallTests, Prelude, Submission
from nouscoder.domain.verdict import VerdictKind
from nouscoder.errors import Unusable
from nouscoder.formats.body import Body
from nouscoder.grade_files.answers import BadEntry, Entry, GradingTarget, answers_of
from nouscoder.progress_bar import progress_bar
from nouscoder.record_log import RecordLog, key_of
from nouscoder.store.blobs import open_blobs
from nouscoder.store.tests import TestStore
from nouscoder.verifier.api.schema import request_of
from nouscoder.verifier.grading.extract import extract_code

# What a model is asked, and what is read from its answer.

_MOST_ASSERTS = 100  # more are not read
_QUESTION = re.compile(r"<question>(.*?)</question>", re.DOTALL)
_TESTS = re.compile(r"<tests>(.*?)</tests>", re.DOTALL)
_REQUEST = """Below is a piece of text about programming. Write a new coding question of your own from its idea, and \
tests for it.

The question describes one Python function completely, as a LeetCode question does: its name, its arguments and their \
types, what it returns, and every special case. It must be answerable without the text below, deterministic, and need \
no files, network or third-party libraries. Then write {num_tests} tests. Each is one line of the form \
`assert name(arguments) == value` with literal arguments and a literal value, and they cover ordinary, large and \
special cases.

Answer in exactly this form:
<question>
the question
</question>
<tests>
one assert on each line
</tests>

The text:
{seed}"""
_SOLVE = """{prompt}

Think about it, then give the whole program in one ```python block. It defines the function and prints nothing."""


class SeedRejection(StrEnum):
    """Why a seed becomes no problem."""

    NO_QUESTION = "no question"
    FEW_TESTS_WRITTEN = "too few tests written"
    NO_PROGRAM = "no program"
    FEW_TESTS_PASS = "too few tests pass"


class NoProblem(Exception):
    """A seed becomes no problem. The text says why in detail."""

    def __init__(self, reason: SeedRejection, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class WrittenProblem:
    """What a model wrote. `num_written` counts its asserts, also those of other forms."""

    prompt: str
    entry_point: str
    cases: tuple[CallCase, ...]
    num_written: int


def written_problem(answer: str, at_least: int) -> WrittenProblem:
    """The problem in a writer's answer. Raises NoProblem, also when it has fewer than `at_least` tests."""
    questions, tests = _QUESTION.findall(answer), _TESTS.findall(answer)
    if not questions or not tests or not questions[-1].strip():
        raise NoProblem(SeedRejection.NO_QUESTION, "the answer has no <question> with <tests>")
    asserts = list(_asserts(tests[-1]))[:_MOST_ASSERTS]
    names = Counter(name for name in map(_function_of, asserts) if name)
    entry_point = names.most_common(1)[0][0] if names else ""
    cases = list[CallCase]()
    for statement in asserts:
        with suppress(Rejected, RecursionError, MemoryError):
            cases.append(call_case(statement, entry_point))
    if len(cases) < at_least:
        detail = f"{len(cases)} of {len(asserts)} asserts can be read"
        raise NoProblem(SeedRejection.FEW_TESTS_WRITTEN, detail)
    prompt = f"{questions[-1].strip()}\n\nWrite the Python function `{entry_point}`."
    return WrittenProblem(prompt, entry_point, tuple(cases), len(asserts))


def _asserts(text: str) -> Iterator[ast.Assert]:
    """The asserts in a text; when it is no Python as a whole, those of its lines that are."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("```")]
    whole = _parsed("\n".join(lines))
    for statement in whole if whole is not None else (one for line in lines for one in _parsed(line.strip()) or ()):
        if isinstance(statement, ast.Assert):
            yield statement


def _parsed(text: str) -> list[ast.stmt] | None:
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _function_of(statement: ast.Assert) -> str:
    """The function that an assert calls; empty for an assert of another form."""
    match statement.test:
        case ast.Compare(left=ast.Call(func=ast.Name(id=name))):
            return name
        case _:
            return ""


# Which tests are kept.


# Which tests are kept.


@dataclass(frozen=True, slots=True)
class KeptTests:
    """The tests that are kept, and the place of the program that passes them all: the problem's reference."""

    tests: CallTests
    program: int


def submission_of(problem: WrittenProblem, code: str) -> Submission:
    """A solver's program with all tests that were written, each of which is run."""
    tests = CallTests(problem.entry_point, problem.cases)
    return Submission(tests=tests, code=code, stop_on_first_failure=False, reveal=False, prelude=Prelude.LCB)


def kept_tests(problem: WrittenProblem, passed: Sequence[Set[int]], at_least: int) -> KeptTests:
    """The tests that the best program passes. `passed`: for each program the places of the tests that it passes.

    The best program passes most tests; the first of equal ones counts. So all kept tests agree with one program, and
    two tests with the same arguments are one. Raises NoProblem when fewer than `at_least` are kept.
    """
    if not passed:
        raise NoProblem(SeedRejection.NO_PROGRAM, "no answer of the solver has a program")
    distinct = [_distinct(problem.cases, own) for own in passed]
    best = max(range(len(distinct)), key=lambda at: len(distinct[at]))
    if len(distinct[best]) < at_least:
        detail = f"the best of {len(passed)} programs passes {len(distinct[best])} of {len(problem.cases)} tests"
        raise NoProblem(SeedRejection.FEW_TESTS_PASS, detail)
    return KeptTests(CallTests(problem.entry_point, tuple(distinct[best])), best)


def _distinct(cases: Sequence[CallCase], places: Set[int]) -> list[CallCase]:
    """The cases at these places, one for each list of arguments."""
    found: dict[str, CallCase] = {}
    for place in sorted(places):
        case = asdict(cases[place])
        found.setdefault(json.dumps([case["args"], case["kwargs"]]), cases[place])
    return list(found.values())


def result_key(submission: Submission) -> str:
    """The key of a program's result: a digest of its code, the tests and the rules."""
    return key_of(request_of(submission))


def grade_programs(submissions: Sequence[Submission], verifier: GradingTarget, results: RecordLog) -> None:
    """Grade the programs without a result, which is the tests that each passes. Raises NotAnswered."""
    missing = {result_key(one): one for one in submissions if result_key(one) not in results}
    if missing:
        failures = asyncio.run(_grade_all(missing, verifier, results))
        if failures:
            raise NotAnswered(
                f"{len(failures)} programs got no verdict ({failures[0]:.200}); the other results are kept: start again"
            )


async def _grade_all(missing: dict[str, Submission], verifier: GradingTarget, results: RecordLog) -> list[str]:
    failures: list[str] = []

    async def result(submission: Submission) -> dict[str, Any] | None:
        """The record of a program's result; None after a failure. A program that cannot be graded passes no test."""
        try:
            verdict = await answer(Entry(0, "", request=request_of(submission)))
        except (BadEntry, GradingFailed) as error:
            if isinstance(error, BadEntry) or error.status == 422:
                return {"verdict": f"refused: {error}", "passed": []}
            failures.append(str(error))
            return None
        if verdict["verdict"] == VerdictKind.INTERNAL_ERROR.value:
            failures.append(f"internal_error: {verdict['detail']}")
            return None
        accepted = VerdictKind.ACCEPTED.value
        passed = [test["index"] for test in verdict["tests"] if test["outcome"] == accepted]
        return {"verdict": verdict["verdict"], "passed": passed}

    async with answers_of(verifier, None) as (answer, at_once):
        with progress_bar("running programs", len(missing)) as advance:
            await fill(results, missing.items(), at_once, result, advance)
    return failures


class CannotSynthesize(Unusable):
    """The command cannot begin. The message says what to do."""


class SeedBody(Body):
    """One line of a file of seeds."""

    seed_id: str = Field(min_length=1, max_length=200, description="unique in the file; the problem's id")
    text: str = Field(min_length=1, description="an instruction, a problem, or a program to take the idea from")


@dataclass(frozen=True, slots=True)
class SynthesisSettings:
    """How problems are written and tested. AceCoder asks for about 20 tests and keeps problems with 5 or more.

    `solutions`: programs of the solver for each problem. `max_tokens`: of one answer.
    """

    writer: ServedModel
    solver: ServedModel
    num_tests: int = 20
    at_least: int = 5
    solutions: int = 1
    temperature: float = 0.7
    max_tokens: int = 8192
    at_once: int = 16


@dataclass(frozen=True, slots=True)
class SynthesisSummary:
    """The result. `rejected` counts the seeds by reason."""

    seeds: int
    problems: int
    tests_written: int
    tests_kept: int
    rejected: dict[str, int]
    out: str

    def text(self) -> str:
        """A table for people."""
        rows = [("seeds", self.seeds), *((f"  {reason}", -count) for reason, count in self.rejected.items())]
        rows += [("problems", self.problems), ("tests written", self.tests_written), ("tests kept", self.tests_kept)]
        return "\n".join([f"{self.out}:", *(f"{name:<28}{count:>10}" for name, count in rows)])


def synthesize(seeds: Path, out: Path, settings: SynthesisSettings, verifier: GradingTarget) -> SynthesisSummary:
    """Write the problem file `out`. Raises CannotSynthesize, NotAnswered and what reading raises."""
    require_new(out, CannotSynthesize)
    given = _seeds(seeds)
    folder = out.with_name(f"{out.name}.evidence")
    with naming_storage_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_file(folder / "lock", f"another command works in {folder}")
    with lock:
        return _Synthesis(settings, out, given).run(folder, verifier)


def _seeds(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for seed in checked_records(path, SeedBody):
        if seed.seed_id in found:
            raise CannotSynthesize(f"{path}: seed_id {seed.seed_id!r:.100} occurs twice")
        found[seed.seed_id] = seed.text
    if not found:
        raise CannotSynthesize(f"{path} holds no seed")
    return found


class _Synthesis:
    def __init__(self, settings: SynthesisSettings, out: Path, seeds: dict[str, str]) -> None:
        self._settings = settings
        self._out = out
        self._seeds = seeds
        self._rejected: dict[str, NoProblem] = {}

    def run(self, folder: Path, verifier: GradingTarget) -> SynthesisSummary:
        with (
            open_answers(folder / "written.jsonl") as written,
            open_answers(folder / "solved.jsonl") as solved,
            RecordLog(folder / "results.jsonl", "passed") as results,
        ):
            problems = self._write(written)
            programs = self._solve(problems, solved)
            submissions = [submission_of(problems[one], code) for one, codes in programs.items() for code in codes]
            grade_programs(submissions, verifier, results)
            made = {}
            for seed_id, problem in problems.items():
                try:
                    made[seed_id] = self._made(seed_id, problem, programs[seed_id], results)
                except NoProblem as error:
                    self._rejected[seed_id] = error
        return self._finish(made, sum(problem.num_written for problem in problems.values()))

    def _question(self, served: ServedModel, content: str, seed: int) -> ChatQuestion:
        settings = {"temperature": self._settings.temperature, "max_tokens": self._settings.max_tokens, "seed": seed}
        return ChatQuestion(served, {"content": content, "settings": settings})

    def _write(self, answers: RecordLog) -> dict[str, WrittenProblem]:
        """The problems that the writer wrote, by seed."""
        settings = self._settings
        asked = {
            seed_id: self._question(
                settings.writer, _REQUEST.format(seed=text.strip(), num_tests=settings.num_tests), 1
            )
            for seed_id, text in self._seeds.items()
        }
        ask_all([*asked.values()], answers, settings.at_once, "writing problems")
        found = {}
        for seed_id, question in asked.items():
            try:
                found[seed_id] = written_problem(answers.get(question.key)["answer"], settings.at_least)
            except NoProblem as error:
                self._rejected[seed_id] = error
        return found

    def _solve(self, problems: dict[str, WrittenProblem], answers: RecordLog) -> dict[str, list[str]]:
        """The solver's programs for each problem, without answers that have none."""
        settings = self._settings
        asked = {
            seed_id: [
                self._question(settings.solver, _SOLVE.format(prompt=problem.prompt), at + 1)
                for at in range(settings.solutions)
            ]
            for seed_id, problem in problems.items()
        }
        ask_all([one for own in asked.values() for one in own], answers, settings.at_once, "solving problems")
        return {
            seed_id: [code for one in own if (code := extract_code(answers.get(one.key)["answer"])) is not None]
            for seed_id, own in asked.items()
        }

    def _made(
        self, seed_id: str, written: WrittenProblem, programs: Sequence[str], results: RecordLog
    ) -> ReferencedProblem:
        passed = [set(results.get(result_key(submission_of(written, code)))["passed"]) for code in programs]
        kept = kept_tests(written, passed, self._settings.at_least)
        problem = Problem(
            problem_id=seed_id, prompt=written.prompt, tests=kept.tests, prelude=Prelude.LCB, source="synthetic"
        )
        metadata = {
            "writer": self._settings.writer.model,
            "solver": self._settings.solver.model,
            "tests_kept": f"{len(kept.tests.cases)}/{written.num_written}",
        }
        return ReferencedProblem(problem, (Reference(programs[kept.program]),), metadata)

    def _finish(self, made: dict[str, ReferencedProblem], num_written: int) -> SynthesisSummary:
        """Write the problems in the order of the seeds. Raises CannotSynthesize when there is none."""
        lines = [
            {"seed_id": seed_id, "reason": error.reason.value, "detail": str(error)}
            for seed_id, error in self._rejected.items()
        ]
        rejections = self._out.with_name(f"{self._out.name}.rejected.jsonl")
        write_whole(rejections, "".join(json.dumps(line) + "\n" for line in lines).encode())
        if not made:
            raise CannotSynthesize(f"no seed became a problem; {rejections} has the reason of each")
        store = TestStore(open_blobs(str(store_beside(self._out)), bulk=True))
        rows: list[dict[str, Any]] = [row_of(item, store.put(item.problem.tests)) for item in made.values()]
        store.sync()
        part = self._out.with_name(f"{self._out.name}.part")
        write_rows(part, rows, "")
        join([part], self._out, "")
        part.unlink()
        open_index_of(self._out).close()
        return SynthesisSummary(
            seeds=len(self._seeds),
            problems=len(made),
            tests_written=num_written,
            tests_kept=sum(row["num_tests"] for row in rows),
            rejected=dict(sorted(Counter(error.reason.value for error in self._rejected.values()).items())),
            out=str(self._out),
        )
