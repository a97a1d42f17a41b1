"""Starts the API beside an engine, or with an engine of its own for one policy."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from nouscoder.config import Config
from nouscoder.domain.policy import PolicyManifest
from nouscoder.generation.engines import open_engine
from nouscoder.generation.engines.base import Engine, EngineUnusable
from nouscoder.generation.metrics import ApiMetrics, GenerationMetrics
from nouscoder.generation.openai.api import ApiGate, make_app
from nouscoder.generation.openai.completions import Completions, PromptEncoder
from nouscoder.generation.openai.sampling import ApiSampler
from nouscoder.generation.openai.schema import ChatRequest, parsed
from nouscoder.generation.weights.policies import Policies
from nouscoder.http_server.api_keys import ApiKeys
from nouscoder.http_server.listener import start_http
from nouscoder.http_server.tls import http_context
from nouscoder.policy_folder.inspection import context_tokens
from nouscoder.policy_folder.tokenizer import TokenizerError, load_tokenizer
from nouscoder.policy_folder.weights_files import shards_of

log = logging.getLogger(__name__)


async def start_openai(
    config: Config, folder: Path, engine: Engine, policies: Policies, metrics: ApiMetrics, stack: AsyncExitStack
) -> str:
    """Listen until `stack` closes. Returns the address in use.

    Raises AddressError, ApiKeysUnusable, TlsUnusable and EngineUnusable.
    """
    settings = config.generation.openai
    try:
        # Two, because a tokenizer is not safe in two threads: prompts are encoded beside the event loop.
        encoder, decoder = [await asyncio.to_thread(load_tokenizer, folder) for _ in range(2)]
    except TokenizerError as error:
        raise EngineUnusable(str(error)) from error
    api_keys = ApiKeys(Path(settings.tokens_file) if settings.tokens_file else None)
    if api_keys.is_open:
        log.warning("no tokens are configured: anyone who can reach this address may sample")
    capacity = min(config.generation.max_tokens_total, context_tokens(folder) or config.generation.max_tokens_total)
    completions = Completions(
        settings.model or config.run.name,
        policies,
        ApiSampler(engine, decoder.decode, decoder.stop_ids, settings.slots),
        PromptEncoder(encoder, capacity),
        decoder.decode,
        settings.request_limit_s,
        metrics,
    )
    app = make_app(completions, settings.max_body_bytes)
    app.add_middleware(
        ApiGate, api_keys=api_keys, hosts=settings.hosts, max_requests=settings.max_requests, metrics=metrics
    )
    address = await start_http(app, settings.http, stack, http_context(settings.tls))
    log.info("listening", extra={"openai": address})
    return address


@asynccontextmanager
async def serving_folder(config: Config, folder: Path) -> AsyncIterator[str]:
    """Serve the policy in `folder` at `config.generation.openai.http`, as version 0. Gives the address in use.

    It needs no broker, no learner and no rollouts: it is for an evaluation of the policy. Raises EngineUnusable,
    PolicyUnusable, WeightsMissing and AddressError.
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
