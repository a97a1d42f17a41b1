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

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from nouscoder.atomic_files import lock_file, naming_storage_faults, write_whole
from nouscoder.data.asking import ChatQuestion, ServedModel, ask_all, open_answers
from nouscoder.data.json_records import checked_records
from nouscoder.data.kept_tests import grade_programs, kept_tests, result_key, submission_of
from nouscoder.data.problem_index import open_index_of
from nouscoder.data.problem_parquet import join, require_new, row_of, store_beside, write_rows
from nouscoder.data.problems import Reference, ReferencedProblem
from nouscoder.data.written_problem import REQUEST, SOLVE, NoProblem, WrittenProblem, written_problem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import Prelude
from nouscoder.errors import Unusable
from nouscoder.formats.body import Body
from nouscoder.grade_files.answers import GradingTarget
from nouscoder.record_log import RecordLog
from nouscoder.store.blobs import open_blobs
from nouscoder.store.tests import TestStore
from nouscoder.verifier.grading.extract import extract_code


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
            seed_id: self._question(settings.writer, REQUEST.format(seed=text.strip(), num_tests=settings.num_tests), 1)
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
                self._question(settings.solver, SOLVE.format(prompt=problem.prompt), at + 1)
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
