"""Starts the API beside an engine."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path

from nouscoder.config import Config
from nouscoder.generation.engines.base import Engine, EngineUnusable
from nouscoder.generation.metrics import ApiMetrics
from nouscoder.generation.openai.api import make_app
from nouscoder.generation.openai.completions import Completions
from nouscoder.generation.openai.counted import Counted
from nouscoder.generation.openai.gate import Gate
from nouscoder.generation.openai.prompts import PromptEncoder
from nouscoder.generation.openai.sampling import Samples
from nouscoder.generation.weights.policies import Policies
from nouscoder.http_server.api_keys import ApiKeys
from nouscoder.http_server.listener import start_http
from nouscoder.http_server.tls import http_context
from nouscoder.policy_folder.inspection import context_tokens
from nouscoder.policy_folder.tokenizer import TokenizerError, load_tokenizer

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
        Samples(engine, decoder.decode, decoder.stop_ids, settings.slots),
        PromptEncoder(encoder, capacity),
        decoder,
        settings.request_limit_s,
        metrics,
    )
    app = make_app(completions, settings.max_body_bytes)
    app.add_middleware(Gate, api_keys=api_keys, hosts=settings.hosts, max_requests=settings.max_requests)
    app.add_middleware(Counted, metrics=metrics)  # the outermost
    address = await start_http(app, settings.http, stack, http_context(settings.tls))
    log.info("listening", extra={"openai": address})
    return address
