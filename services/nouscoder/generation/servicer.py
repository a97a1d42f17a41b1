"""The calls of generation.proto over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, nullcontext

import grpc

from nouscoder.config import ConfigError
from nouscoder.generation.engines.base import Engine, EngineError, EngineStopped
from nouscoder.generation.environments.base import SessionAbandoned, TaskRefused, ToolUnavailable
from nouscoder.generation.next_run import NextRun, RunRefused
from nouscoder.generation.rollouts import Rollouts
from nouscoder.generation.weights.errors import PoliciesDiffer, PolicyMissing, PolicyRefused, PolicyUnusable
from nouscoder.generation.weights.policies import Policies
from nouscoder.rpc.convert import InvalidMessage
from nouscoder.rpc.pairs import MANIFEST, TASK
from nouscoder.store.rollout_record import encode_rollout
from nouscoder.v1 import generation_pb2 as v1
from nouscoder.v1 import generation_pb2_grpc

FULL_NAME = v1.DESCRIPTOR.services_by_name["GenerationService"].full_name
_PAUSE_S = 60.0
_LONGEST_PAUSE_S = 3600.0
_LONGEST_PIN_S = 86_400.0

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


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """The calls of generation.proto. Each converts the request, calls the engine, and converts the answer."""

    def __init__(self, engine: Engine, rollouts: Rollouts, policies: Policies, next_run: NextRun | None = None) -> None:
        self._engine = engine
        self._next_run = next_run
        self.serve_run(rollouts, policies)

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Have `server` answer the calls of generation.proto."""
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, server)

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
