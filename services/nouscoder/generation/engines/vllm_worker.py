"""Methods that vLLM's workers have in addition (vLLM's `worker_extension_cls`), called by name in each worker."""

from __future__ import annotations

from typing import Any


class StagingWorker:
    """Hands calls to this project's weight-transfer engine (vllm_files.py). vLLM mixes it into its worker class."""

    weight_transfer_engine: Any

    def stage_policy(self, order: dict[str, Any], in_use: int | None) -> None:
        """Begin to receive a policy; forget all others but `in_use`, the version in use if it came from memory."""
        self.weight_transfer_engine.stage(order, in_use)

    def staged_report(self, policy_version: int) -> dict[str, str]:
        """How far that is; see PolicyReceiver.report."""
        report: dict[str, str] = self.weight_transfer_engine.staged(policy_version).report()
        return report

    def staged_shapes(self, policy_version: int) -> dict[str, list[int]]:
        """The shape of each tensor of a staged policy."""
        shapes: dict[str, list[int]] = self.weight_transfer_engine.staged(policy_version).shapes()
        return shapes
