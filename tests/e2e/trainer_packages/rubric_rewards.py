"""Scores four rollouts with a real Rubric of `verifiers`. Prints [reward, whether the rollout has an error] of each."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import verifiers as vf

from nouscoder.client import AsyncClient, Patience
from nouscoder.client.adapters.verifiers import code_reward

TESTS = {"type": "call", "entry_point": "double", "cases": [{"args": [2], "expected": 4}]}
RIGHT, WRONG = "```python\ndef double(n):\n    return 2 * n\n```", "```python\ndef double(n):\n    return n\n```"


async def scored(url: str, text: str) -> list[Any]:
    async with AsyncClient(url, Patience(unreachable_s=0.0)) as client:
        rubric = vf.Rubric(funcs=[code_reward(client)])
        state = vf.State(prompt=[], info={"tests": TESTS}, trajectory=[], timing=vf.types.RolloutTiming())
        state["completion"] = [{"role": "assistant", "content": text}]
        await rubric.score_rollout(state)
        return [state["reward"], bool(state.get("error"))]


async def main(url: str) -> None:
    nowhere = "http://127.0.0.1:1"
    print(json.dumps([await scored(url, RIGHT), await scored(url, WRONG), await scored(nowhere, RIGHT)]))


asyncio.run(main(sys.argv[1]))
