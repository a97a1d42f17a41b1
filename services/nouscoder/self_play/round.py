"""The proposals of one round: sampled, read, executed, solved, and judged.

    proposer -> read_proposal -> reference on each input, twice -> solver's samples on each input -> judged
    proposals.jsonl                      runs.jsonl                 solutions.jsonl, runs.jsonl     judged.jsonl

accepted.jsonl holds the accepted proposals as problems. INVARIANT: judged.jsonl and accepted.jsonl follow from the logs
alone, and accepted.jsonl is whole before judged.jsonl is there. A round that was killed goes on with what is logged.

Each program runs on one input in the verifier's sandbox, through its ordinary grading. The verdict on a wrong answer
shows the output, so a program is graded by one test whose expected output no program prints. A longer output than the
verdict shows counts as none. Programs are hostile, and run nowhere else.

INVARIANT: each result is in the log before it is used, never that of an internal_error, and what is in the log is not
run again.

INVARIANT: a rollout is in the log before it is used, under a digest of its policy and of the whole task. A task with a
rollout is not sampled again.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from nouscoder.atomic_files import write_whole
from nouscoder.config import Config
from nouscoder.data.asking import fill
from nouscoder.data.kept_tests import result_key
from nouscoder.data.problems import save_problems
from nouscoder.domain.curriculum import task_seed
from nouscoder.domain.problem import GradingRules, Problem
from nouscoder.domain.rollout import Rollout, Sampling, Task
from nouscoder.domain.submission import Comparator, StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.record_log import RecordLog, key_of
from nouscoder.self_play.judgement import (
    Judgement,
    Outputs,
    Proposal,
    ProposalRejected,
    Rejection,
    check_reference,
    judged,
    proposing_prompt,
    read_proposal,
)
from nouscoder.self_play.known import Known, KnownProblem
from nouscoder.store.rollout_record import decode_rollout, encode_rollout
from nouscoder.verifier.judges.judge import CLIP_CHARS

# Grades a submission; never with internal_error. The second argument names it in errors.
Grade = Callable[[Submission, str], Awaitable[Verdict]]

_UNEXPECTED = "an output that nobody expects"
_AT_ONCE = 16


def run_of(text: str, given: str, rules: GradingRules, *, is_program: bool) -> Submission:
    """One run on the input `given`, of a program, or of the program in an answer of the policy."""
    code = text if is_program or rules.text_is_code else None
    return Submission(
        tests=StdinTests((StdinCase(given, _UNEXPECTED),)),
        code=code,
        completion=text if code is None else None,
        limits=rules.limits,
        comparator=Comparator(),
        profile=rules.profile,
        prelude=rules.prelude,
        libraries=rules.libraries,
    )


class Runs:
    """Runs submissions and keeps what came of them."""

    def __init__(self, log: RecordLog, grade: Grade) -> None:
        self._log = log
        self._grade = grade

    async def make(self, submissions: Sequence[Submission], progress: Callable[[int, int], None]) -> None:
        """Run all that have no result yet, several at a time. Raises what `grade` raises."""
        missing = {key: (one, key) for one in submissions if (key := result_key(one)) not in self._log}
        done = count(1)

        async def run(given: tuple[Submission, str]) -> dict[str, Any]:
            verdict = await self._grade(*given)
            failure, output = verdict.first_failure, None
            if verdict.kind is VerdictKind.WRONG_ANSWER and failure is not None and len(failure.output) < CLIP_CHARS:
                output = failure.output
            return {"verdict": verdict.kind.value, "output": output}

        await fill(self._log, missing.items(), _AT_ONCE, run, lambda more: progress(next(done), len(missing)))

    def output(self, submission: Submission) -> str | None:
        """What the run of `run_of` printed; None when it failed. Raises KeyError before it was made."""
        output: str | None = self._log.get(result_key(submission))["output"]
        return output

    def is_accepted(self, submission: Submission) -> bool:
        """Whether all tests passed. Raises KeyError before it was made."""
        return bool(self._log.get(result_key(submission))["verdict"] == VerdictKind.ACCEPTED.value)


# Samples tasks, and gives each rollout to its second argument when it ends.
Sample = Callable[[Sequence[Task], Callable[[Rollout], object]], Awaitable[None]]


class RolloutLog(RecordLog):
    """The rollouts of one file. `policy` is the digest of the weights that sample them."""

    def __init__(self, path: Path, policy: str) -> None:
        super().__init__(path, "record")
        self._policy = policy

    async def make(self, tasks: Sequence[Task], sample: Sample, progress: Callable[[int, int], None]) -> None:
        """Sample the tasks that have no rollout yet. Raises what `sample` raises."""
        keys = {task.rollout_id: self._key(task) for task in tasks}
        missing = {task.rollout_id: task for task in tasks if keys[task.rollout_id] not in self}
        left = set(missing)

        def took(rollout: Rollout) -> None:
            _, record = encode_rollout(rollout)
            self.add(keys[rollout.rollout_id], {"record": b64encode(record).decode()})
            left.discard(rollout.rollout_id)
            progress(len(keys) - len(left), len(keys))

        if missing:
            await sample([*missing.values()], took)

    def of(self, task: Task) -> Rollout:
        """The rollout of this task. Raises KeyError before it was made."""
        return decode_rollout(b64decode(self.get(self._key(task))["record"]))

    def all(self) -> list[Rollout]:
        """The rollouts in the order of their ids."""
        found = [decode_rollout(b64decode(self.get(key)["record"])) for key in self]
        return sorted(found, key=lambda rollout: rollout.rollout_id)

    def _key(self, task: Task) -> str:
        return key_of({"policy": self._policy, "task": asdict(task)})


PROPOSALS, JUDGED, ACCEPTED = "proposals.jsonl", "judged.jsonl", "accepted.jsonl"
_AS_IT_IS = "{prompt}"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class RoundWork:
    """What a round works with: samples of the policy, verdicts, whether a solver's task fits in the context."""

    sample: Sample
    grade: Grade
    fits: Callable[[Task], bool]
    progress: Progress = lambda name, done, total: None

    def named(self, name: str) -> Callable[[int, int], None]:
        """The progress of one step."""
        return partial(self.progress, name)


