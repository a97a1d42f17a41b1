"""The process of generation: it serves the calls (servicer.py), and works for one run after the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from nouscoder.config import Config
from nouscoder.config.generation import AgentSection, ToolsSection
from nouscoder.domain.policy import WeightTransfer
from nouscoder.generation.engines import open_engine
from nouscoder.generation.engines.base import Engine, EngineUnusable
from nouscoder.generation.environments import open_environment
from nouscoder.generation.environments.agent import AgentSessions
from nouscoder.generation.environments.base import EnvironmentUnusable
from nouscoder.generation.environments.tools import Tools
from nouscoder.generation.metrics import GenerationMetrics
from nouscoder.generation.next_run import NextRun
from nouscoder.generation.rollouts import Rollouts, RunSampling
from nouscoder.generation.servicer import FULL_NAME, STATUS_CODES, GenerationServicer
from nouscoder.generation.weights.cache import PolicyCache
from nouscoder.generation.weights.policies import Policies
from nouscoder.generation.weights.source import FolderSource, LearnerMemory, LearnerSource, PolicySource
from nouscoder.generation.worker import RolloutWorker
from nouscoder.policy_folder.identity import tokenizer_digests
from nouscoder.policy_folder.prompt_file import dateless, prompt_lines, with_recorded_prompt
from nouscoder.private_folder import temporary_folder
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.health import Health
from nouscoder.rpc.learner_client import LearnerClient
from nouscoder.rpc.server import Served, run_until_stopped, start_grpc, stop_event
from nouscoder.rpc.tls import channel_credentials, server_credentials
from nouscoder.rpc.verifier_client import VerifierClient, verifier_token
from nouscoder.rpc.worker_id import held_worker_id

if TYPE_CHECKING:
    from nouscoder.generation.engines.vllm import VllmEngine

log = logging.getLogger(__name__)

_DRAIN_S = 3.0
# One task is prefetched for each `_PREFETCH_SHARE` running tasks.
_PREFETCH_SHARE = 4


async def serve(config: Config, reread: Callable[[], Config] | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Generate works while the broker does not answer.

    `reread` gives the configuration of the next run, for ServeNextRun. With generation.policy_from "learner" the
    process is alive but not ready until it has fetched the policy folder. Raises EngineError, EnvironmentUnusable,
    PeerError, PolicyUnusable and Unusable.
    """
    stop = stop_event()
    metrics = GenerationMetrics()
    async with AsyncExitStack() as stack:
        health = Health(config.generation.grpc_health)
        await health.start(stack)
        source = await _open_source(config, metrics, stack)
        folder = config.in_run_folder(config.policy.path)
        if isinstance(source, LearnerSource):
            fetching = asyncio.ensure_future(source.first_folder())
            await run_until_stopped(stop, fetching)
            if stop.is_set():
                return
            folder = fetching.result()
        opened = await asyncio.to_thread(open_engine, config, folder, metrics)
        engine = await stack.enter_async_context(opened)
        next_run = NextRun(config, reread)
        service: GenerationServicer | None = None
        run: Config | None = config
        while run is not None:
            async with AsyncExitStack() as of_run:
                memory = await _open_memory(run, engine, metrics, of_run)
                policies = Policies(engine, source, memory, await asyncio.to_thread(tokenizer_digests, folder))
                tools = await _open_tools(run, of_run)
                asking = await asyncio.to_thread(_asking, run, folder)
                sessions = AgentSessions() if isinstance(run.generation.environment, AgentSection) else None
                parts = _Parts(folder, engine, policies, metrics, tools, sessions)
                rollouts = await _open_rollouts(asking, parts)
                evaluations = None
                if _rollouts_differ(asking):
                    evaluations = await _open_rollouts(asking.evaluating, parts)
                if service is None:
                    service = GenerationServicer(engine, rollouts, policies, next_run)
                    await start_grpc(_served(config, service, metrics, health), stack)
                service.serve_run(rollouts, policies, evaluations)
                await _start_openai(asking, parts, of_run)
                worker = await _worker(run, rollouts, policies, of_run)
                next_run.begun(run)
                await run_until_stopped(stop, worker, engine.failed(), next_run.asked.wait())
            run = next_run.wanted
            if run is not None:
                folder = run.in_run_folder(run.policy.path)
                log.info("the engine serves the next run", extra={"run": run.run.name})


def _rollouts_differ(config: Config) -> bool:
    """Whether those of evaluations need an object of their own. The rest of their sampling is in each task."""
    training, evaluating = config.generation, config.evaluating.generation
    cuts = [(each.sampling.top_k, each.sampling.min_p) for each in (training, evaluating)]
    return training.max_tokens_total != evaluating.max_tokens_total or cuts[0] != cuts[1]


