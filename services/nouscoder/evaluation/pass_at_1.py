"""pass@1 of a policy on problems, measured through the real services.

pass@1 is the expected share of problems that one rollout solves: the mean over problems of c / n, where c of the
problem's n rollouts are accepted (Chen et al. 2021, 2107.03374, equation 1 at k = 1).

INVARIANT: an evaluation has exactly `samples` verdicts for every problem, none of them internal_error, and all rollouts
are from one policy version. If that is not possible, it fails with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import sqrt
from statistics import stdev

from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.problem import Problem
from nouscoder.domain.rollout import Rollout, Sampling, Task
from nouscoder.domain.submission import Submission
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.errors import NousCoderError, first_error
from nouscoder.retry import Retry
from nouscoder.rpc.channel import PeerError, PeerUnreachable
from nouscoder.rpc.generation_client import GenerationClient, Pin
from nouscoder.rpc.verifier_client import VerifierClient

Progress = Callable[[int, int], None]

_MAX_AT_ONCE = 32
_STALL_LIMIT_S = 300.0
_WHILE_AWAY = Retry("sampling for the evaluation", (PeerUnreachable,), for_s=60.0, wait_s=0.5)


class EvaluationError(NousCoderError):
    """The evaluation failed. The message names the rollout and the reason."""


EVALUATION_ERRORS = (EvaluationError, PeerError)  # after which an evaluation may be tried again


class _InternalError(Exception):
    """The verdict is internal_error. The text is its detail."""


_AFTER_INTERNAL_ERRORS = Retry("grading for the evaluation", (_InternalError,), max_tries=4, wait_s=0.5)


@dataclass(frozen=True, slots=True)
class ProblemResult:
    """`num_accepted` of the problem's `num_rollouts` rollouts were accepted. `language` names all that it allows."""

    problem_id: str
    family: str
    num_accepted: int
    num_rollouts: int
    language: str = "python"

    @property
    def pass_at_1(self) -> float:
        """c / n."""
        return self.num_accepted / self.num_rollouts


@dataclass(frozen=True, slots=True)
class EvaluatedSample:
    """The first rollout of a problem, for inspection. `verdict` is the value of a VerdictKind."""

    problem_id: str
    family: str
    prompt: str
    program: str
    verdict: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of policy version `policy_version`. `problems` and `samples` are in the order of the problems."""

    policy_version: int
    problems: tuple[ProblemResult, ...]
    samples: tuple[EvaluatedSample, ...]

    @property
    def pass_at_1(self) -> float:
        """The mean over all problems."""
        return _mean([problem.pass_at_1 for problem in self.problems])

    @property
    def standard_error(self) -> float | None:
        """Of pass@1 over problems: s / sqrt(n), where s is that of the problems' own pass@1. None for one problem."""
        values = [problem.pass_at_1 for problem in self.problems]
        return stdev(values) / sqrt(len(values)) if len(values) > 1 else None

    @property
    def by_family(self) -> dict[str, float]:
        """pass@1 over the problems of each family."""
        return self._by(lambda problem: problem.family)

    @property
    def by_language(self) -> dict[str, float]:
        """pass@1 over the problems of each language; those that allow several are apart (`cpp, python`)."""
        return self._by(lambda problem: problem.language)

    def _by(self, group: Callable[[ProblemResult], str]) -> dict[str, float]:
        groups: dict[str, list[float]] = {}
        for problem in self.problems:
            groups.setdefault(group(problem), []).append(problem.pass_at_1)
        return {name: _mean(values) for name, values in sorted(groups.items())}

    @property
    def num_problems(self) -> int:
        """Problems measured."""
        return len(self.problems)

    @property
    def num_rollouts(self) -> int:
        """The number of rollouts that were sampled and graded."""
        return sum(problem.num_rollouts for problem in self.problems)


async def evaluate(
    problems: Sequence[Problem],
    source: GenerationClient,
    grader: VerifierClient,
    *,
    samples: int,
    sampling: Sampling,
    manifest: PolicyManifest | None = None,
    pin_limit_s: float = 3600.0,
    progress: Progress = lambda done, total: None,
) -> Evaluation:
    """Sample `samples` rollouts of every problem and grade each when it is ready.

    `progress` is called with the number of verdicts and the total. With a manifest, `source` must first use that
    policy, and keeps it until all is sampled, for `pin_limit_s` seconds at most; both are asked for again after each
    interruption. `sampling.seed` seeds the whole evaluation, and the seed of each rollout derives from it. Raises
    EvaluationError, PeerError or PeerUnreachable, and PolicyReplaced when a newer policy is in use.
    """
    tasks = evaluation_tasks(problems, samples, sampling)
    if not tasks:
        raise EvaluationError("there is no problem to evaluate on")
    by_id = {problem.problem_id: problem for problem in problems}
    graded: dict[str, tuple[Rollout, Verdict]] = {}
    at_once = asyncio.Semaphore(_MAX_AT_ONCE)

    async with source, grader:

        async def grade(rollout: Rollout) -> None:
            async with at_once:
                graded[rollout.rollout_id] = (rollout, await _grade(grader, by_id[rollout.problem_id], rollout))
            progress(len(graded), len(tasks))

        try:
            async with asyncio.TaskGroup() as gradings:
                pinning = None if manifest is None else Pinning(manifest, pin_limit_s)
                await sample_tasks(source, pinning, tasks, lambda rollout: gradings.create_task(grade(rollout)))
        except BaseExceptionGroup as group:
            raise first_error(group) from None
    return _evaluation(problems, tasks, graded, manifest)


