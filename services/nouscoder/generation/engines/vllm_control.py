"""Control of vLLM: pause, resume, load weights, empty the caches. Each call has a limit and known errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

from nouscoder.generation.engines.base import EngineError, EngineStopped

# A pause ends after the step in progress; the other calls are instant.
_CALL_LIMIT_S = 120.0


class VllmControl:
    """The calls of an AsyncLLM that change its state. One caller at a time uses them.

    Each raises EngineError when vLLM refuses the call. It raises EngineStopped when vLLM does not answer in time or has
    failed; vLLM's state is then unknown.
    """

    def __init__(self, llm: Any, update_limit_s: float) -> None:
        self._llm = llm
        self._update_limit_s = update_limit_s

    async def pause(self) -> None:
        """Stop decoding after the step in progress. Requests, keys and values stay."""
        await self._call(self._llm.pause_generation(mode="keep", clear_cache=False))

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
        """The answer of each worker to a call of `method` (vllm_worker.py). Raises EngineError, EngineStopped.

        An answer that does not come in time is no failure of the engine: vLLM may be busy with an update.
        """
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
