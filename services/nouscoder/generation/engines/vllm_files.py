"""The weight-transfer engine `files` of vLLM: a policy's tensors from its files, or staged in memory before.

Each worker reads the files itself, or has received the bytes of the shards from the learner's memory
(generation/weights/receiver.py) and loads those.

INVARIANT: after `receive_weights` and `finish_weight_update` the model holds exactly the tensors of the policy. After
an error in `receive_weights` its weights are undefined, and another whole update may follow.

vLLM loads it in each of its processes, by the entry point `vllm.general_plugins` of this project. The tensors go
through vLLM's layerwise reload, so layouts that a platform packs after loading (CPU kernels, quantised layers) and the
shards of tensor parallelism are made again from the files. An adapter is merged into its base on the way, one tensor at
a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from nouscoder.generation.engines.vllm_start import FILES_BACKEND, end_with_parent
from nouscoder.generation.weights.receiver import PolicyReceiver
from nouscoder.policy_folder.policy_tensors import PolicyTensors


@dataclass
class PolicyInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Each transfer makes its own connection."""


@dataclass
class PolicyUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The weights of one policy version: files, by their paths on this machine, or the version that is staged."""

    paths: list[str] | None = None
    staged: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError unless one of the two is given."""
        if (self.paths is None) == (self.staged is None):
            raise ValueError("an update has either paths or a staged version")


class PolicyWeightTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Loads whole policies; each update is one call of `update_weights`."""

    init_info_cls = PolicyInitInfo
    update_info_cls = PolicyUpdateInfo
    model: Any
    model_config: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._staged: dict[int, PolicyReceiver] = {}

    def stage(self, order: dict[str, Any], in_use: int | None) -> None:
        """As StagingWorker.stage_policy. At most two policies are in memory."""
        self._staged = {version: receiver for version, receiver in self._staged.items() if version == in_use}
        base = None if order["base"] is None else self.staged(order["base"])
        rank = 1 + self.parallel_config.rank  # rank 0 of the rendezvous is the learner
        self._staged[order["policy_version"]] = PolicyReceiver(order, rank, torch.device(self.device), base)

    def staged(self, policy_version: int) -> PolicyReceiver:
        """The staged policy of this version, in whatever state. Raises ValueError."""
        if policy_version not in self._staged:
            raise ValueError(f"policy version {policy_version} is not staged")
        return self._staged[policy_version]

    def init_transfer_engine(self, init_info: PolicyInitInfo) -> None:
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        """Put the layers into the form in which checkpoints are loaded."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the policy. Raises WeightsUnusable or ValueError; the weights are then undefined."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: PolicyUpdateInfo) -> None:
        """Load one tensor at a time. After an error the layers are closed, so that an update can follow."""
        try:
            self.model.load_weights(self._tensors(update_info))
        except BaseException:
            self.finish_weight_update()
            raise

    def finish_weight_update(self) -> None:
        """Put the layers into the form in which the model runs."""
        finalize_layerwise_reload(self.model, self.model_config)
        # The CPU platform packs a copy of each matrix. A tied output layer loads no tensor, so the reload leaves its
        # old copy in use.
        if current_platform.is_cpu():
            for layer in self.model.modules():
                if isinstance(layer, ParallelLMHead):
                    layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Forget what is staged."""
        self._staged = {}

    def _tensors(self, update_info: PolicyUpdateInfo) -> Iterator[tuple[str, Tensor]]:
        if update_info.staged is None:
            policy = PolicyTensors([Path(path) for path in update_info.paths or []])
            device = torch.empty(0, device=current_platform.device_type).device  # this worker's
            return policy.read(device=device)
        return iter(self.staged(update_info.staged).tensors().items())


def register() -> None:
    """Make the engine known to vLLM in this process; it may be called several times.

    vLLM's engine process would outlive a killed service and hold its memory, so it watches its parent.
    """
    end_with_parent()
    if FILES_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(FILES_BACKEND, PolicyWeightTransfer)
        # It warns in every update of layers that have no weights of their own: tied output layers, rotary tables.
        # The check of the files before the update finds what is really missing.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
