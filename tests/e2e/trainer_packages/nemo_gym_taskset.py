"""The task set of verifiers for servers of NeMo Gym, whose tasks call the grading service by its URL.

nemo_gym_taskset.py URL AT_ONCE: reads rows from stdin, one a line, whose `answer` is the model's answer. Prints
[[reward or null, cause of the missing reward], ...] in the order of the rows, and the metrics of the first.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.tasksets.nemo_gym import NeMoGymConfig, NeMoGymTask, NeMoGymTaskConfig, NeMoGymTaskset
from verifiers.v1.tasksets.nemo_gym.toolset import NeMoGymState


def taskset(url: str, rows: list[dict[str, Any]], folder: Path) -> NeMoGymTaskset:
    params = {"responses_create_params": {"input": [{"role": "user", "content": "Write a program."}]}}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row | params) + "\n" for row in rows), "utf8")
    config = NeMoGymTaskConfig(resources_url=url, request_timeout=120.0)
    return NeMoGymTaskset(NeMoGymConfig(dataset=folder / "rows.jsonl", task=config))


async def scored(task: NeMoGymTask, answer: str) -> tuple[float | None, str, dict[str, float]]:
    trace = vf.Trace(
        task=vf.TraceTask(type="NeMoGymTask", data=task.data),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        state=NeMoGymState(),
    )
    trace.nodes.append(vf.MessageNode(message=vf.AssistantMessage(content=answer), sampled=True))
    try:
        await task.setup(trace, None)  # it uses no runtime
        await task.score(trace)
    except Exception as error:
        cause = error.__cause__ or error
        return None, f"{type(cause).__name__}: {cause}", {}
    return trace.reward, "", dict(trace.metrics)


async def main(url: str, at_once: int) -> None:
    rows = [json.loads(line) for line in sys.stdin]
    answers, places = [row.pop("answer") for row in rows], asyncio.Semaphore(at_once)

    async def one(task: NeMoGymTask, answer: str) -> tuple[float | None, str, dict[str, float]]:
        async with places:
            return await scored(task, answer)

    with tempfile.TemporaryDirectory() as folder:
        tasks = list(taskset(url, rows, Path(folder)).load())
    found = await asyncio.gather(*map(one, tasks, answers))
    print("OUTPUT " + json.dumps({"answers": [[reward, cause] for reward, cause, _ in found], "metrics": found[0][2]}))


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
