"""Trains a model with TRL's GRPOTrainer, and rewards from the grading service.

    .venv/bin/nouscoder serve verifier --http 127.0.0.1:8080 --grpc 127.0.0.1:0
    pip install '.[client]' trl
    python examples/trl_reward.py MODEL --url http://127.0.0.1:8080

MODEL is a folder as transformers saves it, or the name of a model on a hub. Before it trains, the program grades a
right and a wrong answer. Without MODEL it only does that, and does not need trl.

The reward is 1 for a program that passes every test and -1 for another one. It is None when the service failed: TRL
leaves such a completion out, so that a failure of the infrastructure is never a reward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from nouscoder.client import Client, GradingFailed
from nouscoder.client.adapters.trl import reward_fn

PROBLEMS: Sequence[tuple[str, dict[str, Any]]] = [
    ("Read two integers and print their sum.", {"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10\n"]}),
    ("Read a word and print it backwards.", {"inputs": ["abc\n", "no\n"], "outputs": ["cba\n", "on\n"]}),
]
ASKS = "Answer with a Python program in a ```python block."
RIGHT = "```python\nprint(sum(map(int, input().split())))\n```"
WRONG = "```python\nprint(3)\n```"


def check(code_reward: Callable[..., list[float | None]]) -> list[float | None]:
    """The rewards of a right and a wrong answer to the first problem, asked for as TRL does."""
    prompt, tests = PROBLEMS[0]
    return code_reward(prompts=[prompt] * 2, completions=[RIGHT, WRONG], tests=[tests] * 2)


def train(model: str, code_reward: Callable[..., list[float | None]], steps: int, folder: str) -> list[float]:
    """Train the model on the CPU and save it to `folder`. Returns the mean reward of each step."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rows = [{"prompt": f"{prompt} {ASKS}", "tests": tests} for prompt, tests in PROBLEMS]
    settings = GRPOConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=256,
        learning_rate=1e-6,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
    )
    trainer = GRPOTrainer(model=model, reward_funcs=[code_reward], args=settings, train_dataset=Dataset.from_list(rows))
    trainer.train()
    trainer.save_model(folder)
    return [line["reward"] for line in trainer.state.log_history if "reward" in line]


def main() -> None:
    """Check the rewards, then train."""
    parser = argparse.ArgumentParser(description="TRL with rewards from the grading service")
    parser.add_argument("model", nargs="?", help="model to train; without it only the rewards are checked")
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="the grading service")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="trained", help="folder of the trained model")
    given = parser.parse_args()
    with Client(given.url) as client:
        code_reward = reward_fn(client, column="tests", limits={"wall_time_s": 10, "cpu_time_s": 10})
        try:
            print(f"rewards of a right and a wrong answer: {check(code_reward)}")
        except GradingFailed as error:
            parser.exit(69, f"{given.url}: {error}; start it with: nouscoder serve verifier\n")
        if given.model:
            print(f"mean reward of each step: {train(given.model, code_reward, given.steps, given.out)}")


if __name__ == "__main__":
    main()