@dataclass(frozen=True, slots=True)
class ProposalCandidate:
    """A proposal that can be read, and the problem whose rules it takes."""

    proposal: Proposal
    example: KnownProblem

    def runs(self) -> list[Submission]:
        """The reference on each input."""
        program, rules = self.proposal.program, self.example.rules
        return [run_of(program, given, rules, is_program=True) for given in self.proposal.inputs]

    def solving(self, answer: str) -> list[Submission]:
        """A solver's answer on each input."""
        return [run_of(answer, given, self.example.rules, is_program=False) for given in self.proposal.inputs]


@dataclass(frozen=True, slots=True)
class Valid:
    """A candidate whose reference printed `outputs`, which are the expected outputs of `problem`."""

    candidate: ProposalCandidate
    outputs: tuple[str, ...]
    problem: Problem

    @classmethod
    def of(cls, candidate: ProposalCandidate, outputs: Outputs) -> Valid:
        """Raises ProposalRejected when the reference's outputs are not usable."""
        check_reference(outputs)
        printed = tuple(output for output in outputs if output is not None)
        proposal = candidate.proposal
        tests = StdinTests(tuple(map(StdinCase, proposal.inputs, printed)))
        return cls(candidate, printed, candidate.example.problem(proposal.problem_id, proposal.statement, tests))

    def repeat(self) -> Submission:
        """The reference once more, on all inputs; it must print what it printed before."""
        rules = self.candidate.example.rules
        return replace(
            rules.submission(self.problem.tests, self.candidate.proposal.program),
            code=self.candidate.proposal.program,
            completion=None,
        )


