"""A run with the environment interpreter and real services: the policy learns to call Python.

The problems are products of two numbers of four digits, and the answer is graded as text. A small policy that was
taught the answers themselves solves none. A policy that was taught to call the interpreter, with mistakes in most of
its calls, solves many more after a few batches of reinforcement learning. The other one gets no reward to learn from.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from tests.e2e.small_runs import trained

from nouscoder.data.problems import save_problems
from nouscoder.demo.policy import EOS_ID, CharTokenizer, build_policy, save_policy
from nouscoder.demo.warmstart import WarmStartBudget, teach_batches
from nouscoder.domain.problem import Problem
from nouscoder.domain.rollout import Rollout
from nouscoder.domain.submission import MathCase, MathTests
from nouscoder.learner.state.saved_batches import SavedBatches
from nouscoder.sft.rollouts import demonstration

NUM_TRAIN, NUM_HELD_OUT = 200, 80
NUM_BATCHES, GROUPS, GROUP_SIZE = 6, 4, 8
CLEAN_STEPS, NOISY_STEPS = 60, 30
MISTAKES = 0.6  # share of the calls that the policy is taught wrong
ENCODE = CharTokenizer().encode

RUN = f"""
[problems]
train = "train.jsonl"
held_out = "held_out.jsonl"
[policy]
path = "policy"
[broker]
group_size = {GROUP_SIZE}
batch_size = {GROUPS * GROUP_SIZE}
drop_zero_variance = false
[generation]
max_running = 32
max_tokens_total = 160
[generation.sampling]
max_new_tokens = 72
[learner]
steps_per_batch = 2
learning_rate = 3e-4
adam_betas = [0.9, 0.95]
keep_batches = 100
"""
INTERPRETER = """
[broker.reward]
rule = "r1_code_interpreter"
[generation.environment]
kind = "interpreter"
calls = 2
[verifier.tools]
sessions = 4
"""


def pairs(random: Random) -> tuple[int, int]:
    """Two factors of four digits whose product has eight."""
    return random.randrange(3200, 10000), random.randrange(3200, 10000)


def problem(a: int, b: int) -> Problem:
    return Problem(f"{a}x{b}", f"{a}*{b}\n", MathTests((MathCase(str(a * b)),)), text_is_code=True)


def taught(
    random: Random,
    *,
    mistakes: float,
    call_form: str = "<python>{}</python>",
    reply_form: str = "\n<output>\n{}\n</output>\n",
) -> Iterator[Rollout]:
    """The two turns of a rollout with one call of a tool, each after the tokens before it."""
    a, b = pairs(random)
    prompt, answer = CharTokenizer().encode_prompt(f"{a}*{b}\n"), [*ENCODE(str(a * b)), EOS_ID]
    right = call_form.format(f"{a}*{b}")
    cut = call_form.partition("{}")[0] + f"{a}*{b}"
    wrong = (call_form.format(f"{a}+{b}"), call_form.format(f"{a}*{a}"), cut, str(a * b + 1))
    call = random.choice(wrong) if random.random() < mistakes else right
    yield demonstration(prompt, [*ENCODE(call), EOS_ID])
    yield demonstration([*prompt, *ENCODE(right), EOS_ID, *ENCODE(reply_form.format(a * b))], answer)


def teach(folder: Path, seed: int, *, to_call: bool) -> None:
    """Write a policy that was taught to call the interpreter, or the answers, in as many steps."""
    work, random = folder.with_name("teaching"), Random(seed)
    save_policy(build_policy(seed=seed), work / "first")
    batches = []
    for step in range(CLEAN_STEPS + NOISY_STEPS):
        mistakes = MISTAKES if step >= CLEAN_STEPS else 0.0
        calls = [example for _ in range(16) for example in taught(random, mistakes=mistakes)]
        batches.append(calls if to_call else [*direct(random)])
    teach_batches(work / "first", folder, batches, WarmStartBudget(), work=work)


def direct(random: Random) -> Iterator[Rollout]:
    for _ in range(32):
        a, b = pairs(random)
        yield demonstration(CharTokenizer().encode_prompt(f"{a}*{b}\n"), [*ENCODE(str(a * b)), EOS_ID])


def save_products(folder: Path, seed: int) -> None:
    random = Random(seed + 1)
    save_problems(folder / "train.jsonl", [problem(*pairs(random)) for _ in range(NUM_TRAIN)])
    save_problems(folder / "held_out.jsonl", [problem(*pairs(random)) for _ in range(NUM_HELD_OUT)])


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_interpreter_solves_what_the_policy_cannot_compute(tmp_path: Path, seed: int) -> None:
    torch.set_num_threads(1)
    with_calls, without_calls = tmp_path / "calls", tmp_path / "direct"
    teach(with_calls / "policy", seed, to_call=True)
    save_products(with_calls, seed)
    values = (f"run.total_batches={NUM_BATCHES}", f"run.seed={seed}")
    before, after = trained(with_calls, "calls", RUN + INTERPRETER, *values)
    assert after >= before + 0.1

    saved = SavedBatches(with_calls / "runs" / "calls" / "batches", keep=100)
    rollouts = [one.rollout for number in range(NUM_BATCHES) for one in saved.load(number).rollouts]
    assert {tuple(segment.is_sampled for segment in rollout.segments) for rollout in rollouts} >= {
        (False, True),
        (False, True, False, True),
    }

    teach(without_calls / "policy", seed, to_call=False)
    save_products(without_calls, seed)
    _, without = trained(without_calls, "direct", RUN, "run.total_batches=0", f"run.seed={seed}")
    assert without <= 0.05
    assert after >= without + 0.2
