"""How many operations a pass takes, and how many a device can do: the model FLOPs utilisation.

The model FLOPs utilisation (MFU) is the operations of all rollouts that are trained on, by the seconds and by the peak
of all devices. With N weights at work on each token, L layers, h heads of size d, and rollouts of n_i tokens, one
forward and backward pass takes

    6 N * sum of n_i  +  6 L h d * sum of n_i^2

The first term is each weight's multiplication and addition, once forward and twice backward. The second is causal
attention: queries times keys, and weights times values, where a token attends to half of its rollout on average.
Chowdhery et al., "PaLM", arXiv 2204.02311, appendix B, count twice that: attention that is not causal. What is computed
again for the backward pass does not count, nor do softmax, norms and the optimizer.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

# The sizes of matrix products that reach the peak of a CPU in float32 in little time, and that of a GPU.
_CPU_SIZE, _GPU_SIZE = 1024, 8192

_LIMIT_S = 0.2

# Dense products in 16 bits, by the vendor's data sheets: operations per second of a device whose name holds this.
_DATA_SHEETS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}


def measured_peak_flops(device: str, dtype: torch.dtype = torch.float32) -> float:
    """Floating-point operations per second of the fastest of several matrix products on `device`, in this type."""
    size = _GPU_SIZE if torch.device(device).type == "cuda" else _CPU_SIZE
    random = torch.Generator(device).manual_seed(0)  # products of zeros or ones would be faster than those of weights
    left = torch.randn(size, size, device=device, generator=random).to(dtype)
    best_s = float("inf")
    end = time.monotonic() + _LIMIT_S
    while time.monotonic() < end or best_s == float("inf"):
        started = time.perf_counter()
        # Reading one element waits for a device that works asynchronously.
        float((left @ left)[0, 0])
        best_s = min(best_s, time.perf_counter() - started)
    return 2 * size**3 / best_s


def data_sheet_peak_flops(device: str) -> float | None:
    """The operations per second that the vendor states for dense products in 16 bits; None for a device not known."""
    if torch.device(device).type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in _DATA_SHEETS.items() if known in name), None)


def training_flops(model: PreTrainedModel, lengths: Iterable[int]) -> float:
    """The operations of the forward and backward pass of rollouts of these lengths, see the module."""
    known = [*lengths]
    return flops_of_sums(model, sum(known), sum(length**2 for length in known))


def flops_of_sums(model: PreTrainedModel, num_tokens: int, squared_tokens: int) -> float:
    """The same from the sum of the lengths, and that of their squares."""
    return 6.0 * (active_parameters(model) * num_tokens + attention_width(model) * squared_tokens)


def attention_width(model: PreTrainedModel) -> int:
    """Layers * heads * head size; 0 for a model without attention."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return 0
    head_size = vars(config).get("head_dim") or config.hidden_size // heads
    return int(config.num_hidden_layers * heads * head_size)


def active_parameters(model: PreTrainedModel) -> int:
    """The weights that work on each token: of the experts, as many as the router chooses; of others, all.

    An embedding that is not the head too only looks up a row, so it does not count.
    """
    of_experts = sum(weight.numel() for name, weight in model.named_parameters() if ".mlp.experts." in name)
    total: int = model.num_parameters()
    ends: Any = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[no-untyped-call]
    if None not in ends and ends[0].weight is not ends[1].weight:
        total -= int(ends[0].weight.numel())
    if not of_experts:
        return total
    config = model.config.get_text_config()
    experts = next((found for name in _EXPERTS if (found := getattr(config, name, None))), 0)
    return total - of_experts + of_experts * int(config.num_experts_per_tok) // int(experts) if experts else total


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
