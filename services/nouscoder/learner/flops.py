"""The peak rate of the device and the weights at work, for the model FLOPs utilisation."""

from __future__ import annotations

import time

import torch
from transformers import PreTrainedModel

_SIZE = 1024
_LIMIT_S = 0.2


def measured_peak_flops(device: str) -> float:
    """Floating-point operations per second of the fastest of several float32 matrix products on `device`."""
    left = torch.ones(_SIZE, _SIZE, device=device)
    best_s = float("inf")
    end = time.monotonic() + _LIMIT_S
    while time.monotonic() < end or best_s == float("inf"):
        started = time.perf_counter()
        # Reading one element waits for a device that works asynchronously.
        float((left @ left)[0, 0])
        best_s = min(best_s, time.perf_counter() - started)
    return 2 * _SIZE**3 / best_s


def active_parameters(model: PreTrainedModel) -> int:
    """The weights that work on each token: of the experts, as many as the router chooses; of others, all."""
    of_experts = sum(weight.numel() for name, weight in model.named_parameters() if ".mlp.experts." in name)
    total: int = model.num_parameters()
    if not of_experts:
        return total
    config = model.config.get_text_config()
    return total - of_experts + of_experts * int(config.num_experts_per_tok) // int(config.num_experts)
