"""Scores three replies with a real task of `verifiers`. Prints [reward or null, name of the error's cause] of each."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import verifiers.v1 as vf

from nouscoder.client import AsyncClient, Patience
from nouscoder.client.adapters.verifiers import score

TESTS = {"type": "call", "entry_point": "double", "cases": [{"args": [2], "expected": 4}]}
RIGHT, WRONG = "```python\ndef double(n):\n    return 2 * n\n```", "```python\ndef double(n):\n    return n\n```"


class Problem(vf.TaskData):
    """A problem with its tests."""

    tests: dict[str, Any]


class CodeTask(vf.Task[Problem]):
    """A task whose reward the grading service decides."""

    client: AsyncClient

    @vf.reward
    async def accepted(self, trace: vf.Trace) -> float:
        return await score(self.client, trace.last_reply, self.data.tests)


async def scored(url: str, text: str) -> list[Any]:
    task = CodeTask(Problem(prompt="Double n.", tests=TESTS))
    trace = vf.Trace(task=vf.TraceTask(type="CodeTask", data=task.data), agent=vf.AgentInfo(config=vf.AgentConfig()))
    trace.nodes.append(vf.MessageNode(message=vf.AssistantMessage(content=text), sampled=True))
    async with AsyncClient(url, Patience(unreachable_s=0.0)) as task.client:
        try:
            await task.score(trace)
        except vf.TaskError as error:
            return [trace.rewards["accepted"], type(error.__cause__).__name__]
    return [trace.reward, ""]


async def main(url: str) -> None:
    nowhere = "http://127.0.0.1:1"
    print(json.dumps([await scored(url, RIGHT), await scored(url, WRONG), await scored(nowhere, RIGHT)]))


asyncio.run(main(sys.argv[1]))
