"""Starts vLLM with the settings of a configuration, and what its processes have of this project.

Only this module names vLLM's arguments. It does not import vLLM before the environment is set. In vLLM's processes
vllm_files.py is loaded, which uses `end_with_parent`: a killed service leaves no engine behind.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nouscoder.config.generation import GenerationSection
from nouscoder.generation.engines.base import EngineUnusable

# The weight-transfer engine of vllm_files.py. That module imports vLLM, so it must not be loaded here.
FILES_BACKEND = "files"
_WORKER_EXTENSION = "nouscoder.generation.engines.vllm_start.StagingWorker"
_CPU_STEP_TOKENS = 4096  # a step on a CPU takes at least so many tokens

_TICK_S = 0.5
_THREAD = "parent-watch"

OnStep = Callable[[int], None]


def start_vllm(settings: GenerationSection, folder: Path, max_tokens_total: int, on_step: OnStep) -> Any:
    """An AsyncLLM with random weights. `on_step` gets each step's number of tokens. Raises EngineUnusable."""
    _set_environment(settings)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    wanted = torch.device(settings.device).type
    if current_platform.device_type != wanted:
        raise EngineUnusable(
            f"this vLLM runs on {current_platform.device_type}; generation.device asks for {settings.device}"
        )
    arguments = AsyncEngineArgs(**_arguments(settings, folder, max_tokens_total))
    try:
        # vLLM's choice of max_num_batched_tokens is that of its offline API; without a context it is 2,048 everywhere.
        return AsyncLLM.from_engine_args(
            arguments, usage_context=UsageContext.LLM_CLASS, stat_loggers=[_step_logger(on_step)]
        )
    except (ValueError, RuntimeError, ImportError) as error:
        raise EngineUnusable(f"vLLM does not start with the policy folder {folder}: {error}") from error


def start_offline(settings: GenerationSection, folder: Path, max_tokens_total: int) -> Any:
    """vLLM's offline API, an LLM, with the weights in `folder` and otherwise the same settings. For benchmarks."""
    _set_environment(settings)
    from vllm import LLM

    return LLM(**_arguments(settings, folder, max_tokens_total) | {"load_format": "auto"})


def _arguments(settings: GenerationSection, folder: Path, max_tokens_total: int) -> dict[str, Any]:
    vllm = settings.vllm
    arguments = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "load_format": "dummy",
        "weight_transfer_config": {"backend": FILES_BACKEND},
        "worker_extension_cls": _WORKER_EXTENSION,
        "dtype": vllm.dtype,
        "max_model_len": max_tokens_total,
        "max_num_seqs": settings.max_running + settings.guest_places,
        "max_num_batched_tokens": vllm.max_num_batched_tokens or None,
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "gpu_memory_utilization": vllm.gpu_memory_utilization,
        "kv_cache_memory_bytes": vllm.kv_cache_memory_bytes or None,
        "enable_prefix_caching": vllm.prefix_caching,
        "enforce_eager": vllm.enforce_eager,
        # The log-probability of the distribution that the token was drawn from, at its temperature.
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # the folder's own sampling defaults are not used
    }
    if torch.device(settings.device).type == "cpu":
        # After each part of a prompt but the last, vLLM sets the random stream back, which a CPU's generator cannot do.
        step_tokens = max(vllm.max_num_batched_tokens, _CPU_STEP_TOKENS, max_tokens_total)
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": step_tokens}
    return arguments


def _set_environment(settings: GenerationSection) -> None:
    """What vLLM reads only from the environment; a value that is set already is kept."""
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # gRPC does not survive a fork
        "VLLM_CONFIGURE_LOGGING": "0",  # the service's own logging is used
    }
    if settings.vllm.batch_invariant:
        defaults["VLLM_BATCH_INVARIANT"] = "1"
    if torch.device(settings.device).type == "cpu":
        # vLLM would bind every engine of a machine to the same cores.
        defaults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(settings.threads)}
        if settings.vllm.enforce_eager:
            defaults["TORCHDYNAMO_DISABLE"] = "1"  # the sampler would be compiled at the first request
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _step_logger(on_step: OnStep) -> Any:
    """A factory of vLLM's statistics loggers, which are called after each step."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class StepLogger(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            if iteration_stats is not None:
                on_step(iteration_stats.num_generation_tokens)

        def log_engine_initialized(self) -> None:
            pass

    return StepLogger


def end_with_parent() -> None:
    """Watch the parent in a thread, if `multiprocessing` started this process. Repeated calls change nothing."""
    watched = any(thread.name == _THREAD for thread in threading.enumerate())
    if multiprocessing.parent_process() is not None and not watched:
        threading.Thread(target=_watch, args=(os.getppid(),), name=_THREAD, daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_TICK_S)
    os.kill(os.getpid(), signal.SIGKILL)  # nobody is left who could close it


class StagingWorker:
    """Methods that vLLM's workers have in addition (vLLM's `worker_extension_cls`), called by name in each worker.

    They hand calls to this project's weight-transfer engine (vllm_files.py). vLLM mixes the class into its worker's.
    """

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
