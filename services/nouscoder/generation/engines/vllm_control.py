"""The calls that change the state of vLLM: each has a limit and known errors.

INVARIANT of `VllmStaging`: a policy counts as staged only when every worker has all of it, checked byte for byte, and
its tensors are those of the architecture. Staging never pauses vLLM, and never fails the engine unless vLLM has failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

from nouscoder.domain.policy import PolicyManifest, Rendezvous
from nouscoder.generation.engines.architecture import Architecture
from nouscoder.generation.engines.base import EngineError, EngineStopped
from nouscoder.generation.weights.receiver import ReceiverState, order_of

# A pause ends after the step in progress; the other calls are instant.
_CALL_LIMIT_S = 120.0
_LOOK_AGAIN_S = 0.05
_OUTPUTS_EVERY_S = 0.001


class VllmControl:
    """The calls of an AsyncLLM that change its state. One caller at a time uses them.

    Each raises EngineError when vLLM refuses it, and EngineStopped when vLLM has failed or gives no answer in time.
    """

    def __init__(self, llm: Any, update_limit_s: float) -> None:
        self._llm = llm
        self._update_limit_s = update_limit_s

    async def pause(self) -> None:
        """Stop decoding after the step in progress. Requests, keys and values stay."""
        await self._call(self._llm.pause_generation(mode="keep", clear_cache=False))

    async def await_outputs(self) -> None:
        """Wait, during a pause, until the outputs of all steps have been read in this process.

        vLLM sends the answer to `pause` behind the outputs of its last steps. But one task reads answers, and another
        one the outputs, which under load is some steps behind.
        """
        await self._call(self._outputs_read())

    async def _outputs_read(self) -> None:
        outputs = self._llm.engine_core.outputs_queue
        # The task that reads them waits in `get` when it has dealt with all. Without any request there is none yet.
        while self._llm.output_handler is not None and (outputs.qsize() or not outputs._getters):
            await asyncio.sleep(_OUTPUTS_EVERY_S)

    async def resume(self) -> None:
        """Decode again. Raises EngineStopped for every failure, because a paused engine is of no use."""
        try:
            await self._call(self._llm.resume_generation())
        except EngineStopped:
            raise
        except EngineError as error:
            raise EngineStopped(f"vLLM stays paused: {error}") from error

    async def forget_keys_and_values(self) -> None:
        """Empty the KV cache, during a pause. Running requests are computed again from their tokens."""
        await self._call(self._llm.reset_prefix_cache(reset_running_requests=True))

    async def load(self, weights: Mapping[str, Any], policy_version: int) -> None:
        """Load weights in every worker, during a pause, and label tokens with their version from now on.

        `weights` are the fields of PolicyUpdateInfo (vllm_files.py). After EngineError the weights are undefined until
        another load has succeeded.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        request = WeightTransferUpdateRequest(update_info=dict(weights))
        await self._call(self._llm.start_weight_update())
        await self._call(self._llm.update_weights(request), self._update_limit_s)
        await self._call(self._llm.finish_weight_update(str(policy_version)), self._update_limit_s)

    async def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Each worker's answer to a `method` of StagingWorker. Raises EngineError; late answers fail no engine."""
        try:
            async with asyncio.timeout(self._update_limit_s):
                answers: list[Any] = await self._llm.collective_rpc(method, args=arguments)
        except TimeoutError as error:
            raise EngineError(f"vLLM did not answer {method} within {self._update_limit_s:.0f} s") from error
        except Exception as error:
            raise self._failure(error) from error
        return answers

    async def _call(self, call: Awaitable[Any], limit_s: float = _CALL_LIMIT_S) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await call
        except TimeoutError as error:
            raise EngineStopped(f"vLLM did not answer a call within {limit_s:.0f} s") from error
        except Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> EngineError:
        reason = str(error) or type(error).__name__
        if self._llm.errored:
            return EngineStopped(f"the engine failed: {reason}")
        return EngineError(f"vLLM refused a call: {reason}")


class VllmStaging:
    """Has vLLM's workers receive policies from the learner's memory while they decode, one after the other."""

    def __init__(self, control: VllmControl, architecture: Architecture, limit_s: float) -> None:
        self._control = control
        self._architecture = architecture
        self._limit_s = limit_s
        self._checked: int | None = None

    async def stage(self, manifest: PolicyManifest, rendezvous: Rendezvous, in_use: int | None) -> None:
        """Return when all workers have the policy. Raises EngineError when one of them cannot get it in time."""
        policy_version, self._checked = manifest.policy_version, None
        await self._control.ask("stage_policy", order_of(manifest, rendezvous, self._limit_s), in_use)
        try:
            async with asyncio.timeout(self._limit_s):
                while not await self._all_ready(policy_version):
                    await asyncio.sleep(_LOOK_AGAIN_S)
        except TimeoutError:
            raise EngineError(f"policy version {policy_version} did not arrive within {self._limit_s:g} s") from None
        for shapes in await self._control.ask("staged_shapes", policy_version):
            found = {name: tuple(shape) for name, shape in shapes.items()}
            self._architecture.check_shapes(found, f"policy version {policy_version}, from the learner's memory")
        self._checked = policy_version

    def check(self, policy_version: int) -> None:
        """Raises EngineError unless this is the policy that `stage` staged last."""
        if self._checked != policy_version:
            raise EngineError(f"policy version {policy_version} is not staged")

    async def _all_ready(self, policy_version: int) -> bool:
        reports = await self._control.ask("staged_report", policy_version)
        for report in reports:
            if report["state"] == ReceiverState.FAILED:
                raise EngineError(f"policy version {policy_version} from the learner's memory: {report['reason']}")
        return all(report["state"] == ReceiverState.READY for report in reports)
