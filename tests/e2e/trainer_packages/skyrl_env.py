"""The environment of docs/trainers.md in SkyRL's own generator, whose engine answers with given texts.

Prints {"right": reward, "wrong": reward, "lost": name of the error of a batch without a verdict}.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import tiny_policy
from skyrl.train.config import GeneratorConfig, SkyRLGymConfig
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator

DOCUMENT = Path(__file__).parents[3] / "docs" / "trainers.md"
TESTS = json.dumps({"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10\n"]})
ANSWERS = (tiny_policy.RIGHT, tiny_policy.WRONG)
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class Engine:
    """Takes the place of vLLM, which needs a GPU: the texts one after the other."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._num_asked = tokenizer, 0

    async def generate(self, *_: Any, **__: Any) -> dict[str, Any]:
        """One answer, of vLLM's form."""
        text = ANSWERS[self._num_asked]
        self._num_asked += 1
        ids = [*self._tokenizer.encode(text), self._tokenizer.eos_token_id]
        return {"responses": [text], "response_ids": [ids], "stop_reasons": ["stop"], "response_logprobs": None}

    async def finish_session(self, _: str) -> None:
        """Nothing is kept."""


def register_documented(name: str, url: str) -> None:
    """Run the document's block for the service at `url`, and register its environment under `name`."""
    section = DOCUMENT.read_text("utf8").partition("## SkyRL\n")[2]
    block = re.search(r"```py\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    assert block is not None
    client = 'Client("http://127.0.0.1:8080")'
    assert client in block[1]
    assert 'id="code"' in block[1]
    script = block[1].replace(client, f'Client("{url}", Patience(unreachable_s=0.0))').replace('"code"', f'"{name}"')
    exec("from nouscoder.client import Patience\n" + script, {})  # noqa: S102  the code of our document


def rewards(name: str, url: str, tokenizer: Any) -> Any:
    register_documented(name, url)
    config = GeneratorConfig()
    config.sampling_params.max_generate_length, config.max_input_length = 16, 64
    generator = SkyRLGymGenerator(config, SkyRLGymConfig(), Engine(tokenizer), tokenizer)
    rows = [[{"role": "user", "content": tiny_policy.PROMPT}]] * len(ANSWERS)
    extras = [{"reward_spec": {"method": "rule", "ground_truth": TESTS}} for _ in ANSWERS]
    batch = {"prompts": rows, "env_classes": [name] * len(ANSWERS), "env_extras": extras}
    made = asyncio.run(generator.generate(batch))
    names = {tiny_policy.RIGHT: "right", tiny_policy.WRONG: "wrong"}
    texts = tokenizer.batch_decode(made["response_ids"], skip_special_tokens=True)
    return {names[text]: sum(of_tokens) for text, of_tokens in zip(texts, made["rewards"], strict=True)}


def main(url: str, folder: Path) -> None:
    tokenizer = tiny_policy.save_tokenizer(folder)
    tokenizer.chat_template = TEMPLATE
    found = rewards("code", url, tokenizer)
    try:
        found["lost"] = rewards("lost", "http://127.0.0.1:1", tokenizer)
    except Exception as error:
        found["lost"] = type(error).__name__
    print(json.dumps(found))


with tempfile.TemporaryDirectory() as temporary:
    main(sys.argv[1], Path(temporary))
