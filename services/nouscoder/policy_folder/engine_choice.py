"""The engine of `generation.engine = "auto"`: vllm where it is installed, runs the policy and has a GPU, else torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from pydantic import ValidationError

from nouscoder.config import Config
from nouscoder.config.tree import sentences
from nouscoder.policy_folder.inspection import engine_faults

_MOST_SHARED = 0.5  # of the memory of a device that vLLM shares with the learner


def with_engine(config: Config, folder: Path, *, beside_learner: bool) -> tuple[Config, str]:
    """`config` with the engine that samples from the policy in `folder`; and why `auto` is not vllm on a GPU, or ""."""
    if config.generation.engine != "auto":
        return config, ""
    if config.generation.device.partition(":")[0] != "cuda":
        return _with(config, "torch"), ""
    if why := _why_not_vllm(config, folder, beside_learner):
        return _with(config, "torch"), f"generation.engine is torch: {why}"
    return _with(config, "vllm"), ""


def shared_device_fault(config: Config) -> str:
    """Why vLLM cannot share its device with the learner, which fills it meanwhile; "" if it can, or does not."""
    device, share = config.generation.device, config.generation.vllm.gpu_memory_utilization
    if not config.shares_device or share <= _MOST_SHARED:
        return ""
    return (
        f"generation.vllm.gpu_memory_utilization: vLLM would take {share:g} of {device}, and the learner needs it too:"
        f" set at most {_MOST_SHARED:g} (docs/operating.md, One GPU), or another generation.device"
    )


def _why_not_vllm(config: Config, folder: Path, beside_learner: bool) -> str:
    if not vllm_is_installed():
        return "vLLM is not installed"
    if faults := engine_faults(folder, "vllm"):
        return faults[0]
    try:
        wanted = _with(config, "vllm")
    except ValidationError as error:
        return "; ".join(sentences(error, Config))
    return shared_device_fault(wanted) if beside_learner else ""


def vllm_is_installed() -> bool:
    """Whether this Python has vLLM."""
    return find_spec("vllm") is not None


def missing_engine(config: Config) -> list[str]:
    """The sentence that the engine of the configuration is not installed, if it is so."""
    if config.generation.engine != "vllm" or vllm_is_installed():
        return []
    return ['generation.engine is "vllm", and vLLM is not installed: see docs/operating.md']


def _with(config: Config, engine: str) -> Config:
    """`config` with this engine, checked anew. Raises ValidationError."""
    tree = config.model_dump(mode="json", by_alias=True)
    tree["generation"]["engine"] = engine
    return Config.model_validate(tree)
