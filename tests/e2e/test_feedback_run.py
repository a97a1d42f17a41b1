"""Runs with and without feedback, with real services: three turns beat one turn at equal training tokens.

A statement gives a number of three digits and leaves open which of three operations is meant. The tests decide it, and
feedback from the public test shows it, so a policy with one turn solves a third of the problems at best. The policy is
taught to try any operation in each of three turns, with mistakes.

The comparison is fair in this sense: both runs begin with that policy, have the same training problems and the same
settings except `turns`, and train until they have trained on about as many sampled tokens. Each policy is evaluated on
the same held-out problems with the number of turns of its training, and also with that of the other run.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from tests.e2e.small_runs import trained

from nouscoder.data.problems import save_problems
from nouscoder.demo.policy import EOS_ID, CharTokenizer, PolicySize, build_policy, save_policy
from nouscoder.demo.warmstart import WarmStartBudget, teach_batches
from nouscoder.domain.conversation import feedback_on
from nouscoder.domain.problem import Problem
from nouscoder.domain.rollout import Rollout
from nouscoder.domain.submission import Limits, StdinCase, StdinTests
from nouscoder.domain.verdict import FirstFailure, Verdict, VerdictKind
from nouscoder.learner.state.saved_batches import SavedBatches
from nouscoder.run.export import export
from nouscoder.sft.rollouts import demonstration

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
LIMITS = Limits(wall_time_s=10.0, cpu_time_s=5.0, memory_bytes=256 << 20, output_bytes=1 << 16, processes=8)
NUM_TRAIN, NUM_HELD_OUT = 400, 200
GROUP_SIZE, BATCH_SIZE = 8, 64
THREE_TURNS_BATCHES = 8
CLEAN_STEPS, NOISY_STEPS = 110, 30
MISTAKES = 0.2  # share of the programs that the policy is taught without their last character
ENCODE = CharTokenizer().encode

RUN = f"""
[problems]
train = "train.jsonl"
held_out = "held_out.jsonl"
[broker]
group_size = {GROUP_SIZE}
batch_size = {BATCH_SIZE}
drop_zero_variance = false
[generation]
max_running = {BATCH_SIZE}
max_tokens_total = 400
[generation.sampling]
max_new_tokens = 96
[generation.environment]
kind = "feedback"
[learner]
steps_per_batch = 2
learning_rate = 1e-4
adam_betas = [0.9, 0.95]
keep_batches = 1000
[learner.schedule]
warmup_steps = 4
"""


def program(operation: str, a: int) -> str:
    return f"print(int(input()){operation}{a})"


def problem(operation: str, a: int, random: Random) -> Problem:
    def test(n: int) -> StdinTests:
        return StdinTests((StdinCase(f"{n}\n", f"{OPERATIONS[operation](n, a)}\n"),))

    public, hidden = map(test, random.sample(range(100, 1000), 2))
    return Problem(f"{operation}{a}", f"n ? {a}\n", hidden, LIMITS, text_is_code=True, public_tests=public)


def feedback(tried: str, meant: str, a: int, n: int) -> str:
    """What the environment replies to the program with operation `tried`."""
    got, wanted = (f"{OPERATIONS[operation](n, a)}\n" for operation in (tried, meant))
    failure = FirstFailure(0, VerdictKind.WRONG_ANSWER, f"{n}\n", wanted, got)
    return feedback_on(Verdict(VerdictKind.WRONG_ANSWER, 0, 1, 1, 0.0, "", first_failure=failure), 600)


def demonstrated(random: Random, mistakes: float) -> Iterator[Rollout]:
    """The turns of a rollout, each after the tokens before it. Each turn tries any operation; a mistake ends it."""
    a, n, meant = random.randrange(100, 1000), random.randrange(100, 1000), random.choice([*OPERATIONS])
    tokens = CharTokenizer().encode_prompt(f"n ? {a}\n")
    for _ in range(3):
        tried = random.choice([*OPERATIONS])
        written = program(tried, a)
        is_mistake = random.random() < mistakes
        answer = [*ENCODE(written[:-1] if is_mistake else written), EOS_ID]
        yield demonstration(tokens, answer)
        if tried == meant or is_mistake:
            return
        tokens = [*tokens, *answer, *ENCODE(f"\n{feedback(tried, meant, a, n)}\n")]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that was taught to try any operation in each of three turns. All runs begin with it."""
    folder, random = tmp_path_factory.mktemp("taught"), Random(0)
    save_policy(build_policy(seed=0, size=PolicySize(max_positions=512)), folder / "first")
    batches = [
        [example for _ in range(10) for example in demonstrated(random, MISTAKES if step >= CLEAN_STEPS else 0.0)]
        for step in range(CLEAN_STEPS + NOISY_STEPS)
    ]
    teach_batches(folder / "first", folder / "policy", batches, WarmStartBudget(), work=folder / "work")
    return folder / "policy"