@dataclass(slots=True)
class Round:
    """One round. `folder` holds its files; `policy` is the digest of the weights that propose and solve."""

    config: Config
    number: int
    folder: Path
    known: Known
    policy: str
    _judgements: dict[str, Judgement] = field(default_factory=dict)  # by the proposal's rollout
    _accepted: dict[str, Problem] = field(default_factory=dict)

    def tasks(self) -> list[tuple[Task, KnownProblem]]:
        """The proposer's tasks in order, group after group. Those of a group have one prompt. Raises Unusable."""
        settings, size = self.config.self_play, self.config.broker.group_size
        found = []
        for group in range(settings.proposals // size):
            example = self.known.example(Random(f"{self.config.run.seed}/self-play/{self.number}/{group}"))
            prompt, group_id = proposing_prompt(settings.prompt, example.prompt), f"g{group:06d}"
            for place in range(size):
                name = f"{group_id}-{place}"
                sampling = self._sampling(name, settings.max_new_tokens)
                found.append((Task(name, group_id, "propose", prompt, sampling, 0, _AS_IT_IS), example))
        return found

    async def run(self, work: RoundWork) -> None:
        """Propose and judge. Raises what sampling and grading raise."""
        tasks = self.tasks()
        with (
            RolloutLog(self.folder / PROPOSALS, self.policy) as proposals,
            RolloutLog(self.folder / "solutions.jsonl", self.policy) as solutions,
            RecordLog(self.folder / "runs.jsonl", "verdict", "output") as log,
        ):
            runs = Runs(log, work.grade)
            await proposals.make([task for task, _ in tasks], work.sample, work.named("proposals"))
            candidates = self._read(tasks, proposals)
            valid = await self._executed(candidates, runs, work)
            await self._solved(valid, solutions, runs, work)
        self._write([task for task, _ in tasks])

    def _sampling(self, name: str, max_new_tokens: int) -> Sampling:
        stream = task_seed(self.config.run.seed, f"self-play/{self.number}/{name}")
        return self.config.generation.sampling.record(Sampling, max_new_tokens=max_new_tokens, seed=stream)

    def _read(self, tasks: Sequence[tuple[Task, KnownProblem]], proposals: RolloutLog) -> dict[str, ProposalCandidate]:
        """The candidates by rollout. A proposal that is near to a known statement is none."""
        found = dict[str, ProposalCandidate]()
        for task, example in tasks:
            with self._judging(task.rollout_id):
                proposal = read_proposal(proposals.of(task).text, self.config.self_play)
                _check_novelty(self.known.statements.find(proposal.statement))
                found[task.rollout_id] = ProposalCandidate(proposal, example)
        return found

    async def _executed(
        self, candidates: Mapping[str, ProposalCandidate], runs: Runs, work: RoundWork
    ) -> dict[str, Valid]:
        """The candidates with a valid reference. It runs on each input, and then on all inputs once more."""
        await runs.make([run for one in candidates.values() for run in one.runs()], work.named("references"))
        found = dict[str, Valid]()
        for name, one in candidates.items():
            with self._judging(name):
                found[name] = Valid.of(one, [runs.output(run) for run in one.runs()])
        await runs.make([one.repeat() for one in found.values()], work.named("references again"))
        for name, valid in found.items():
            with self._judging(name):
                if not runs.is_accepted(valid.repeat()):
                    raise ProposalRejected(Rejection.NOT_DETERMINISTIC, "it printed something else the second time")
                if not work.fits(self._solving(valid.problem)[0]):
                    raise ProposalRejected(Rejection.TOO_LONG, "the statement leaves no room for an answer")
        return {name: valid for name, valid in found.items() if name not in self._judgements}

    async def _solved(self, valid: Mapping[str, Valid], solutions: RolloutLog, runs: Runs, work: RoundWork) -> None:
        """Judge the valid candidates by samples of the solver. Of near proposals the first acceptable one counts."""
        tasks = {name: self._solving(one.problem) for name, one in valid.items()}
        each = {task.rollout_id: task for own in tasks.values() for task in own}  # equal proposals have the same
        await solutions.make([*each.values()], work.sample, work.named("solutions"))
        solved = {
            name: [valid[name].candidate.solving(solutions.of(task).text) for task in own]
            for name, own in tasks.items()
        }
        await runs.make([run for own in solved.values() for one in own for run in one], work.named("runs of solutions"))
        for name, own in solved.items():
            answers = [[runs.output(run) for run in one] for one in own]
            judgement = judged(valid[name].outputs, answers, self.config.self_play.agree)
            with self._judging(name):
                if judgement.reason is None:
                    problem = valid[name].problem
                    _check_novelty(self.known.statements.add(problem.problem_id, problem.prompt))
                    self._accepted[name] = problem
                self._judgements[name] = judgement

    def _solving(self, problem: Problem) -> list[Task]:
        most, name = self.config.generation.sampling.max_new_tokens, problem.problem_id
        return [
            Task(
                *(each, name, name, problem.prompt, self._sampling(each, most), 0, problem.prompt_template),
                starter_code=problem.starter_code,
                languages=problem.languages,
                tests_type=problem.tests_type,
            )
            for each in (f"{name}/{place}" for place in range(self.config.self_play.solutions))
        ]

    @contextmanager
    def _judging(self, name: str) -> Iterator[None]:
        """A ProposalRejected inside is the judgement on the proposal of this rollout."""
        try:
            yield
        except ProposalRejected as error:
            self._judgements[name] = Judgement(error.reason, str(error))

    def _write(self, tasks: Sequence[Task]) -> None:
        save_problems(self.folder / ACCEPTED, self._accepted.values())
        lines = []
        for task in tasks:
            judgement = self._judgements[task.rollout_id]
            record = {
                "rollout_id": task.rollout_id,
                "group_id": task.group_id,
                "problem_id": self._accepted[task.rollout_id].problem_id if judgement.reason is None else "",
                "reason": judgement.reason,
                "detail": judgement.detail,
                "pass_rate": judgement.pass_rate,
                "reward": judgement.reward,
            }
            lines.append(json.dumps(record) + "\n")
        write_whole(self.folder / JUDGED, "".join(lines).encode())


def _check_novelty(near: tuple[str, float] | None) -> None:
    if near is not None:
        raise ProposalRejected(Rejection.NEAR_DUPLICATE, f"of {near[0]}, similarity {near[1]:.3f}")