def evaluation_tasks(problems: Sequence[Problem], samples: int, sampling: Sampling) -> list[Task]:
    """`samples` tasks for every problem. Each seed depends only on `sampling.seed`, the problem and the position."""
    return [
        Task(
            rollout_id=f"evaluation/{problem.problem_id}/{position}",
            group_id=f"evaluation/{problem.problem_id}",
            problem_id=problem.problem_id,
            prompt=problem.prompt,
            sampling=replace(sampling, seed=_seed(f"{sampling.seed}/{problem.problem_id}/{position}")),
            prompt_template=problem.prompt_template,
            public_tests=problem.shown(),
            starter_code=problem.starter_code,
            languages=problem.languages,
        )
        for problem in problems
        for position in range(samples)
    ]


@dataclass(frozen=True, slots=True)
class Pinning:
    """The policy that is measured, and for how long it is kept in use at most."""

    manifest: PolicyManifest
    limit_s: float


async def sample_tasks(
    source: GenerationClient, pinning: Pinning | None, tasks: Sequence[Task], took: Callable[[Rollout], object]
) -> None:
    """Sample every task once. While the service does not answer, missing tasks are retried as `_WHILE_AWAY` says."""
    missing = {task.rollout_id: task for task in tasks}

    async def sample_some() -> None:
        """Sample the missing tasks. Raises PeerUnreachable when no rollout arrived."""
        num_missing = len(missing)
        try:
            pin = None
            if pinning is not None:
                await source.use_policy(pinning.manifest)
                pin = Pin(pinning.manifest.policy_version, pinning.limit_s)
            async for rollout in source.generate(list(missing.values()), _STALL_LIMIT_S, pin):
                del missing[rollout.rollout_id]
                took(rollout)
        except PeerUnreachable:
            if len(missing) == num_missing:
                raise

    while missing:
        await _WHILE_AWAY.call(sample_some)


async def _grade(grader: VerifierClient, problem: Problem, rollout: Rollout) -> Verdict:
    return await verdict_on(grader, problem.grading_rules().submission(problem.tests, rollout.text), rollout.rollout_id)


async def verdict_on(grader: VerifierClient, submission: Submission, name: str) -> Verdict:
    """The verdict. Retries after internal_error, then raises EvaluationError: it never counts as 0."""

    async def graded() -> Verdict:
        verdict = await grader.grade(submission)
        if verdict.is_ours:
            raise _InternalError(verdict.detail)
        return verdict

    try:
        return await _AFTER_INTERNAL_ERRORS.call(graded)
    except _InternalError as error:
        raise EvaluationError(
            f"{name} could not be graded: internal_error {_AFTER_INTERNAL_ERRORS.max_tries} times, last: {error}"
        ) from None


def _evaluation(
    problems: Sequence[Problem],
    tasks: Sequence[Task],
    graded: dict[str, tuple[Rollout, Verdict]],
    manifest: PolicyManifest | None,
) -> Evaluation:
    versions = {span.policy_version for rollout, _ in graded.values() for span in rollout.versions}
    if len(versions) > 1 or (manifest is not None and versions != {manifest.policy_version}):
        raise EvaluationError(f"the policy changed while it was measured: versions {sorted(versions)}")
    of_problem: dict[str, list[tuple[Rollout, Verdict]]] = {}
    for task in tasks:
        of_problem.setdefault(task.problem_id, []).append(graded[task.rollout_id])
    results: list[ProblemResult] = []
    shown: list[EvaluatedSample] = []
    for problem in problems:
        found = of_problem[problem.problem_id]
        num_accepted = sum(verdict.kind is VerdictKind.ACCEPTED for _, verdict in found)
        language = ", ".join(problem.languages)
        results.append(ProblemResult(problem.problem_id, problem.family, num_accepted, len(found), language))
        rollout, verdict = found[0]
        shown.append(
            EvaluatedSample(problem.problem_id, problem.family, problem.prompt, rollout.text, verdict.kind.value)
        )
    return Evaluation(versions.pop(), tuple(results), tuple(shown))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _seed(text: str) -> int:
    # Not 0, because seed 0 lets the engine choose.
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") or 1
