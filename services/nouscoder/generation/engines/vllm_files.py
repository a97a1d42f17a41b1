"""The weight-transfer engine `files` of vLLM: the files of a policy, read by each worker and loaded in place.

INVARIANT: after `receive_weights` and `finish_weight_update` the model holds exactly the tensors of the policy. After
an error in `receive_weights` its weights are undefined, and another whole update may follow.

vLLM loads it in each of its processes, by the entry point `vllm.general_plugins` of this project. The tensors go
through vLLM's layerwise reload, so layouts that a platform packs after loading (CPU kernels, quantised layers) and the
shards of tensor parallelism are made again from the files. An adapter is merged into its base on the way, one tensor at
a time.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from nouscoder.generation.engines.parent_watch import end_with_parent
from nouscoder.generation.engines.vllm_start import FILES_BACKEND
from nouscoder.policy_folder.policy_tensors import PolicyTensors


@dataclass
class FilesInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Files need no connection."""


@dataclass
class FilesUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The files of one policy version, by their paths on this machine."""

    paths: list[str]


class FilesWeightTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Loads whole policies from files; each update is one call of `update_weights`."""

    init_info_cls = FilesInitInfo
    update_info_cls = FilesUpdateInfo
    model: Any
    model_config: Any

    def init_transfer_engine(self, init_info: FilesInitInfo) -> None:
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        """Put the layers into the form in which checkpoints are loaded."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the files. Raises WeightsUnusable or ValueError; the weights are then undefined."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FilesUpdateInfo) -> None:
        """Load the files one tensor at a time. After an error the layers are closed, so that an update can follow."""
        try:
            policy = PolicyTensors([Path(path) for path in update_info.paths])
            device = torch.empty(0, device=current_platform.device_type).device  # this worker's
            self.model.load_weights(policy.read(device=device))
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
        """Nothing to release."""


def register() -> None:
    """Make the engine known to vLLM in this process; it may be called several times.

    vLLM's engine process would outlive a killed service and hold its memory, so it watches its parent.
    """
    end_with_parent()
    if FILES_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(FILES_BACKEND, FilesWeightTransfer)
        # It warns in every update of layers that have no weights of their own: tied output layers, rotary tables.
        # The check of the files before the update finds what is really missing.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
