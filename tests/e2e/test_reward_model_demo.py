"""A reward model on the demo's data: pairs from graded samples of the warm-started policy, training, best of 8."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM
from typer.testing import CliRunner

from nouscoder.cli.app import app
from nouscoder.config import Config, load_config
from nouscoder.config.recipe import recipe_path
from nouscoder.data.problem_parquet import load_problems
from nouscoder.data.problems import save_problems
from nouscoder.demo.policy import EOS_ID, PAD_ID, CharTokenizer
from nouscoder.demo.prepare import prepare
from nouscoder.domain.problem import Problem
from nouscoder.evaluation.evaluate import EvaluationRequest, evaluate
from nouscoder.evaluation.samples import SamplingSettings
from nouscoder.policy_folder.pretrained import load_pretrained

NUM_PROBLEMS, NUM_HELD_OUT, NUM_SAMPLES = 160, 100, 8
MOST_TOKENS = 96
_AT_ONCE = 16  # problems


@torch.no_grad()
def sampled(policy: Any, problems: Sequence[Problem], seed: int) -> list[tuple[str, str]]:
    """(problem id, program) of NUM_SAMPLES programs of each problem, at temperature 1."""
    tokenizer, found = CharTokenizer(), list[tuple[str, str]]()
    torch.manual_seed(seed)
    for first in range(0, len(problems), _AT_ONCE):
        some = problems[first : first + _AT_ONCE]
        prompts = [tokenizer.encode_prompt(problem.prompt) for problem in some]
        width = max(map(len, prompts))
        ids = torch.tensor([[PAD_ID] * (width - len(prompt)) + prompt for prompt in prompts])
        answers = policy.generate(
            input_ids=ids,
            attention_mask=(ids != PAD_ID).long(),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            num_return_sequences=NUM_SAMPLES,
            max_new_tokens=MOST_TOKENS,
            eos_token_id=EOS_ID,
            pad_token_id=PAD_ID,
        )[:, width:].tolist()
        found += [(some[at // NUM_SAMPLES].problem_id, tokenizer.decode(tokens)) for at, tokens in enumerate(answers)]
    return found


def graded(problems: Path, policy: Any, seed: int, folder: Path, config: Config) -> Path:
    """The folder of an evaluation of the policy's samples, in which every test was run."""
    lines = [{"task_id": name, "solution": code} for name, code in sampled(policy, load_problems(problems), seed)]
    given = folder.with_suffix(".jsonl")
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluate(EvaluationRequest(problems, folder, SamplingSettings(""), samples=given, all_tests=True), config)
    return folder


def command(*words: object) -> str:
    """The output of a command of nouscoder."""
    answer = CliRunner().invoke(app, [str(word) for word in words])
    assert answer.exit_code == 0, (answer.output, answer.exception)
    return answer.stdout


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_best_of_eight_by_a_reward_model_beats_pass_at_1(tmp_path: Path) -> None:
    """On held-out problems, whose statements were in no pair. Nearly all wrong programs of the demo fail every test.

    So the rejected programs may have any score here; AceCoder's own rule, s_j > 0, leaves out those that pass none.
    """
    config = load_config(recipe_path("demo"), [f'run.root="{tmp_path}"', 'run.name="demo"'])
    config.run.folder.mkdir()
    prepare(config, lambda done, total, loss: None)
    train, held_out = tmp_path / "some.jsonl", tmp_path / "held_out.jsonl"
    save_problems(train, load_problems(config.in_run_folder(config.problems.train))[:NUM_PROBLEMS])
    save_problems(held_out, load_problems(config.in_run_folder(config.problems.held_out))[:NUM_HELD_OUT])
    folder = config.in_run_folder(config.policy.path)
    policy = load_pretrained(Qwen3ForCausalLM, folder, attn_implementation="sdpa", dtype=torch.float32)
    policy.eval()
    seen = graded(train, policy, 1, tmp_path / "seen", config)
    unseen = graded(held_out, policy, 2, tmp_path / "unseen", config)
    pairs, model = tmp_path / "pairs.jsonl", tmp_path / "reward-model"
    print(command("reward-model", "pairs", train, seen, "--out", tmp_path / "acecoder.jsonl"))
    print(command("reward-model", "pairs", train, seen, "--out", pairs, "--rejected-above", -1, "--at-most", 12))
    options = ["--learning-rate", 1e-3, "--epochs", 2, "--pairs-per-step", 32]
    print(command("reward-model", "train", folder, pairs, "--out", model, *options))
    best = json.loads(command("reward-model", "eval", model, "--problems", held_out, "--evaluation", unseen, "--json"))[
        "best_of_n"
    ]
    print(json.dumps(best, indent=1))
    assert best["gain"]["value"] > 3 * best["gain"]["standard_error"]
    assert best["best_of_n"]["value"] <= best["pass_at_n"]["value"]
