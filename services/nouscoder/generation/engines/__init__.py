"""Engines. Only this module chooses one."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nouscoder.generation.engines.base import Engine, EngineError, EngineUnusable
from nouscoder.generation.engines.stepped import StepEngine, SteppedEngine
from nouscoder.generation.metrics import GenerationMetrics
from nouscoder.policy_folder.engine_choice import missing_engine, with_engine
from nouscoder.policy_folder.weights_files import (
    INDEX_FILE,
    WEIGHTS_FILE,
    WeightsMissing,
    WeightsUnusable,
    stored_weights,
    weights_files,
)

if TYPE_CHECKING:
    from nouscoder.config import Config

__all__ = ["open_engine", "step_engine"]


def open_engine(config: Config, policy_folder: Path, metrics: GenerationMetrics) -> AbstractAsyncContextManager[Engine]:
    """The engine of `config.generation.engine`, without weights. It samples while the context is open.

    Weights in the folder must fit its architecture, so that a run ends before it begins. Raises EngineUnusable.
    """
    config, _ = with_engine(config, policy_folder, beside_learner=False)
    if config.generation.engine != "fake":
        _check_first_weights(policy_folder)
    if config.generation.engine == "vllm":
        if missing := missing_engine(config):
            raise EngineUnusable(missing[0])
        from nouscoder.generation.engines.vllm import VllmEngine

        settings = config.generation.model_copy(update={"engine_tokens_total": config.engine_tokens})
        return VllmEngine(settings, policy_folder, metrics)
    return SteppedEngine(step_engine(config, policy_folder), metrics)


def _check_first_weights(folder: Path) -> None:
    """Raises EngineUnusable for weights in the folder that are not those of its config.json."""
    if not any((folder / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE)):
        return
    # They load torch.
    from nouscoder.generation.engines.architecture import Architecture
    from nouscoder.policy_folder.policy_tensors import PolicyTensors

    try:
        shapes = {name: tensor.shape for name, (_, tensor) in stored_weights(folder).items()}
        architecture = Architecture(folder)
        architecture.check_shapes(shapes, str(folder))
        PolicyTensors(weights_files(folder)).check_tied(architecture.tied, str(folder))
    except (WeightsMissing, WeightsUnusable, EngineError) as error:
        raise EngineUnusable(str(error)) from error


def step_engine(config: Config, policy_folder: Path) -> StepEngine[Any]:
    """The engine that decodes one step at a time. Raises EngineUnusable."""
    generation = config.generation
    if generation.engine == "fake":
        from nouscoder.generation.engines.fake import FakeEngine, script_of

        return FakeEngine(
            max_running=generation.max_running,
            max_tokens_total=config.engine_tokens,
            guest_places=generation.guest_places,
            script=script_of(generation.fake.median_tokens, generation.fake.sigma),
            step_s=generation.fake.step_s,
        )
    from nouscoder.generation.engines.torch import TorchEngine

    return TorchEngine(
        policy_folder,
        max_running=generation.max_running,
        max_tokens_total=config.engine_tokens,
        guest_places=generation.guest_places,
        device=generation.device,
        threads=generation.threads,
        dtype=generation.dtype,
        records_experts=config.policy.router_replay,
    )
