"""Plays 32 episodes at once with OpenEnv's GenericEnvClient on problem 0, and one on problem 1, whose tests are lost.

Prints {"version": ..., "validate": {criterion: passed}, "episodes": [[reward, done, feedback] of each step], "seconds":
..., "lost": message, "refused": message}.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
import time
from typing import Any

from openenv.cli._validation import validate_running_environment
from openenv.core.generic_client import GenericEnvClient

RIGHT = "```python\nprint(sum(map(int, input().split())))\n```"
NUM_SESSIONS = 32


async def episode(url: str, number: int) -> list[Any]:
    async with GenericEnvClient(base_url=url) as env:
        first = await env.reset(index=0, episode_id=str(number))
        steps = [[first.reward, first.done, first.observation["prompt"]]]
        for answer in (f"print({-1 - number})", RIGHT):
            result = await env.step({"answer": answer})
            steps.append([result.reward, result.done, result.observation["feedback"]])
        assert (await env.state())["step_count"] == 2
        return steps


async def error_of(url: str, **reset: Any) -> str:
    async with GenericEnvClient(base_url=url) as env:
        try:
            await env.reset(**reset)
            await env.step({"answer": RIGHT})
        except RuntimeError as error:
            return str(error)
    return ""


async def main(url: str) -> None:
    report = validate_running_environment(url)
    begun_s = time.monotonic()
    episodes = await asyncio.gather(*(episode(url, number) for number in range(NUM_SESSIONS)))
    found = {
        "version": importlib.metadata.version("openenv"),
        "validate": {one["id"]: one["passed"] for one in report["criteria"]},
        "episodes": episodes,
        "seconds": time.monotonic() - begun_s,
        "lost": await error_of(url, index=1),
        "refused": await error_of(url, problem="sum"),
    }
    print(json.dumps(found))


asyncio.run(main(sys.argv[1]))
