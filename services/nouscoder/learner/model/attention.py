"""Which attention the learner's models use, and attention of packed rows without padding. Only this module chooses.

sdpa      blocks of padded sequences (packed_attention.py), or one call for each sequence where several processes
          share a row; on any machine, in any type
varlen    torch's varlen_attn, on CUDA in 16 bits
flash     flash-attention 2, when installed, on CUDA in 16 bits
auto      the first of flash, varlen, sdpa that runs here
"""

from __future__ import annotations

import logging
from functools import partial
from importlib.util import find_spec

import torch
from transformers import AttentionInterface, PreTrainedModel

from nouscoder.config import Attention
from nouscoder.learner.model.kernels import (
    FA2_VARLEN,
    SDPA_VARLEN,
    TORCH_VARLEN,
    fa2_varlen,
    sdpa_varlen,
    torch_varlen,
    varlen_attention,
)
from nouscoder.learner.model.packed_attention import (
    PACKED_ATTENTION,
    attend_packed,
)

log = logging.getLogger(__name__)


for _name, _kernel in ((TORCH_VARLEN, torch_varlen), (FA2_VARLEN, fa2_varlen), (SDPA_VARLEN, sdpa_varlen)):
    AttentionInterface.register(_name, partial(varlen_attention, _kernel))


_BEST_FIRST = (Attention.FLASH, Attention.VARLEN, Attention.SDPA)

_NAMES = {Attention.SDPA: PACKED_ATTENTION, Attention.VARLEN: TORCH_VARLEN, Attention.FLASH: FA2_VARLEN}

# What the kernels of both packages are built for.
_OLDEST_GPU = (8, 0)

_LARGEST_HEAD, _HEAD_MULTIPLE = 256, 8


def use_attention(model: PreTrainedModel, wanted: Attention, dtype: torch.dtype, *, shares_rows: bool = False) -> None:
    """Have the model use this attention on its device. `dtype` is the type of its activations.

    `shares_rows`: several processes hold parts of a row. Raises ValueError when this attention cannot run here.
    """
    if special := _beyond_kernels(model):
        if shares_rows or wanted not in (Attention.AUTO, Attention.SDPA):
            setting = "context_parallel" if shares_rows else f"attention {wanted.value}"
            raise ValueError(
                f"learner.{setting} cannot run here: a {model.config.model_type} model has {special}, which only"
                " learner.attention sdpa on whole rows has"
            )
        wanted = Attention.SDPA
    kind = chosen(wanted, model.device, dtype, _head_size(model))
    attend_packed(model, SDPA_VARLEN if shares_rows and kind is Attention.SDPA else _NAMES[kind])
    log.info("attention", extra={"attention": kind.value, "device": str(model.device), "dtype": str(dtype)})


def chosen(wanted: Attention, device: torch.device, dtype: torch.dtype, head_size: int) -> Attention:
    """The attention to use, never AUTO. Raises ValueError when `wanted` cannot run there."""
    if wanted is Attention.AUTO:
        return next(kind for kind in _BEST_FIRST if not why_not(kind, device, dtype, head_size))
    if reason := why_not(wanted, device, dtype, head_size):
        raise ValueError(f"learner.attention {wanted.value} cannot run here: {reason}")
    return wanted


def why_not(kind: Attention, device: torch.device, dtype: torch.dtype, head_size: int) -> str:
    """Why this attention cannot run there; empty when it can."""
    if kind is Attention.SDPA:
        return ""
    if kind is Attention.FLASH and find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    if device.type != "cuda":
        return f"it needs a CUDA device, and learner.device is {device}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it needs 16-bit activations, and these are {dtype}"
    if head_size > _LARGEST_HEAD or head_size % _HEAD_MULTIPLE:
        return (
            f"it needs a head size up to {_LARGEST_HEAD} in steps of {_HEAD_MULTIPLE}, and the policy's is {head_size}"
        )
    if (capability := torch.cuda.get_device_capability(device)) < _OLDEST_GPU:
        oldest, own = (".".join(map(str, version)) for version in (_OLDEST_GPU, capability))
        return f"it needs compute capability {oldest}, and {device} has {own}"
    return ""


def _head_size(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 1
    # Gemma 4 has one a layer, and refuses to name one for all.
    return int(vars(config).get("head_dim") or config.hidden_size // heads)


def _beyond_kernels(model: PreTrainedModel) -> str:
    """What the model's attention has that no kernel here has; empty without such a thing."""
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        return "soft caps inside its attention"
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        return "attention sinks"
    return ""
