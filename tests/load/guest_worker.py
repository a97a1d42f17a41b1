"""A process that samples rollouts as the worker does, and serves the API for guests: `python guest_worker.py FOLDER`.

The first line of its output names the address of the API. For each line of its input it writes one line of JSON:
what happened since the line before.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from nouscoder.config import load_config
from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.rollout import Sampling
from nouscoder.domain.tokens import Completion
from nouscoder.generation.engines import open_engine
from nouscoder.generation.engines.base import Engine, SampleRequest
from nouscoder.generation.engines.stepped import StepEngine
from nouscoder.generation.metrics import GenerationMetrics
from nouscoder.generation.weights.policies import Policies
from nouscoder.policy_folder.weights_files import shards_of

MAX_RUNNING = 16
CAPACITY = 512
ROLLOUT_TOKENS = 200
TICK_S = 0.01


def make_policy(folder: Path) -> None:
    """A small random model with a tokenizer of bytes and a chat template."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<pad>", "<end>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}[assistant]"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CAPACITY,
        eos_token_id=tokenizer.token_to_id("<end>"),
        pad_token_id=tokenizer.token_to_id("<pad>"),
    )
    torch.manual_seed(0)
    build: Any = AutoModelForCausalLM.from_config
    build(config, dtype=torch.float32).save_pretrained(folder)


class Rollouts:
    """Keeps as many rollouts in the engine as the worker does, and counts their tokens."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._number = 0
        self.num_tokens = 0
        stepped: Any = engine
        self._stepping: StepEngine[Any] = stepped._engine
        self._step = self._stepping.step
        stepped._engine.step = self._counted_step

    def _counted_step(self) -> list[tuple[str, Completion]]:
        """Each running request, and each that ended, got one token."""
        ended: list[tuple[str, Completion]] = self._step()
        names = [*self._stepping.progress, *(name for name, _ in ended)]
        self.num_tokens += sum(name.startswith("rollout") for name in names)
        return ended

    async def keep(self) -> None:
        """Never returns."""
        await asyncio.gather(*(self._keep_one() for _ in range(MAX_RUNNING + MAX_RUNNING // 4)))

    async def _keep_one(self) -> None:
        while True:
            self._number += 1
            prompt = tuple(self._number % 200 + place % 20 for place in range(50))
            sampling = Sampling(max_new_tokens=ROLLOUT_TOKENS + self._number % 100)
            await self._engine.sample(SampleRequest(f"rollout{self._number}", prompt, sampling, frozenset()))


class Lag:
    """The longest time for which the event loop ran nothing else."""

    longest_s = 0.0

    async def watch(self) -> None:
        """Never returns."""
        while True:
            begun = time.monotonic()
            await asyncio.sleep(TICK_S)
            self.longest_s = max(self.longest_s, time.monotonic() - begun - TICK_S)

    def take(self) -> float:
        """The longest since the call before."""
        longest_s, self.longest_s = self.longest_s, 0.0
        return longest_s


def rss_mib(pid: int) -> float:
    """Resident memory of a process and of its children, without pages of files, which others share."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    own = int(status.partition("RssAnon:")[2].split()[0]) / 1024
    return own + sum(rss_mib(int(child)) for child in children)


async def main(folder: Path, overrides: list[str]) -> None:
    from nouscoder.generation.openai.api import start_openai

    settings = [
        "run.name=mine",
        "generation.openai.http=127.0.0.1:0",
        f"generation.max_running={MAX_RUNNING}",
        f"generation.max_tokens_total={CAPACITY}",
        *overrides,
    ]
    config = load_config(None, settings)
    async with AsyncExitStack() as stack:
        metrics = GenerationMetrics()
        engine = await stack.enter_async_context(open_engine(config, folder, metrics))
        policies = Policies(engine)
        await policies.update(PolicyManifest(0, 0, str(folder), shards_of(folder)))
        address = await start_openai(config, folder, engine, policies, metrics.api, stack)
        rollouts, lag = Rollouts(engine), Lag()
        tasks = [asyncio.create_task(rollouts.keep()), asyncio.create_task(lag.watch())]
        print(address, flush=True)
        before = rollouts.num_tokens, time.monotonic(), time.process_time()
        while await asyncio.to_thread(sys.stdin.readline):
            now = rollouts.num_tokens, time.monotonic(), time.process_time()
            tokens, seconds, cpu_s = (late - early for late, early in zip(now, before, strict=True))
            record = {"rate": tokens / seconds, "cpu_rate": tokens / cpu_s, "stop_s": lag.take()}
            print(json.dumps({**record, "mib": rss_mib(os.getpid())}), flush=True)
            before = now
        for task in tasks:
            task.cancel()


if __name__ == "__main__":
    torch_threads = os.environ.setdefault("OMP_NUM_THREADS", "1")
    place = Path(sys.argv[1])
    if not place.exists():
        make_policy(place)
    asyncio.run(main(place, sys.argv[2:]))
