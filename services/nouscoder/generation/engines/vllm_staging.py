"""Policies from the learner's memory, seen from the service: vLLM's workers receive them while they decode.

INVARIANT: a policy counts as staged only when every worker has all of it, checked byte for byte, and its tensors are
those of the architecture. Staging never pauses vLLM, and never fails the engine unless vLLM itself has failed.
"""

from __future__ import annotations

import asyncio

from nouscoder.domain.policy import Meeting, PolicyManifest
from nouscoder.generation.engines.base import EngineError
from nouscoder.generation.engines.staging import Architecture
from nouscoder.generation.engines.vllm_control import VllmControl
from nouscoder.generation.engines.vllm_receiver import ReceiverState, order_of

_LOOK_AGAIN_S = 0.05


class VllmStaging:
    """Has vLLM's workers receive policies, one after the other."""

    def __init__(self, control: VllmControl, architecture: Architecture, limit_s: float) -> None:
        self._control = control
        self._architecture = architecture
        self._limit_s = limit_s
        self._checked: int | None = None

    async def stage(self, manifest: PolicyManifest, meeting: Meeting, in_use: int | None) -> None:
        """Return when all workers have the policy. Raises EngineError when one of them cannot get it in time."""
        policy_version, self._checked = manifest.policy_version, None
        await self._control.ask("stage_policy", order_of(manifest, meeting, self._limit_s), in_use)
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
