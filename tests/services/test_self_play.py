"""Self-play: a round on real sandboxes with scripted answers, the proposer's steps, rounds that go on after a stop."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from rich.console import Console

from nouscoder.config import Config, ConfigError, load_config
from nouscoder.data.problem_index import open_index
from nouscoder.data.problem_parquet import load_problems
from nouscoder.data.problems import save_problems
from nouscoder.demo.policy import CharTokenizer
from nouscoder.domain.curriculum import CurriculumState, ProblemStatistics
from nouscoder.domain.problem import Problem
from nouscoder.domain.rollout import Rollout, Sampling, Task, assemble_rollout
from nouscoder.domain.submission import CallCase, CallTests, Limits, StdinCase, StdinTests, Submission
from nouscoder.domain.tokens import Completion, FinishReason, VersionSpan, int32
from nouscoder.domain.verdict import Verdict
from nouscoder.errors import Unusable
from nouscoder.generation.environments.prompts import counted
from nouscoder.learner.model.synthetic import random_policy, write_policy_folder
from nouscoder.learner.model.weights import load_model
from nouscoder.run import token_limits
from nouscoder.run.folder import RunFolder
from nouscoder.run.view import PlainView, View
from nouscoder.self_play import run as rounds
from nouscoder.self_play.judgement import proposal_text
from nouscoder.self_play.known import Known
from nouscoder.self_play.parts import (
    PROPOSE,
    TRAIN,
    advance_pool,
    part_config,
    part_folder,
    pool_of,
    pool_record,
    write_problems,
)
from nouscoder.self_play.proposer import graded_proposals, train_proposer
from nouscoder.self_play.proposing import room_for_answers
from nouscoder.self_play.round import ACCEPTED, JUDGED, RolloutLog, Round, RoundWork
from nouscoder.verifier.grading.grader import local_grader

FILE = """
[run]
name = "mine"
total_batches = 4
[problems]
train = "train.jsonl"
held_out = "held_out.jsonl"
[policy]
path = "model"
[broker]
group_size = 4
batch_size = 8
[generation]
max_tokens_total = 64
sampling.max_new_tokens = 24
[learner]
threads = 1
steps_per_batch = 2
learning_rate = 0.01
[self_play]
rounds = 2
proposals = 16
solutions = 4
max_new_tokens = 48
prompt = "New:\\n"
"""
LIMITS = Limits(wall_time_s=20.0, cpu_time_s=0.4, memory_bytes=256 * 1024**2, output_bytes=65536, processes=8)
INPUTS = ["1", "2", "3"]


class Stopped(BaseException):
    """The process is killed."""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    # Prompts are counted here, not in a process.
    monkeypatch.setattr(token_limits, "asked_of_models", lambda function, request, more_s: counted(request))

    def problem(name: str, prompt: str) -> Problem:
        tests = StdinTests((StdinCase("1\n", "2\n"),))
        return Problem(name, f"{prompt}\n", tests, limits=LIMITS, text_is_code=True)

    numbers = range(20)
    save_problems(tmp_path / "train.jsonl", [problem(f"p{n:02}", f"Read n. Print n plus {n}.") for n in numbers])
    save_problems(tmp_path / "held_out.jsonl", [problem("hidden", "Read n. Print n times 77.")])
    write_policy_folder(tmp_path / "model", random_policy(0))
    (tmp_path / "mine.toml").write_text(FILE)
    return load_config(tmp_path / "mine.toml", [f'run.root="{tmp_path / "runs"}"'])


def adding(number: object) -> str:
    return f"print(int(input())+{number})"


def proposing(statement: str, program: str, inputs: Sequence[str] = INPUTS) -> str:
    return proposal_text(statement, program, list(inputs))


# The answers of the proposer, in order: four groups of four.
PROPOSALS = [
    proposing("Read n. Print n plus 50.", adding(50)),
    proposing("Read n. Print n plus 51.", adding(52)),
    proposing("Read n. Print n plus 52.", adding(52)),
    proposing("Read n. Print n plus 50.", adding("25*2")),
    "no proposal",
    proposing("Read n. Print n plus 7.", adding(7)),
    proposing("Read n! PRINT n times 77", "print(int(input())*77)"),
    proposing("Read n. Print n plus 53.", adding(53), ["1", "1", "1"]),
    proposing("Fails on one.", "print(1//(int(input())-1))"),
    proposing("Prints the same.", "input()\nprint(5)"),
    proposing("Prints the clock.", "import time\nprint(time.time_ns())"),
    proposing("Prints much.", "print('a'*5000+input())"),
    proposing("Guesses the expected output.", "print('an output that nobody expects')"),
    proposing("Never ends.", "while True: pass"),
    proposing("Forks.", "import os\nwhile True: os.fork()"),
    proposing("Nobody solves this.", adding(1)),
]
REASONS = [
    None,
    "the solvers agree on another answer",
    "always solved",
    "near-duplicate",
    "no proposal",
    "near-duplicate",
    "near-duplicate",
    "too few inputs",
    "the reference fails",
    "the output is always the same",
    "not deterministic",
    "the reference fails",
    "the reference fails",
    "the reference fails",
    "the reference fails",
    "too few solvers agree",
]
# The programs of the solver for each statement.
SOLUTIONS = {
    "Read n. Print n plus 50.\n": [adding(50), "print(int(input())+int('50'))", adding(49), "pritn(1)"],
    "Read n. Print n plus 51.\n": [adding(51), adding(51), adding(51), adding(52)],
    "Read n. Print n plus 52.\n": [adding(52)] * 4,
    "Nobody solves this.\n": [adding(1), "print(input())", "", "import os\nos._exit(3)"],
}


def rollout_of(task: Task, text: str) -> Rollout:
    tokenizer = CharTokenizer()
    ids = tokenizer.encode(text[:20] or " ")
    completion = Completion(
        int32(ids), memoryview(array("f", [-4.6] * len(ids))), (VersionSpan(0, len(ids)),), FinishReason.STOP
    )
    return assemble_rollout(task, [int32(tokenizer.encode_prompt("New:\n")), completion], text)


class Policy:
    """Answers tasks by the lists above, or in place of endless programs by one that fails. Killed after `most`."""

    def __init__(self, most: int = 10**6, *, endless: bool = False) -> None:
        self.most = most
        self._endless = endless
        self.sampled: list[str] = []

    async def __call__(self, tasks: Sequence[Task], took: Callable[[Rollout], object]) -> None:
        for task in tasks:
            if len(self.sampled) == self.most:
                raise Stopped
            self.sampled.append(task.rollout_id)
            took(rollout_of(task, self._answer(task)))

    def _answer(self, task: Task) -> str:
        if task.problem_id == "propose":
            assert (task.prompt, task.prompt_template) == ("New:\n", "{prompt}")
            group, _, place = task.rollout_id[1:].partition("-")
            answer = PROPOSALS[4 * int(group) + int(place)]
            return answer if self._endless else answer.replace("while True", "assert 0 #")
        return SOLUTIONS[task.prompt][int(task.rollout_id.partition("/")[2])]


class Grades:
    """The real verifier. It is killed after `most` verdicts."""

    def __init__(self, grader: Any, most: int = 10**6) -> None:
        self._grader = grader
        self.most = most
        self.graded: list[str] = []

    async def __call__(self, submission: Submission, name: str) -> Verdict:
        if len(self.graded) >= self.most:
            raise Stopped
        self.graded.append(name)
        verdict: Verdict = await self._grader.grade(submission)
        return verdict


@asynccontextmanager
async def opened(config: Config) -> AsyncIterator[tuple[Any, Callable[[Path], Round]]]:
    """The real grader, and a maker of the round in a folder."""
    async with local_grader(config.verifier) as grader:
        with closing(open_index(config)) as index:
            yield grader, lambda folder: Round(config, 1, folder, Known(config, index, [], [], 0.8), "weights")


def judgements(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / JUDGED).read_text().splitlines()]


async def test_each_proposal_is_judged_by_what_programs_print(config: Config, tmp_path: Path) -> None:
    folder = tmp_path / "round"
    async with opened(config) as (grader, make):
        await make(folder).run(RoundWork(Policy(endless=True), Grades(grader), lambda task: True))
    found = judgements(folder)
    assert [one["reason"] for one in found] == REASONS
    assert [one["reward"] for one in found] == [1.0] + [0.0] * 15, "two of four samples agree: 4 * 0.5 * 0.5"
    (accepted,) = load_problems(folder / ACCEPTED)
    assert accepted.prompt == "Read n. Print n plus 50.\n"
    assert accepted.tests == StdinTests(tuple(StdinCase(f"{n}\n", f"{n + 50}\n") for n in (1, 2, 3)))
    assert (accepted.limits, accepted.text_is_code) == (LIMITS, True), "the rules are those of the example"
    assert found[0]["problem_id"] == accepted.problem_id


@pytest.mark.parametrize(("samples", "verdicts"), [(5, None), (None, 9), (19, None), (None, -3)])
async def test_a_killed_round_goes_on_and_does_nothing_twice(
    config: Config, tmp_path: Path, samples: int | None, verdicts: int | None
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    async with opened(config) as (grader, make):
        undisturbed, graded = Policy(), Grades(grader)
        await make(whole).run(RoundWork(undisturbed, graded, lambda task: True))
        most = range(len(graded.graded))[verdicts] if verdicts else 10**6
        first, second = Policy(samples or 10**6), Policy()
        grades, again = Grades(grader, most), Grades(grader)
        with pytest.raises(Stopped):
            await make(killed).run(RoundWork(first, grades, lambda task: True))
        assert not (killed / JUDGED).exists()
        with (killed / "runs.jsonl").open("a") as log:
            log.write('{"key": "torn')
        await make(killed).run(RoundWork(second, again, lambda task: True))
    assert sorted([*first.sampled, *second.sampled]) == sorted(undisturbed.sampled)
    assert len(grades.graded) + len(again.graded) < len(graded.graded) + 16, "those at work are run again"
    logged = [json.loads(line)["key"] for line in (killed / "runs.jsonl").read_text().splitlines()]
    assert len(set(logged)) == len(logged)
    for name in (JUDGED, ACCEPTED):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


async def test_a_statement_that_leaves_no_room_is_too_long(config: Config, tmp_path: Path) -> None:
    policy = Policy()
    async with opened(config) as (grader, make):
        await make(tmp_path / "round").run(RoundWork(policy, Grades(grader), lambda task: "plus 50" not in task.prompt))
    assert judgements(tmp_path / "round")[0]["reason"] == "too long"
    fits = room_for_answers(config)
    task = Task("t", "t", "t", "a" * 39, Sampling(max_new_tokens=24))
    assert fits(task), "a bos, 39 characters and 24 tokens are 64"
    for prompt in ("a" * 40, "\u00e9"):
        assert not fits(Task("t", "t", "t", prompt, task.sampling)), "too long, or not in the vocabulary"


def test_examples_are_training_problems_or_of_the_pool_and_never_held_out(config: Config) -> None:
    pooled = Problem("pooled", "Of the pool.\n", StdinTests((StdinCase("1", "1"),)))
    retired = Problem("retired", "Retired.\n", pooled.tests)
    with closing(open_index(config)) as index:
        known = Known(config, index, [pooled, retired], ["pooled"], 0.8)
        prompts = {known.example(Random(seed)).prompt for seed in range(150)}
        assert prompts == {f"Read n. Print n plus {n}.\n" for n in range(20)} | {"Of the pool.\n"}
        assert known.statements.find("Retired.") is not None, "what was retired cannot come back"
        assert known.statements.find("Read n. Print n times 77.") is not None, "a held-out problem is no proposal"
        assert known.statements.find("Something else that is new.") is None


def test_only_problems_with_inputs_and_outputs_are_examples(config: Config, tmp_path: Path) -> None:
    calls = CallTests("f", (CallCase((1,), {}, 2),))
    save_problems(tmp_path / "train.jsonl", [Problem("call", "f", calls)])
    with closing(open_index(config)) as index, pytest.raises(Unusable, match="no stdin tests"):
        Known(config, index, [], [], 0.8).example(Random(0))


def proposed(config: Config, rewards: Sequence[float]) -> Config:
    """The part of a round whose proposals "good" and "bad" have these rewards in turn."""
    part = part_config(rounds.self_play_config(config), 1, PROPOSE, 0, policy=config.policy.path)
    part.run.folder.mkdir(parents=True)
    rewarded = {f"g{place // 4:06d}-{place % 4}": reward for place, reward in enumerate(rewards)}
    tasks = [Task(name, name.partition("-")[0], "propose", "New:\n", Sampling()) for name in rewarded]

    async def sample(tasks: Sequence[Task], took: Callable[[Rollout], object]) -> None:
        for task in tasks:
            took(rollout_of(task, "good" if rewarded[task.rollout_id] else "bad!"))

    with RolloutLog(part.run.folder / "proposals.jsonl", "weights") as log:
        asyncio.run(log.make(tasks, sample, lambda done, total: None))
    lines = [json.dumps({"rollout_id": name, "reward": reward}) for name, reward in rewarded.items()]
    (part.run.folder / JUDGED).write_text("\n".join(lines) + "\n")
    return part


@pytest.fixture
def one_thread() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("one_thread")
def test_the_proposer_learns_what_was_rewarded_and_the_same_each_time(config: Config, tmp_path: Path) -> None:
    part = proposed(config, [1.0, 0.0, 0.75, 0.0] * 4)
    batch = graded_proposals(part.run.folder)
    assert [graded.reward for graded in batch.rollouts[:4]] == [1.0, 0.0, 0.75, 0.0]
    records = train_proposer(part, batch, tmp_path / "after")
    assert [record["step"] for record in records] == [1, 2]
    assert records[0]["reward"] == pytest.approx(0.4375)
    before, after = (
        logprob(folder, "good") - logprob(folder, "bad!") for folder in (tmp_path / "model", tmp_path / "after")
    )
    assert after > before + 0.01
    train_proposer(part, batch, tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "after/model.safetensors").read_bytes()


@pytest.mark.usefixtures("one_thread")
def test_proposals_of_equal_reward_teach_nothing(config: Config, tmp_path: Path) -> None:
    part = proposed(config, [0.0] * 16)
    train_proposer(part, graded_proposals(part.run.folder), tmp_path / "after")
    assert logprob(tmp_path / "after", "bad!") == pytest.approx(logprob(tmp_path / "model", "bad!"), abs=1e-6)


@torch.no_grad()
def logprob(folder: Path, text: str) -> float:
    tokenizer, model = CharTokenizer(), load_model(folder)
    model.set_attn_implementation("sdpa")
    prompt, answer = tokenizer.encode_prompt("New:\n"), tokenizer.encode(text)
    scores = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return float(scores.gather(1, torch.tensor(answer)[:, None]).sum())


def accept(config: Config, number: int, *names: str) -> None:
    """A round that accepted these problems at a pass rate of a half."""
    folder = part_folder(config, number, PROPOSE)
    folder.mkdir(parents=True)
    tests = StdinTests((StdinCase("1\n", "2\n"), StdinCase("2\n", "3\n")))
    save_problems(folder / ACCEPTED, [Problem(name, f"Statement of {name}.\n", tests) for name in names])
    lines = [{"problem_id": name, "reason": None, "pass_rate": 0.5, "reward": 1.0} for name in names]
    lines.append({"problem_id": "", "reason": "too long", "pass_rate": None, "reward": 0.0})
    (folder / JUDGED).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_pool_of_a_round_follows_from_the_files_of_the_rounds_before(config: Config) -> None:
    whole = rounds.self_play_config(config)
    accept(whole, 1, "a", "b", "c")
    advance_pool(whole, 1)
    assert [one.problem_id for one in pool_of(whole, 1)] == ["a", "b", "c"]
    training = part_folder(whole, 1, TRAIN)
    training.mkdir()
    found = (ProblemStatistics("a", 2, sampled=8, accepted=8), ProblemStatistics("b", 1, sampled=4, accepted=1))
    (training / "curriculum.json").write_text(json.dumps(CurriculumState(3, found).to_json()))
    accept(whole, 2, "d")
    advance_pool(whole, 2)
    assert pool_record(whole, 2)["retired"] == {"a": "solved"}
    assert [(one.problem_id, one.pass_rate, one.age) for one in pool_of(whole, 2)] == [
        ("b", 0.25, 1),
        ("c", 0.5, 1),
        ("d", 0.5, 0),
    ]
    with closing(open_index(whole)) as index:
        write_problems(whole, 2, index)
    names = [problem.problem_id for problem in load_problems(part_folder(whole, 2, PROPOSE) / "problems.jsonl")]
    assert names[:3] == ["b", "c", "d"]
    assert len(names) == 6, "as many seed problems, of which there are 20"
    assert set(names[3:]) <= {f"p{n:02}" for n in range(20)}


def test_without_an_accepted_problem_a_round_trains_on_all_seed_problems(config: Config) -> None:
    whole = rounds.self_play_config(config)
    accept(whole, 1)
    advance_pool(whole, 1)
    with closing(open_index(whole)) as index:
        write_problems(whole, 1, index)
    assert len(load_problems(part_folder(whole, 1, PROPOSE) / "problems.jsonl")) == 20


class Imitation:
    """In place of services: a round that accepts one problem, and a training that publishes its first policy again.

    `stop` names the step that is killed.
    """

    def __init__(self) -> None:
        self.stop = ""
        self.done: list[str] = []

    def step(self, name: str) -> None:
        if name == self.stop:
            raise Stopped
        self.done.append(name)

    async def propose(self, folder: RunFolder, config: Config, number: int, known: Known, view: View) -> None:
        self.step(f"propose {number}")
        known.statements.add("x", "x")
        tests = StdinTests((StdinCase("1\n", "2\n"),))
        problem = Problem(f"new-{number}", f"Statement {number}.\n", tests)
        save_problems(folder.path / ACCEPTED, [problem])
        line = {"problem_id": problem.problem_id, "reason": None, "pass_rate": 0.5, "reward": 1.0}
        (folder.path / JUDGED).write_text(json.dumps(line) + "\n")

    def train_proposer(self, config: Config, batch: object, to: Path) -> None:
        self.step(f"proposer of {config.run.name}")
        write_policy_folder(to, load_model(config.policy.path))

    async def run_loop(self, folder: RunFolder, config: Config, view: View, started_s: float) -> None:
        self.step(f"train {config.run.name}")
        published = folder.path / "policies" / "00000002"
        write_policy_folder(published, load_model(config.policy.path))
        evaluation = {"pass_at_1": 0.5, "standard_error": 0.1, "num_problems": 1, "num_rollouts": 1}
        for when in ("before", "after"):
            folder.write_json(f"evaluation_{when}.json", evaluation)
        folder.write_json("summary.json", {"steps": 4})


@pytest.fixture
def imitation(monkeypatch: pytest.MonkeyPatch) -> Imitation:
    made = Imitation()
    monkeypatch.setattr(rounds, "propose", made.propose)
    monkeypatch.setattr(rounds, "train_proposer", made.train_proposer)
    monkeypatch.setattr(rounds, "graded_proposals", lambda folder: None)
    monkeypatch.setattr(rounds, "run_loop", made.run_loop)
    return made


async def go(config: Config, *, resume: bool = False) -> dict[str, Any]:
    return await rounds.run_rounds(config, PlainView(Console(quiet=True)), resume=resume)


STEPS = [
    f"{step} mine-self-play/0{number}-{part}" if part else f"{step} {number}"
    for number in (1, 2)
    for step, part in (("propose", ""), ("proposer of", PROPOSE), ("train", TRAIN))
]


@pytest.mark.parametrize("stop", ["", *STEPS])
async def test_rounds_go_on_after_a_stop_at_any_step_and_do_none_twice(
    config: Config, imitation: Imitation, stop: str
) -> None:
    imitation.stop = stop
    if stop:
        with pytest.raises(Stopped):
            await go(config)
        imitation.stop = ""
    result = await go(config, resume=bool(stop))
    assert imitation.done == STEPS
    assert (result["proposals"], result["accepted"], result["accepted_share"]) == (2, 2, 1.0)
    assert result["steps"] == 8
    assert [one["pool"] for one in result["rounds"]] == [1, 2]
    folder = config.run.root / "mine-self-play"
    assert result["policy"] == str(folder / "policies/02")
    assert (folder / "policies/02/model.safetensors").exists()
    names = [one.problem_id for one in load_problems(folder / "02-propose/problems.jsonl")]
    assert names[:2] == ["new-1", "new-2"]
    trained = load_config(folder / "02-train/config.toml")
    assert trained.policy.path == folder / "02-propose/policy"
    assert trained.run.total_batches == 2
    assert trained.problems.held_out == config.problems.held_out
    assert await go(config, resume=True) == result, "a finished self-play does nothing"
    assert imitation.done == STEPS


async def test_without_proposals_the_same_rounds_train_on_the_seed_problems(
    config: Config, imitation: Imitation, tmp_path: Path
) -> None:
    alone = load_config(tmp_path / "mine.toml", [f'run.root="{tmp_path / "runs"}"', "self_play.proposals=0"])
    result = await go(alone)
    assert imitation.done == [step for step in STEPS if step.startswith("train")]
    assert (result["proposals"], result["accepted_share"], result["proposer_steps"]) == (0, None, 0)
    trained = load_config(config.run.root / "mine-self-play/01-train/config.toml")
    assert trained.problems.train == tmp_path / "train.jsonl"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("run.services=external", "self-play starts its services itself"),
        ("run.total_batches=5", "run.total_batches 5 is no multiple of self_play.rounds 2"),
        ("run.total_batches=0", "run.total_batches 0 is no multiple"),
        ("self_play.proposals=18", "self_play.proposals 18 is no multiple of broker.group_size 4"),
        ("self_play.proposer_steps=5", "self_play.proposer_steps 5 is more than the 4 groups of proposals"),
        ("self_play.max_new_tokens=64", "self_play.max_new_tokens 64 must be less than generation.max_tokens_total 64"),
        ("problems.held_out_share=0.5", "self-play needs a file problems.held_out"),
        ('generation.environment.kind="feedback"', "set generation.environment.kind to single_turn"),
        ('broker.curriculum={name="priorities"}', "set broker.curriculum.name"),
        ('plan.stages=[{name="one"}]', "this configuration is a plan"),
    ],
)
async def test_what_cannot_be_is_said_before_a_folder_is_made(
    config: Config, tmp_path: Path, change: str, sentence: str
) -> None:
    wrong = load_config(tmp_path / "mine.toml", [f'run.root="{tmp_path / "runs"}"', change])
    with pytest.raises(ConfigError, match=sentence):
        await go(wrong)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("change", ["self_play.agree=8", "self_play.max_inputs=2"])
def test_a_section_that_contradicts_itself(tmp_path: Path, config: Config, change: str) -> None:
    with pytest.raises(ConfigError, match="must"):
        load_config(tmp_path / "mine.toml", [change])
