"""Trains a tiny policy for 2 steps with TRL's GRPOTrainer and a reward function of ours, synchronous or asynchronous.

Prints {"group": size, "steps": [[mean reward, gradient norm]], "completions": [[kind, advantage]]}, where a kind is
right, wrong, lost or other.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import tiny_policy
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from nouscoder.client import AsyncClient, Client, Patience
from nouscoder.client.adapters.trl import async_reward_fn, reward_fn

GROUP = 12
NAMES = {tiny_policy.RIGHT: "right", tiny_policy.WRONG: "wrong", tiny_policy.LOST: "lost"}
PATIENCE = Patience(busy_s=0.0, unreachable_s=0.0)


def check(request: httpx.Request) -> None:
    if b"lost" in request.content:
        raise httpx.ConnectError("lost on the way", request=request)


class Lossy(httpx.HTTPTransport):
    def handle_request(self, request: httpx.Request) -> httpx.Response:
        check(request)
        return super().handle_request(request)


class AsyncLossy(httpx.AsyncHTTPTransport):
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        check(request)
        return await super().handle_async_request(request)


class Recorder(GRPOTrainer):  # type: ignore[misc]
    """Notes what TRL makes of each completion: (text, advantage)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.noted: list[tuple[str, float]] = []

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
        texts = self.processing_class.batch_decode(scored["completion_ids"], skip_special_tokens=True)
        self.noted += zip(texts, scored["advantages"].tolist(), strict=True)
        return scored


def run(url: str, kind: str, folder: Path) -> Recorder:
    reward: Any
    if kind == "async":
        reward = async_reward_fn(AsyncClient(url, PATIENCE, transport=AsyncLossy()))
    else:
        reward = reward_fn(Client(url, PATIENCE, transport=Lossy()))
    rows = [{"prompt": tiny_policy.PROMPT, "tests": tests} for tests in tiny_policy.TESTS]
    config = GRPOConfig(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=2 * GROUP, num_generations=GROUP,
        max_completion_length=1, logging_steps=1, report_to=[], use_cpu=True, bf16=False, seed=0, save_strategy="no",
    )  # fmt: skip
    model = str(tiny_policy.save_policy(folder / "policy"))
    trainer = Recorder(model=model, reward_funcs=[reward], args=config, train_dataset=Dataset.from_list(rows))
    trainer.train()
    return trainer


def main(url: str, kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = run(url, kind, Path(folder))
    steps = [(line["reward"], line["grad_norm"]) for line in trainer.state.log_history if "reward" in line]
    names = [(NAMES.get(text, "other"), advantage) for text, advantage in trainer.noted]
    print(json.dumps({"group": GROUP, "steps": steps, "completions": names}))


main(sys.argv[1], sys.argv[2])
