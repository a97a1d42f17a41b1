"""Rewards of OpenRLHF's own executor of one turn, whose engine answers with a given text. Prints one line of JSON.

{"right": [reward, score], "wrong": [...], "none": reward of a rollout without a verdict, "tries": its requests}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import tiny_policy
from openrlhf.utils.agent import SingleTurnAgentExecutor

LABEL = json.dumps({"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10\n"]})


class Engine:
    """Takes the place of vLLM, which needs a GPU: it answers with one text."""

    def __init__(self, tokenizer: Any, answer: str) -> None:
        self._ids = tokenizer.encode(answer)

    async def generate(self, *_: Any, **__: Any) -> Any:
        """One continuation, of vLLM's form."""
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=self._ids, finish_reason="stop", logprobs=None)])


class Full(BaseHTTPRequestHandler):
    """A service whose queue is full."""

    num_requests = 0

    def do_POST(self) -> None:
        """429, as the grading service answers."""
        Full.num_requests += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(429)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


async def rewarded(url: str, tokenizer: Any, answer: str) -> Any:
    rules = SimpleNamespace(max_tokens=4, logprobs=None)
    executor = SingleTurnAgentExecutor([f"{url}/get_reward"])
    return await executor.execute(tiny_policy.PROMPT, LABEL, rules, 8, tokenizer, Engine(tokenizer, answer))


async def main(url: str, tokenizer: Any) -> None:
    full = HTTPServer(("127.0.0.1", 0), Full)
    Thread(target=full.serve_forever, daemon=True).start()
    found: dict[str, Any] = {}
    for name, text in (("right", tiny_policy.RIGHT), ("wrong", tiny_policy.WRONG)):
        output = await rewarded(url, tokenizer, text)
        found[name] = [output["reward"], output["scores"], output["extra_logs"]]
    found["none"] = (await rewarded(f"http://127.0.0.1:{full.server_port}", tokenizer, tiny_policy.RIGHT))["reward"]
    found["tries"] = Full.num_requests
    print(json.dumps(found))


with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(sys.argv[1], tiny_policy.save_tokenizer(Path(folder))))
