"""pass@1 of a policy on problems, measured through the real services.

pass@1 is the expected share of problems that one rollout solves: the mean over problems of c / n, where c of the
problem's n rollouts are accepted (Chen et al. 2021, 2107.03374, equation 1 at k = 1).

INVARIANT: an evaluation has exactly `samples` verdicts for every problem, none of them internal_error, and all rollouts
are from one policy version. If that is not possible, it fails with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import sqrt
from statistics import stdev

from nouscoder.domain.estimates import USUAL_K, pass_at_k
from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.problem import Problem
from nouscoder.domain.rollout import Rollout, Sampling, Task
from nouscoder.domain.submission import Submission
from nouscoder.domain.tokens import FinishReason
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.errors import NousCoderError, first_error
from nouscoder.recorded_evaluations import EvaluatedSample
from nouscoder.retry import Retry
from nouscoder.rpc.channel import PeerError, PeerUnreachable
from nouscoder.rpc.generation_client import GenerationClient, Pin
from nouscoder.rpc.pairs import TASK
from nouscoder.rpc.server import MAX_MESSAGE_BYTES
from nouscoder.rpc.verifier_client import VerifierClient

Progress = Callable[[int, int], None]

_MAX_AT_ONCE = 32
# Without a policy to keep. With one it is the limit of the pin: long rollouts end late, and may wait for a place.
_STALL_LIMIT_S = 300.0
_MOST_REQUEST_BYTES = MAX_MESSAGE_BYTES // 2
_WHILE_AWAY = Retry("sampling for the evaluation", (PeerUnreachable,), for_s=60.0, wait_s=0.5)


class EvaluationError(NousCoderError):
    """The evaluation failed. The message names the rollout and the reason."""


EVALUATION_ERRORS = (EvaluationError, PeerError)  # after which an evaluation may be tried again


class _InternalError(Exception):
    """The verdict is internal_error. The text is its detail."""


_AFTER_INTERNAL_ERRORS = Retry("grading for the evaluation", (_InternalError,), max_tries=4, wait_s=0.5)


@dataclass(frozen=True, slots=True)
class ProblemResult:
    """`num_accepted` of the problem's `num_rollouts` rollouts were accepted, `num_truncated` were cut at their limit,
    and they have `num_tokens` sampled tokens together. `language` names all that the problem allows.
    """

    problem_id: str
    family: str
    num_accepted: int
    num_rollouts: int
    num_truncated: int = 0
    num_tokens: int = 0
    language: str = "python"

    @property
    def pass_at_1(self) -> float:
        """c / n."""
        return self.num_accepted / self.num_rollouts


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
    def sampling_error(self) -> float | None:
        """Of pass@1 on just these problems: how much other samples of the same policy would change it.

        That is the root of the sum of p (1 - p) / (n - 1) over the problems, divided by their number, where p = c / n.
        Two policies that are measured on the same problems are compared with it, because the choice of the problems is
        in `standard_error` only. None for one sample a problem, which does not tell p.
        """
        if any(problem.num_rollouts < 2 for problem in self.problems):
            return None
        variances = (one.pass_at_1 * (1 - one.pass_at_1) / (one.num_rollouts - 1) for one in self.problems)
        return sqrt(sum(variances)) / len(self.problems)

    @property
    def pass_at_k(self) -> dict[int, float]:
        """The unbiased estimate for the usual k up to the samples of a problem, and for their number."""
        fewest = min(problem.num_rollouts for problem in self.problems)
        ks = sorted({*(k for k in USUAL_K if k <= fewest), fewest})
        return {k: _mean([pass_at_k(one.num_rollouts, one.num_accepted, k) for one in self.problems]) for k in ks}

    @property
    def truncated_share(self) -> float:
        """The share of the rollouts that were cut at their limit of tokens."""
        return sum(problem.num_truncated for problem in self.problems) / self.num_rollouts

    @property
    def mean_tokens(self) -> float:
        """The mean number of sampled tokens of a rollout."""
        return sum(problem.num_tokens for problem in self.problems) / self.num_rollouts

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
    evaluation: bool = True,
    older: bool = False,
) -> Evaluation:
    """Sample `samples` rollouts of every problem and grade each when it is ready.

    `progress` is called with the number of verdicts and the total. With a manifest, `source` must first use that
    policy, and keeps it until all is sampled, for `pin_limit_s` seconds at most; both are asked for again after each
    interruption. `sampling.seed` seeds the whole evaluation, and the seed of each rollout derives from it.
    `evaluation`: with the context of evaluations, which is that of the training otherwise. `older`: the training is
    over, so the policy may be older than that in use; PolicyReplaced without it. Raises EvaluationError, PeerError or
    PeerUnreachable.
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
                problem, name = by_id[rollout.problem_id], rollout.rollout_id
                submission = problem.grading_rules().submission(problem.tests, rollout.text)
                graded[name] = (rollout, await verdict_on(grader, submission, name))
            progress(len(graded), len(tasks))

        try:
            async with asyncio.TaskGroup() as gradings:
                pinning = None if manifest is None else Pinning(manifest, pin_limit_s, older)

                def took(rollout: Rollout) -> None:
                    gradings.create_task(grade(rollout))

                await sample_tasks(source, pinning, tasks, took, evaluation=evaluation)
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
            tests_type=problem.tests_type,
        )
        for problem in problems
        for position in range(samples)
    ]