def _asking(config: Config, folder: Path) -> Config:
    """`config` with what the policy's folder says of its prompt, where nobody has set it.

    Raises PromptFileUnusable and EnvironmentUnusable.
    """
    config = with_recorded_prompt(config, folder)
    if dateless(config, folder):  # another day in each service, and after each start
        raise EnvironmentUnusable(
            f"the chat template of {folder} writes the date of the day, which must be one in the whole run:"
            f" set generation.environment.date to the day of its beginning, such as {date.today()}"
        )
    for line in prompt_lines(config.generation.environment, folder):
        log.info(line)
    return config


class _Parts(NamedTuple):
    """What the rollouts of one run are made with."""

    folder: Path
    engine: Engine
    policies: Policies
    metrics: GenerationMetrics
    tools: Tools | None
    sessions: AgentSessions | None


async def _open_rollouts(config: Config, run: _Parts) -> Rollouts:
    """The rollouts of one run: its environment and its context limit. Raises EnvironmentUnusable."""
    environment = await asyncio.to_thread(open_environment, config, run.folder, run.tools, run.sessions)
    sampling = await asyncio.to_thread(RunSampling.of, config.generation.sampling, run.folder)
    most = config.generation.max_tokens_total
    return Rollouts(environment, run.engine, run.policies, run.tools, run.metrics, most, sampling, run.sessions)


async def _start_openai(config: Config, run: _Parts, stack: AsyncExitStack) -> None:
    if config.generation.openai.http:
        # Its libraries are loaded only where it is wanted.
        from nouscoder.generation.openai.api import start_openai

        await start_openai(config, run.folder, run.engine, run.policies, run.metrics.api, stack, run.sessions)


async def _open_tools(config: Config, stack: AsyncExitStack) -> Tools | None:
    """Tools that connect to the verifier with their first call; none when the environment has no use for them."""
    environment = config.generation.environment
    if not isinstance(environment, ToolsSection):
        return None
    limit_s = environment.tool_limit_s
    client = VerifierClient(config.verifier.grpc, limit_s, channel_credentials(config.tls), verifier_token(config))
    return Tools(await stack.enter_async_context(client), limit_s)


async def _open_source(config: Config, metrics: GenerationMetrics, stack: AsyncExitStack) -> PolicySource:
    if config.generation.policy_from == "folder":
        return FolderSource()
    cache = PolicyCache(Path(config.generation.cache or temporary_folder("nouscoder-policies")))
    stack.callback(cache.close)
    client = LearnerClient(config.learner.grpc, channel_credentials(config.tls), config.asked_run)
    await stack.enter_async_context(client)
    return LearnerSource(client, cache, metrics, config.generation.policy_patience_s)


async def _open_memory(
    config: Config, engine: Engine, metrics: GenerationMetrics, stack: AsyncExitStack
) -> LearnerMemory | None:
    """The learner's memory, when policies are to come from there. Raises EngineUnusable."""
    transfer = config.generation.vllm.weight_transfer
    if transfer is WeightTransfer.FILES:
        return None
    from nouscoder.policy_transfer.group import missing_for

    if missing := missing_for(transfer):
        raise EngineUnusable(f"generation.vllm.weight_transfer: {missing}")
    client = LearnerClient(config.learner.grpc, channel_credentials(config.tls), config.asked_run)
    await stack.enter_async_context(client)
    return LearnerMemory(client, cast("VllmEngine", engine), metrics)  # only the vllm engine has this setting


def _served(config: Config, servicer: GenerationServicer, metrics: GenerationMetrics, health: Health) -> Served:
    return Served(
        config.generation.grpc,
        config.generation.metrics,
        [FULL_NAME],
        servicer.add_to_server,
        metrics.registry,
        _DRAIN_S,
        credentials=server_credentials(config.tls),
        status_codes=STATUS_CODES,
        health=health,
        certificates=(config.tls.certificate, config.generation.openai.tls.certificate),
        run=config.asked_run,
    )


async def _worker(
    config: Config, rollouts: Rollouts, policies: Policies, stack: AsyncExitStack
) -> Coroutine[Any, Any, None]:
    broker = BrokerClient(
        config.broker.grpc,
        stack.enter_context(held_worker_id("generation", config.run.name)),
        patience_s=config.run.peer_patience_s,
        credentials=channel_credentials(config.tls),
        run=config.asked_run,
    )
    await stack.enter_async_context(broker)
    max_running = config.generation.max_running
    prefetch = max(1, max_running // _PREFETCH_SHARE)
    every_tokens = config.generation.partial_every_tokens
    return RolloutWorker(broker, rollouts, policies, max_running, prefetch, every_tokens).run()
