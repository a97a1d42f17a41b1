"""Scores answers as verl does: its loader of a custom function, its reward manager, its own grading by SandboxFusion.

Prints {"manager": [...], "loop": [...], "fusion": [...], "no_verdict": name of the error}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import numpy
import tiny_policy
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager as RewardLoop
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager.naive import NaiveRewardManager

TESTS = {"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10\n"]}
HALF = "```python\nprint(3)\n```"
FUNCTION = """
from nouscoder.client import Client, Patience
from nouscoder.client.adapters import verl

CLIENT = Client("{url}", Patience(unreachable_s=0.0))


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return verl.compute_score(CLIENT, solution_str, ground_truth)
"""


def loaded(folder: Path, url: str) -> object:
    """Our function, loaded by verl from a file as `custom_reward_function` of its configuration says."""
    file = folder / f"reward_{url.rpartition(':')[2]}.py"
    file.write_text(FUNCTION.format(url=url))
    return get_custom_reward_fn(
        OmegaConf.create({"reward": {"custom_reward_function": {"path": str(file), "name": "compute_score"}}})
    )


def rollouts(tokenizer: object, answers: list[str]) -> DataProto:
    """A batch as verl's workers give it to a reward manager: one token of prompt, one of response [N, 1]."""
    ids = [tokenizer.encode(text) for text in (tiny_policy.PROMPT, *answers)]  # type: ignore[attr-defined]
    prompts = torch.tensor([ids[0]] * len(answers))
    tensors = {"prompts": prompts, "responses": torch.tensor(ids[1:])}
    tensors["attention_mask"] = torch.ones(len(answers), 2, dtype=torch.long)
    rows = {
        "data_source": ["taco"] * len(answers),
        "reward_model": [{"ground_truth": json.dumps(TESTS)}] * len(answers),
        "extra_info": [{} for _ in answers],
    }
    arrays = {name: numpy.array(values, dtype=object) for name, values in rows.items()}
    return DataProto(batch=TensorDict(tensors, batch_size=len(answers)), non_tensor_batch=arrays)


async def looped(tokenizer: object, score: object, data: DataProto) -> list[float]:
    manager = RewardLoop(OmegaConf.create({}), tokenizer, score)
    return [(await manager.run_single(data[number : number + 1]))["reward_score"] for number in range(len(data))]


def main(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tiny_policy.save_tokenizer(Path(folder))
        data = rollouts(tokenizer, [tiny_policy.RIGHT, tiny_policy.WRONG])
        score = loaded(Path(folder), url)
        found: dict[str, object] = {"manager": NaiveRewardManager(tokenizer, 0, score)(data)[:, 0].tolist()}
        found["loop"] = asyncio.run(looped(tokenizer, score, data))
        answers = (tiny_policy.RIGHT, tiny_policy.WRONG, HALF)
        found["fusion"] = [
            default_compute_score("taco", each, TESTS, sandbox_fusion_url=f"{url}/run_code") for each in answers
        ]
        try:
            NaiveRewardManager(tokenizer, 0, loaded(Path(folder), "http://127.0.0.1:1"))(data)
        except Exception as error:
            found["no_verdict"] = type(error).__name__
    print(json.dumps(found))


main(sys.argv[1])