@dataclass(frozen=True, slots=True)
class Pinning:
    """The policy that is measured, for how long it is kept in use at most, and whether a newer one may be in use."""

    manifest: PolicyManifest
    limit_s: float
    older: bool = False


async def sample_tasks(
    source: GenerationClient,
    pinning: Pinning | None,
    tasks: Sequence[Task],
    took: Callable[[Rollout], object],
    *,
    evaluation: bool = False,
) -> None:
    """Sample every task once. While the service does not answer, missing tasks are retried as `_WHILE_AWAY` says."""
    missing = {task.rollout_id: task for task in tasks}
    stall_limit_s = _STALL_LIMIT_S if pinning is None else max(_STALL_LIMIT_S, pinning.limit_s)

    async def sample_part(part: list[Task], pin: Pin | None) -> None:
        async for rollout in source.generate(part, stall_limit_s, pin, evaluation=evaluation):
            del missing[rollout.rollout_id]
            took(rollout)

    async def sample_some() -> None:
        """Sample the missing tasks. Raises PeerUnreachable when no rollout arrived."""
        num_missing = len(missing)
        try:
            pin = None
            if pinning is not None:
                await source.use_policy(pinning.manifest, older=pinning.older)
                pin = Pin(pinning.manifest.policy_version, pinning.limit_s)
            async with asyncio.TaskGroup() as calls:
                for part in _parts(missing.values()):
                    calls.create_task(sample_part(part, pin))
        except BaseExceptionGroup as group:
            error = first_error(group)
            if not isinstance(error, PeerUnreachable) or len(missing) == num_missing:
                raise error from None

    while missing:
        await _WHILE_AWAY.call(sample_some)


def _parts(tasks: Iterable[Task]) -> list[list[Task]]:
    """The tasks of each call: a request of all may be larger than a message may be."""
    parts: list[list[Task]] = []
    room = 0
    for task in tasks:
        size = TASK.to(task).ByteSize()
        if not parts or size > room:
            parts.append([])
            room = _MOST_REQUEST_BYTES
        parts[-1].append(task)
        room -= size
    return parts


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
        num_truncated = sum(rollout.finish_reason is FinishReason.LENGTH for rollout, _ in found)
        num_tokens = sum(rollout.num_sampled_tokens for rollout, _ in found)
        language = ", ".join(problem.languages)
        counts = (num_accepted, len(found), num_truncated, num_tokens)
        results.append(ProblemResult(problem.problem_id, problem.family, *counts, language))
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
