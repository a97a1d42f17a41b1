"""Miles' own rollout of training groups, whose engine answers with given texts: `--rm-type remote_rm --rm-url URL`.

Prints {"reward": [of each sample], "accepted": [...], "asked": number of groups, "kept": number of them}. A middleman
answers 503 for each second group.
"""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from argparse import Namespace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count, islice
from threading import Thread
from types import SimpleNamespace
from typing import Any

import httpx
import tiny_policy
from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.rollout.inference_rollout.inference_rollout_train import generate_rollout_async
from miles.utils import http_utils
from miles.utils.types import Sample

LABEL = json.dumps({"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10\n"]})
ANSWERS = (tiny_policy.RIGHT, tiny_policy.WRONG)
NUM_GROUPS = 3


class Middleman(BaseHTTPRequestHandler):
    """Between Miles and the service, which has no place for a group that is called lost. It is also sglang's router."""

    url = ""

    def do_POST(self) -> None:
        """The answer of the service, or 503."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if b"lost" in body:
            self.answer(503, b"{}")
            return
        with urllib.request.urlopen(urllib.request.Request(Middleman.url + self.path, body)) as reply:
            self.answer(reply.status, reply.read())

    def do_GET(self) -> None:
        """The engines of sglang: none."""
        self.answer(200, b'{"workers": []}')

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


async def generate(given: GenerateFnInput) -> GenerateFnOutput:
    """In the place of sglang: a right and a wrong answer in each group."""
    given.sample.response, given.sample.status = ANSWERS[given.sample.index % 2], Sample.Status.COMPLETED
    return GenerateFnOutput(samples=given.sample)


async def trained_on(port: int, reward_key: str) -> dict[str, Any]:
    numbers = count()

    def next_groups(num_groups: int) -> list[list[Sample]]:
        texts = [(at, "lost" if at % 2 else tiny_policy.PROMPT) for at in islice(numbers, num_groups)]
        return [[Sample(prompt=text, label=LABEL, index=2 * at + n) for n in (0, 1)] for at, text in texts]

    args = Namespace(
        partial_rollout=False, group_rm=False, custom_rm_path=None, reward_key=reward_key, rm_type="remote_rm",
        rm_url=f"http://127.0.0.1:{port}/remote_rm", rollout_global_dataset=True, dynamic_sampling_filter_path=None,
        rollout_batch_size=NUM_GROUPS, n_samples_per_prompt=2, over_sampling_batch_size=1, use_miles_router=False,
        sglang_router_ip="127.0.0.1", sglang_router_port=port, rollout_sample_filter_path=None,
        rollout_all_samples_process_path=None, dumper_enable=False, dumper_inference=None,
    )  # fmt: skip
    state = SimpleNamespace(
        args=args, aborted=False, generate_fn_semaphore=asyncio.Semaphore(8), generate_function=generate,
        sampling_params={}, reset=lambda: None,
    )  # fmt: skip
    made, _ = await generate_rollout_async(state, 0, next_groups)
    rewards = [sample.get_reward_value(args) for group in made.samples for sample in group]
    return {reward_key: rewards, "asked": next(numbers), "kept": len(made.samples)}


async def main(url: str) -> None:
    Middleman.url = url
    server = ThreadingHTTPServer(("127.0.0.1", 0), Middleman)
    Thread(target=server.serve_forever, daemon=True).start()
    async with httpx.AsyncClient() as http_utils._http_client:
        found = [await trained_on(server.server_port, key) for key in ("accepted", "reward")]
    print(json.dumps(found[0] | found[1]))


asyncio.run(main(sys.argv[1]))
