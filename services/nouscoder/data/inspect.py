"""`nouscoder data inspect FILE`: counts of a problem file; with --prompt, its prompts; with --flaky, its tests' flaws.

The audit runs every reference solution on all tests of its problem in several rounds. It uses the verifier's grader
with the configured sandbox and without the verdict cache.

The flaws follow from the results of these rounds. A reference is assumed to be right. If it fails a test, or passes
only sometimes, the test or the reference is wrong. In both cases rewards would depend on chance.

A sandbox records the output of each run by its input. INVARIANT: each run in a session inside a `recorded()` block,
also in tasks started there, is recorded exactly in that block's record. The runs are those of the inner sandbox,
unchanged.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median

from nouscoder.config import VerifierSection
from nouscoder.data.check import check_file, library_fault_here
from nouscoder.data.importers.formats import read_referenced
from nouscoder.data.importers.run import RENDERED
from nouscoder.data.problems import ProblemFileError, Reference, ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.prompt import PromptSettings, PromptText
from nouscoder.domain.submission import CallTests, StdinTests, Submission
from nouscoder.domain.verdict import TestOutcome, VerdictKind
from nouscoder.progress_bar import progress_bar
from nouscoder.verifier.grading.grader import Grader, local_grader
from nouscoder.verifier.grading.runs import judge_for
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.judges.users_comparators import load_comparators
from nouscoder.verifier.sandbox.base import NO_FILES, Program, RunResult, SandboxDecorator, Session
from nouscoder.verifier.toolchains.languages import registry

NEAR_LIMIT = 0.5


class Flaw(StrEnum):
    """The kinds of flaws of a test or of a whole problem."""

    OUTCOME_VARIES = "outcome_varies"
    OUTPUT_VARIES = "output_varies"
    NEVER_PASSED = "never_passed"
    NEAR_LIMIT = "near_limit"  # a reference uses more than the share NEAR_LIMIT of the time limit
    NOT_RUN = "not_run"  # a reference does not compile, or cannot be graded


@dataclass(frozen=True, slots=True)
class Seen:
    """The result of one reference in one test in one round. `output` is a digest; empty if none is recorded."""

    outcome: VerdictKind
    output: bytes
    share_of_limit: float  # the larger of the shares of the CPU and the wall time limit


@dataclass(frozen=True, slots=True)
class ReferenceRound:
    """The results of one reference in all tests [num_tests]. When it could not run, `trouble` says why."""

    reference: int
    tests: tuple[Seen, ...] = ()
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class FoundFlaw:
    """One flaw. `test` is None for a flaw of the whole problem."""

    problem_id: str
    test: int | None
    flaw: Flaw
    detail: str


def findings_of(problem_id: str, rounds: Sequence[ReferenceRound]) -> list[FoundFlaw]:
    """All flaws of one problem: those of the whole problem, then those of each test."""
    troubles = Counter(f"reference {one.reference}: {one.trouble}" for one in rounds if one.trouble)
    found = [
        FoundFlaw(problem_id, None, Flaw.NOT_RUN, f"{text} ({count} times)") for text, count in sorted(troubles.items())
    ]
    whole = [one for one in rounds if not one.trouble]
    for test in range(len(whole[0].tests) if whole else 0):
        seen = [(one.reference, one.tests[test]) for one in whole]
        found += (FoundFlaw(problem_id, test, flaw, detail) for flaw, detail in _flaws(seen))
    return found


def _flaws(seen: Sequence[tuple[int, Seen]]) -> list[tuple[Flaw, str]]:
    flaws = []
    for reference in sorted({number for number, _ in seen}):
        own = [one for number, one in seen if number == reference]
        outcomes = Counter(one.outcome.value for one in own)
        if len(outcomes) > 1:
            counts = ", ".join(f"{outcome} {count} times" for outcome, count in outcomes.most_common())
            flaws.append((Flaw.OUTCOME_VARIES, f"reference {reference}: {counts}"))
        outputs = {one.output for one in own}
        if len(outputs) > 1:
            flaws.append((Flaw.OUTPUT_VARIES, f"reference {reference}: {len(outputs)} outputs in {len(own)} rounds"))
        slowest = max(one.share_of_limit for one in own)
        passed = VerdictKind.ACCEPTED.value in outcomes
        if passed and slowest > NEAR_LIMIT:
            flaws.append((Flaw.NEAR_LIMIT, f"reference {reference} took {slowest:.0%} of the limit"))
    if not any(one.outcome is VerdictKind.ACCEPTED for _, one in seen):
        got = ", ".join(sorted({one.outcome.value for _, one in seen}))
        flaws.append((Flaw.NEVER_PASSED, f"{len(seen)} runs of references got {got}"))
    return flaws


Outputs = dict[bytes, set[bytes]]  # digests of outputs, by the digest of the input

_record: ContextVar[Outputs | None] = ContextVar("outputs", default=None)


@contextmanager
def recorded() -> Iterator[Outputs]:
    """Record the runs of this task, and of the tasks that it starts, inside the block."""
    outputs: Outputs = {}
    token = _record.set(outputs)
    try:
        yield outputs
    finally:
        _record.reset(token)


def digest(*parts: bytes) -> bytes:
    """A digest of several byte strings that depends on where each one ends."""
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(len(part).to_bytes(8, "little") + part)
    return made.digest()


class RecordingSandbox(SandboxDecorator):
    """Forwards to `inner` and records the runs of sessions. Pairs (for checkers and interactors) are not recorded."""

    @asynccontextmanager
    async def session(self, program: Program) -> AsyncIterator[Session]:
        """See `Sandbox`."""
        async with self._inner.session(program) as session:
            yield _RecordingSession(session)


class _RecordingSession:
    def __init__(self, inner: Session) -> None:
        self._inner = inner

    async def run(
        self, stdin: bytes, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> RunResult:
        result = await self._inner.run(stdin, args=args, files=files)
        outputs = _record.get()
        if outputs is not None:
            outputs.setdefault(digest(stdin), set()).add(digest(result.stdout, result.result or b""))
        return result

    async def dialogue_with(
        self, partner: Session, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> tuple[RunResult, RunResult]:
        """See `Session`. Never called, because pairs return the inner sandbox's own sessions."""
        return await self._inner.dialogue_with(partner, args=args, files=files)


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of the audit. Problems without a reference solution are not audited."""

    num_problems: int
    num_audited: int
    num_tests: int
    num_rounds: int
    findings: tuple[FoundFlaw, ...]


async def audit(problems: Sequence[ReferencedProblem], section: VerifierSection, num_rounds: int) -> Audit:
    """Run the references. Raises ProblemFileError when there is none, and SandboxUnavailable."""
    audited = [one for one in problems if one.references]
    if not audited:
        raise ProblemFileError("no problem has a reference solution, so there is nothing to run")
    jobs = [
        (one.problem, number, reference)
        for _ in range(num_rounds)  # the outer loop, so that time passes between two rounds of one test
        for one in audited
        for number, reference in enumerate(one.references)
    ]
    with progress_bar("references", len(jobs)) as advance:
        async with local_grader(section, RecordingSandbox) as grader:
            rounds = await _run_all(grader, jobs, advance)
    by_problem: dict[str, list[ReferenceRound]] = {}
    for (problem, _, _), one in zip(jobs, rounds, strict=True):
        by_problem.setdefault(problem.problem_id, []).append(one)
    return Audit(
        num_problems=len(problems),
        num_audited=len(audited),
        num_tests=sum(len(one.problem.tests.cases) for one in audited),
        num_rounds=num_rounds,
        findings=tuple(found for name, own in by_problem.items() for found in findings_of(name, own)),
    )


async def _run_all(
    grader: Grader, jobs: Sequence[tuple[Problem, int, Reference]], advance: Callable[[float], None]
) -> list[ReferenceRound]:
    """Run the jobs in order, one per slot at a time, so that measured times are not those of an overloaded machine."""
    rounds: list[ReferenceRound | None] = [None] * len(jobs)
    waiting = iter(enumerate(jobs))

    async def runner() -> None:
        for at, (problem, number, reference) in waiting:
            rounds[at] = await _run(grader, problem, number, reference)
            advance(1)

    async with asyncio.TaskGroup() as group:
        for _ in range(grader.num_slots):
            group.create_task(runner())
    return [one for one in rounds if one is not None]


async def _run(grader: Grader, problem: Problem, number: int, reference: Reference) -> ReferenceRound:
    submission = reference.submission(problem, stop_on_first_failure=False)
    with recorded() as outputs:
        try:
            verdict = await grader.grade(submission)
        except InvalidSubmission as error:
            return ReferenceRound(number, trouble=str(error))
    if len(verdict.tests) != verdict.total:
        return ReferenceRound(
            number, trouble=f"{verdict.kind.value}: {verdict.detail.strip().partition(chr(10))[0]:.200}"
        )
    given = _given(submission)
    tests = tuple(_seen(submission, outcome, outputs, given) for outcome in verdict.tests)
    return ReferenceRound(number, tests)


def _given(submission: Submission) -> list[bytes]:
    """Digests of the tests' inputs if they are the same in every round, else an empty list."""
    if not isinstance(submission.tests, StdinTests | CallTests):
        return []
    judge = judge_for(submission)
    return [digest(judge.stdin(index)) for index in range(judge.num_tests)]


