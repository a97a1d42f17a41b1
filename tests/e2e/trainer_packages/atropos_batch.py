"""An environment of Atropos that grades through the service, Atropos' API server, and a trainer that takes a batch.

Prints {"groups": [scores of each group], "lost": groups that were left out because one rollout has no verdict}.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import tiny_policy
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

from nouscoder.client import AsyncClient, GradingFailed, Patience
from nouscoder.client.adapters.atropos import run_test

TESTS = {"input": ["1 2\n", "5 5\n"], "output": ["3\n", "10\n"], "fn_name": "none"}
NOWHERE = "http://127.0.0.1:1"
START_LIMIT_S = 120.0
TRAINER = {
    "wandb_group": "test", "wandb_project": "test", "batch_size": 4, "max_token_len": 64, "checkpoint_dir": "",
    "save_checkpoint_interval": -1, "starting_step": 0, "num_steps": 2,
}  # fmt: skip


class CodeEnv(BaseEnv):  # type: ignore[misc]
    """Groups of two rollouts, a right and a wrong one. Every second group meets a service that is away."""

    name = "nouscoder"

    def use(self, url: str) -> None:
        """Grade there."""
        patience = Patience(unreachable_s=0.0)
        self.clients = [AsyncClient(NOWHERE, patience), AsyncClient(url, patience)]
        self.turns = cycle([0, 1])
        self.num_lost = 0

    async def setup(self) -> None:
        """Nothing to load."""

    async def evaluate(self, *_: Any, **__: Any) -> None:
        """Nothing is measured."""

    async def get_next_item(self) -> int:
        """The number of the service that grades the group."""
        return next(self.turns)

    async def collect_trajectories(self, item: int) -> tuple[Any, list[Any]]:
        """Two answers with their scores, or None for a group that has no verdict."""
        scored: dict[str, list[Any]] = {"tokens": [], "masks": [], "scores": []}
        for answer in (tiny_policy.RIGHT, tiny_policy.WRONG):
            code = answer.removeprefix("```python\n").removesuffix("\n```")
            try:
                results, _ = await run_test(self.clients[item], {"tests": TESTS}, code)
            except GradingFailed:
                self.num_lost += 1
                return None, []
            tokens = self.tokenizer.encode(tiny_policy.PROMPT + answer)
            scored["tokens"].append(tokens)
            scored["masks"].append([-100, *tokens[1:]])
            scored["scores"].append(1.0 if set(results) == {True} else -1.0)
        return scored, []


async def until(http: httpx.AsyncClient, path: str, key: str) -> Any:
    """The value of `key` of an answer of the server, as soon as there is one."""
    end_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end_s:
        try:
            value = (await http.get(path)).json().get(key)
        except httpx.TransportError:
            value = None
        if value:
            return value
        await asyncio.sleep(0.2)
    raise TimeoutError(f"{path} gave no {key} within {START_LIMIT_S} s")


async def trained(url: str, server: str, folder: str) -> dict[str, Any]:
    """Register as a trainer, let the environment work, take the first batch."""
    tiny_policy.save_tokenizer(Path(folder))
    async with httpx.AsyncClient(base_url=server) as http:
        await until(http, "/", "message")
        (await http.post("/register", json=TRAINER)).raise_for_status()
        config = BaseEnvConfig(
            group_size=2, tokenizer_name=folder, use_wandb=False, wandb_name="code",
            rollout_server_url=server, total_steps=2,
            max_num_workers=2, steps_per_eval=-1,
        )  # fmt: skip
        env = CodeEnv(config, [APIServerConfig(model_name="none", base_url=NOWHERE, api_key="x", server_type="openai")])
        env.use(url)
        working = asyncio.create_task(env.env_manager())
        batch = await until(http, "/batch", "batch")
        working.cancel()
        for client in env.clients:
            await client.close()
    return {"groups": [group["scores"] for group in batch], "lost": env.num_lost}


def main(url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(command, stdout=sys.stderr)
        try:
            found = asyncio.run(trained(url, f"http://127.0.0.1:{port}", folder))
        finally:
            server.terminate()
            server.wait(30)
    print(json.dumps(found))


main(sys.argv[1])
