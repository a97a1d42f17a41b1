"""GenerationService over gRPC, and the process that serves it together with the worker loop, one run after the other.

INVARIANT: the next run is one that the engine in use can sample for. Whoever asks for the change gets one answer: the
run that is served, or the reason why the engine would have to be started again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import grpc

from nouscoder.config import Config, ConfigError
from nouscoder.config.generation import AgentSection, ToolsSection
from nouscoder.domain.policy import Transport, WeightTransfer
from nouscoder.errors import NousCoderError
from nouscoder.generation.engines import open_engine
from nouscoder.generation.engines.base import Engine, EngineError, EngineStopped, EngineUnusable
from nouscoder.generation.environments import open_environment
from nouscoder.generation.environments.agent import AgentSessions
from nouscoder.generation.environments.base import EnvironmentUnusable, SessionAbandoned, TaskRefused, ToolUnavailable
from nouscoder.generation.environments.tools import Tools
from nouscoder.generation.metrics import GenerationMetrics
from nouscoder.generation.rollouts import Rollouts, RunSampling
from nouscoder.generation.weights.cache import PoliciesDiffer, PolicyCache, PolicyMissing, PolicyRefused, PolicyUnusable
from nouscoder.generation.weights.policies import Policies
from nouscoder.generation.weights.source import FolderSource, LearnerMemory, LearnerSource, PolicySource
from nouscoder.generation.worker import RolloutWorker
from nouscoder.input_file import read_json_object
from nouscoder.policy_folder.identity import tokenizer_digests
from nouscoder.policy_folder.prompt_file import dateless, prompt_lines, with_recorded_prompt
from nouscoder.private_folder import temporary_folder
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.convert import InvalidMessage
from nouscoder.rpc.learner_client import LearnerClient
from nouscoder.rpc.pairs import MANIFEST, TASK
from nouscoder.rpc.server import Health, Served, run_until_stopped, start_grpc, stop_event
from nouscoder.rpc.tls import channel_credentials, server_credentials
from nouscoder.rpc.verifier_client import VerifierClient, verifier_token
from nouscoder.rpc.worker import held_worker_id
from nouscoder.store.rollout_record import encode_rollout
from nouscoder.v1 import generation_pb2 as v1
from nouscoder.v1 import generation_pb2_grpc

if TYPE_CHECKING:
    from nouscoder.generation.engines.vllm import VllmEngine

log = logging.getLogger(__name__)

FULL_NAME = v1.DESCRIPTOR.services_by_name["GenerationService"].full_name
_DRAIN_S = 3.0
# One task is prefetched for each `_PREFETCH_SHARE` running tasks.
_PREFETCH_SHARE = 4
_PAUSE_S = 60.0
_LONGEST_PAUSE_S = 3600.0
_LONGEST_PIN_S = 86_400.0
# Keys of the section `generation` that a run can have otherwise than the one before, without a new engine.
_LIVE = ("max_tokens_total", "engine_tokens_total", "sampling", "environment", "partial_every_tokens", "openai")


# The change from one run to the next, with the same engine: the stages of a plan are runs of their own.


class RunRefused(NousCoderError):
    """The next run cannot be served. The message says why."""


class NextRun:
    """`started`: the configuration with which the engine was started; `reread` gives that of the next run.

    `wanted` is that of the run that was asked for, if any, and `asked` is set then.
    """

    def __init__(self, started: Config, reread: Callable[[], Config] | None) -> None:
        self._started = started
        self._current = started
        self._reread = reread
        self.wanted: Config | None = None
        self.asked = asyncio.Event()
        self._served: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def change(self) -> str:
        """Change to the next run. Returns its name when it is served. Raises RunRefused and ConfigError."""
        if self._reread is None:
            raise RunRefused("the process was started without a configuration file, so there is no next run")
        config = await asyncio.to_thread(self._reread)
        if config == self._current:
            return config.run.name
        if self.wanted is not None:
            raise RunRefused(f"the change to run {self.wanted.run.name} is in progress")
        reason = await asyncio.to_thread(reason_to_start_again, self._started, config)
        if reason is not None:
            raise RunRefused(reason)
        self.wanted = config
        self.asked.set()
        return await asyncio.shield(self._served)

    def begun(self, config: Config) -> None:
        """The run of `config` is served now."""
        self._current, self.wanted = config, None
        self.asked.clear()
        served, self._served = self._served, asyncio.get_running_loop().create_future()
        served.set_result(config.run.name)


def reason_to_start_again(started: Config, wanted: Config) -> str | None:
    """Why the engine that was started with one configuration cannot sample for another; None when it can."""
    before, after = started.generation, wanted.generation
    for key, needed in (
        ("generation.max_tokens_total", after.max_tokens_total),
        ("evaluation.max_tokens_total", wanted.evaluating.generation.max_tokens_total),
    ):
        if needed > started.engine_tokens:
            return f"{key} {needed} is more than the {started.engine_tokens} tokens that the engine was started for"
    if after.guest_places > before.guest_places:
        return (
            f"the engine was started with {before.guest_places} places for generation.openai, not {after.guest_places}"
        )
    for name in type(after).model_fields:
        if name not in _LIVE and getattr(before, name) != getattr(after, name):
            return f"generation.{name} is not what the engine was started with"
    if before.policy_from is not Transport.FOLDER:
        return "policies are fetched from the learner, which is another one in each run"
    if before.engine != "torch" and before.vllm.on_update == "keep":
        # Its prefix cache has a key for each version, and versions begin again at 0 in each run.
        return "generation.vllm.on_update keep would find prompts in the cache of the run before"
    if started.policy.router_replay != wanted.policy.router_replay:
        return "policy.router_replay is not what the engine was started with"
    if _architecture_of(started) != _architecture_of(wanted):
        return "config.json of its first policy is another one, as with YaRN"
    return None


def _architecture_of(config: Config) -> dict[str, Any]:
    """config.json of the policy that a run begins with. Raises RunRefused."""
    file: Path = config.in_run_folder(config.policy.path) / "config.json"
    return read_json_object(file, RunRefused)


# The gRPC API.

STATUS_CODES: dict[type[Exception], grpc.StatusCode] = {
    EngineError: grpc.StatusCode.INVALID_ARGUMENT,  # a task that cannot be sampled
    TaskRefused: grpc.StatusCode.INVALID_ARGUMENT,
    ToolUnavailable: grpc.StatusCode.UNAVAILABLE,
    SessionAbandoned: grpc.StatusCode.UNAVAILABLE,
    EngineStopped: grpc.StatusCode.UNAVAILABLE,
    PolicyMissing: grpc.StatusCode.UNAVAILABLE,
    PolicyRefused: grpc.StatusCode.FAILED_PRECONDITION,
    PoliciesDiffer: grpc.StatusCode.FAILED_PRECONDITION,
    PolicyUnusable: grpc.StatusCode.INVALID_ARGUMENT,
    RunRefused: grpc.StatusCode.FAILED_PRECONDITION,
    ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
}

Context = grpc.aio.ServicerContext[object, object]


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """The calls of generation.proto. Each converts the request, calls the engine, and converts the answer."""

    def __init__(self, engine: Engine, rollouts: Rollouts, policies: Policies, next_run: NextRun | None = None) -> None:
        self._engine = engine
        self._next_run = next_run
        self.serve_run(rollouts, policies)

    def serve_run(self, rollouts: Rollouts, policies: Policies, evaluations: Rollouts | None = None) -> None:
        """Answer for this run from now on. `evaluations` makes the rollouts of evaluations; None: `rollouts` does."""
        self._rollouts = rollouts
        self._evaluations = evaluations or rollouts
        self._policies = policies

    async def Generate(self, request: v1.GenerateRequest, context: Context) -> AsyncIterator[v1.GenerateResponse]:
        """The rollouts in order of completion. A cancelled call cancels its tasks.

        UNAVAILABLE without a policy, INVALID_ARGUMENT for a task, FAILED_PRECONDITION when another version is pinned.
        """
        tasks = [TASK.of(message) for message in request.tasks]
        if self._policies.current is None:
            raise PolicyMissing("no policy has been loaded yet")
        async with self._pinned(request):
            rollouts = self._evaluations if request.evaluation else self._rollouts
            async for rollout in rollouts.all_of(tasks):
                yield v1.GenerateResponse(record=encode_rollout(rollout)[1])

    def _pinned(self, request: v1.GenerateRequest) -> AbstractAsyncContextManager[None]:
        if not request.HasField("pin"):
            return nullcontext()
        if not 0 < request.pin.limit_s <= _LONGEST_PIN_S:
            raise InvalidMessage(f"pin.limit_s must be above 0 and at most {_LONGEST_PIN_S:.0f}")
        return self._policies.pinned(request.pin.policy_version, request.pin.limit_s)

    async def UpdatePolicy(self, request: v1.UpdatePolicyRequest, context: Context) -> v1.UpdatePolicyResponse:
        """Load a policy, with `older` also one that is. After an error the old weights stay in use.

        FAILED_PRECONDITION for one that is older, INVALID_ARGUMENT when its files are not the manifest's or do not fit.
        """
        manifest = MANIFEST.of(request.manifest)
        pause_s = await self._policies.update(manifest, older=request.older)
        return v1.UpdatePolicyResponse(policy_version=manifest.policy_version, pause_s=pause_s)

    async def Pause(
        self, request: v1.GenerationServicePauseRequest, context: Context
    ) -> v1.GenerationServicePauseResponse:
        """Pause between two steps. INVALID_ARGUMENT when `limit_s` is not in the range that the protocol names."""
        limit_s = request.limit_s or _PAUSE_S
        if not 0 < limit_s <= _LONGEST_PAUSE_S:
            raise InvalidMessage(f"limit_s must be above 0 and at most {_LONGEST_PAUSE_S:.0f}")
        await self._engine.pause(limit_s)
        return v1.GenerationServicePauseResponse()

    async def Resume(
        self, request: v1.GenerationServiceResumeRequest, context: Context
    ) -> v1.GenerationServiceResumeResponse:
        await self._engine.resume()
        return v1.GenerationServiceResumeResponse()

    async def Status(
        self, request: v1.GenerationServiceStatusRequest, context: Context
    ) -> v1.GenerationServiceStatusResponse:
        """The state of the engine. The policy is that of the present run."""
        policy = self._policies.current
        return v1.GenerationServiceStatusResponse(
            engine=self._engine.name,
            policy_version=policy.policy_version if policy is not None else 0,
            has_policy=policy is not None,
            running_rollouts=self._engine.num_running,
            waiting_rollouts=self._engine.num_waiting,
            num_tokens=self._engine.num_tokens,
            paused=self._engine.paused,
            idle_s=self._engine.idle_s,
        )

    async def ServeNextRun(self, request: v1.ServeNextRunRequest, context: Context) -> v1.ServeNextRunResponse:
        if self._next_run is None:
            raise RunRefused("this service has one run only")
        return v1.ServeNextRunResponse(run_name=await self._next_run.change())


# The process.


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
        service: GenerationService | None = None
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
                    service = GenerationService(engine, rollouts, policies, next_run)
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


def _served(config: Config, servicer: GenerationService, metrics: GenerationMetrics, health: Health) -> Served:
    def register(server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)

    return Served(
        config.generation.grpc,
        config.generation.metrics,
        [FULL_NAME],
        register,
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
