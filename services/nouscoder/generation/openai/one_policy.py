"""Serves the policy of one folder in this process, without a broker, a learner or rollouts: for an evaluation of it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from nouscoder.config import Config
from nouscoder.domain.policy import PolicyManifest
from nouscoder.generation.engines import open_engine
from nouscoder.generation.engines.base import EngineUnusable
from nouscoder.generation.metrics import GenerationMetrics
from nouscoder.generation.openai.prompts import PromptEncoder
from nouscoder.generation.openai.schema import ChatRequest, parsed
from nouscoder.generation.openai.serve import start_openai
from nouscoder.generation.weights.policies import Policies
from nouscoder.policy_folder.tokenizer import TokenizerError, load_tokenizer
from nouscoder.policy_folder.weights_files import shards_of


@asynccontextmanager
async def serving_folder(config: Config, folder: Path) -> AsyncIterator[str]:
    """Serve the policy in `folder` at `config.generation.openai.http`, as version 0. Gives the address in use.

    Raises EngineUnusable, PolicyUnusable, WeightsMissing and AddressError.
    """
    async with AsyncExitStack() as stack:
        metrics = GenerationMetrics()
        opened = await asyncio.to_thread(open_engine, config, folder, metrics)
        engine = await stack.enter_async_context(opened)
        policies = Policies(engine)
        shards = await asyncio.to_thread(shards_of, folder)
        await policies.update(PolicyManifest(0, 0, str(folder), shards))
        yield await start_openai(config, folder, engine, policies, metrics.api, stack)


async def longest_prompt(folder: Path, requests: Iterable[dict[str, Any]]) -> int:
    """The most tokens that the prompt of one of these chat requests has. Raises EngineUnusable and ApiFault."""
    try:
        encoder = PromptEncoder(await asyncio.to_thread(load_tokenizer, folder), sys.maxsize)
    except TokenizerError as error:
        raise EngineUnusable(str(error)) from error
    longest = 0
    for request in requests:
        longest = max(longest, len(await encoder.of_chat(parsed(ChatRequest, json.dumps(request).encode()))))
    return longest