class Comparison:
    """The runs of one seed, in a folder with its problems. All begin with the same policy."""

    def __init__(self, folder: Path, policy: Path, seed: int) -> None:
        self._folder = folder
        self._policy = policy
        self._seed = seed
        random = Random(seed)
        every = [
            problem(random.choice([*OPERATIONS]), a, random)
            for a in random.sample(range(100, 1000), NUM_TRAIN + NUM_HELD_OUT)
        ]
        save_problems(folder / "train.jsonl", every[:NUM_TRAIN])
        save_problems(folder / "held_out.jsonl", every[NUM_TRAIN:])

    def with_turns(self, turns: int, num_batches: int) -> tuple[float, float]:
        """Train with so many turns. Returns pass@1 before and after with as many turns."""
        return self._run(f"turns-{turns}", self._policy, turns, num_batches)

    def evaluated(self, trained_turns: int, turns: int) -> float:
        """pass@1 of the policy trained with `trained_turns`, evaluated with `turns`."""
        policy = self._folder / f"policy-{trained_turns}"
        export(self._folder / "runs" / f"turns-{trained_turns}", policy, "last")
        return self._run(f"turns-{trained_turns}-evaluated-with-{turns}", policy, turns, 0)[1]

    def num_tokens(self, turns: int, num_batches: int) -> int:
        """The number of sampled tokens in the loss of the run with so many turns."""
        saved = SavedBatches(self._folder / "runs" / f"turns-{turns}" / "batches", keep=1000)
        rollouts = [graded.rollout for number in range(num_batches) for graded in saved.load(number).rollouts]
        return sum(rollout.num_sampled_tokens for rollout in rollouts)

    def _run(self, name: str, policy: Path, turns: int, num_batches: int) -> tuple[float, float]:
        of_run = (f"run.seed={self._seed}", f"run.total_batches={num_batches}")
        of_parts = (f'policy.path="{policy}"', f"generation.environment.turns={turns}")
        return trained(self._folder, name, RUN, *of_run, *of_parts)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_three_turns_with_feedback_beat_one_turn_at_equal_training_tokens(
    tmp_path: Path, policy: Path, seed: int
) -> None:
    runs = Comparison(tmp_path, policy, seed)
    three_before, three_after = runs.with_turns(3, THREE_TURNS_BATCHES)
    three_tokens = runs.num_tokens(3, THREE_TURNS_BATCHES)
    one_turn_batches = -(-three_tokens // (BATCH_SIZE * len(program("+", 100))))
    one_before, one_after = runs.with_turns(1, one_turn_batches)
    one_tokens = runs.num_tokens(1, one_turn_batches)
    print(f"seed {seed}: sampled tokens trained on: three turns {three_tokens}, one turn {one_tokens}", flush=True)
    runs.evaluated(3, 1)
    runs.evaluated(1, 3)
    assert one_tokens >= 0.95 * three_tokens
    assert three_after >= three_before, "training with feedback has not made the policy worse"
    assert one_after >= one_before - 0.05, "training with one turn has not broken the policy"
    assert three_after >= one_after + 0.05