def _seen(submission: Submission, outcome: TestOutcome, outputs: Outputs, given: Sequence[bytes]) -> Seen:
    factor = registry()[submission.language].time_factor
    limits = submission.limits
    share = max(outcome.wall_time_s / limits.wall_time_s, outcome.cpu_time_s / limits.cpu_time_s) / factor
    output = digest(*sorted(outputs.get(given[outcome.index], ()))) if given else b""
    return Seen(outcome.outcome, output, share)


_HERE = VerifierSection()


def inspect_file(path: Path, *, as_json: bool, here: VerifierSection | None = _HERE) -> tuple[str, int]:
    """(text to print, exit code). Raises ProblemFileError for a file with problems that cannot be graded.

    With `as_json` the faults are in the text. `here`: how this machine grades; None where another one does.
    """
    load_comparators(here.comparators if here else ())
    checked = check_file(path, here=here is not None, read=read_referenced)
    lacking = library_fault_here(here, checked.libraries, f"{checked.num_problems} problems") if here else ""
    if as_json:
        faults = [*map(str, checked.faults), *([lacking] if lacking else [])]
        code = int(ProblemFileError.exit_code) if faults else 0
        return json.dumps(asdict(checked) | {"faults": faults}, indent=1), code
    if checked.faults or lacking:
        raise ProblemFileError(f"{path}: " + "\n".join(filter(None, (lacking, checked.text()))))
    types = ", ".join(f"{count} {name}" for name, count in checked.tests_by_type.items())
    warning = f"\n{checked.num_rendered} {RENDERED}" if checked.num_rendered else ""
    return (
        f"{path}: {checked.num_problems} problems ({types}), {checked.num_tests} tests,"
        f" {checked.num_with_references} problems with reference solutions{warning}"
    ), 0


def describe(path: Path, *, as_json: bool) -> str:
    """What a problem file holds, in numbers. Raises Unusable."""
    tests, prompts, languages, seen = list[int](), list[int](), Counter[str](), Counter[bytes]()
    for item in read_referenced(path):
        problem = item.problem
        tests.append(len(problem.tests.cases))
        prompts.append(len(problem.prompt))
        languages[", ".join(problem.languages)] += 1
        seen[digest(" ".join(problem.prompt.split()).encode())] += 1
    record = {
        "problems": len(tests),
        "tests a problem": f"{min(tests)} to {max(tests)}, median {median(tests):g}",
        "characters a prompt": f"{min(prompts)} to {max(prompts)}, median {median(prompts):g}",
        "languages": ", ".join(f"{count} {names}" for names, count in languages.most_common()),
        "problems with the prompt of another one": len(tests) - len(seen),
    }
    return json.dumps(record, indent=1) if as_json else "\n".join(f"{name}: {value}" for name, value in record.items())


def prompts_of(path: Path, settings: PromptSettings) -> str:
    """How the first problem with starter code and the first without any are asked. Raises ProblemFileError."""
    found: dict[bool, Problem] = {}
    for one in read_referenced(path):
        found.setdefault(bool(one.problem.starter_code.strip()), one.problem)
        if len(found) == 2:
            break
    parts = []
    for problem in found.values():
        messages = settings.messages(PromptText.of(problem))
        messages = messages[-1:] if settings.prompt_as == "text" else messages
        parts += [f"--- {problem.problem_id}, {each.role.value}\n{each.content}" for each in messages]
    return "\n".join(parts)


def audit_file(path: Path, section: VerifierSection, num_rounds: int, *, as_json: bool) -> tuple[str, int]:
    """(text to print, exit code). The exit code is 0 without findings. Raises ProblemFileError, SandboxUnavailable."""
    result = asyncio.run(audit(list(read_referenced(path)), section, num_rounds))
    code = int(bool(result.findings))
    if as_json:
        return json.dumps(asdict(result), indent=1), code
    lines = [
        f"{one.problem_id}{'' if one.test is None else f' test {one.test}'}: {one.flaw.value}: {one.detail}"
        for one in result.findings
    ]
    lines.append(
        f"{path}: {result.num_audited} of {result.num_problems} problems have reference solutions; {result.num_tests}"
        f" tests, {result.num_rounds} rounds: {len(result.findings)} findings"
    )
    return "\n".join(lines), code
