"""The model of the torch engine, with the attention that reads the slots.

INVARIANT: the model's own code computes everything that differs between families: norms, rotary positions,
experts, scales, the head, and which keys each layer sees. Here are only the masks for rows of different lengths, whose
cache is in kv_cache.py, and the choice of the states that get logits. The first weights are checked: on short rows, the
logits with the cache must be those of the model's plain forward pass with its own attention.

transformers finds attention and masks in two registries, by the name in `attn_implementation`. A mask function there
gets the number of earlier tokens from the cache; here that is one number for each row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

from nouscoder.generation.engines.architecture import model_config
from nouscoder.generation.engines.base import EngineError, EngineUnusable
from nouscoder.generation.engines.kv_cache import DecodePass, KeyValueCache, PromptPass
from nouscoder.policy_folder.engine_types import engine_fault, positions_of
from nouscoder.policy_folder.pretrained import build_model

SLOTS_ATTENTION = "nouscoder_slots"


def slots_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    mask_function: Callable[..., Any],
    dtype: torch.dtype,
    device: torch.device,
    local_size: int | None = None,
    **_: object,
) -> Tensor | None:
    """The additive mask [rows or 1, 1, queries, keys]; None when it is plainly causal and all tokens are new.

    `q_offset`: earlier tokens, of all rows or of each one [rows]. `mask_function`: the model's, of
    (row, head, query, key), integers that broadcast. `local_size`: its window or chunk.
    """
    if isinstance(q_offset, int):
        if mask_function is causal_mask_function or (local_size is not None and kv_length <= local_size):
            return None
        q_offset, batch_size = torch.tensor([q_offset], device=device), 1
    queries = q_offset[:, None, None, None]
    if q_length > 1:
        queries = queries + torch.arange(q_length, device=device)[:, None]
    rows, keys = torch.arange(batch_size, device=device), torch.arange(kv_length, device=device)
    seen = mask_function(rows[:, None, None, None], rows[:1], queries, keys)
    return torch.where(seen, 0.0, float("-inf")).to(dtype)


def slots_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, Tensor | None]:
    """torch's attention; with soft caps or sinks, which that does not have, the model's own computation."""
    if settings.get("softcap") is None and settings.get("s_aux") is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    if attention_mask is None:
        width = query.shape[2]
        attention_mask = query.new_full((width, width), float("-inf")).triu_(1)[None, None]
    own: Any = sys.modules[type(module).__module__]
    output: tuple[Tensor, Tensor | None] = own.eager_attention_forward(
        module, query, key, value, attention_mask, **settings
    )
    return output


AttentionInterface.register(SLOTS_ATTENTION, slots_attention)
AttentionMaskInterface.register(SLOTS_ATTENTION, slots_mask)

# Bounds of the check: on the largest difference of a log-probability in float32, where another order of the sums makes
# 1e-5 to 1e-3; on the mean difference in 16 bits, where rounding makes 0.01 to 0.1.
_LARGEST, _MEAN_OF_16_BITS = 1e-2, 0.3
_CHECKED_WIDTH, _CHECKED_PROMPTS, _CHECKED_WINDOW = 12, (8, 5), 4


class Decoder:
    """`model`: without gradients. `positions`: the most tokens of a row."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """Build the architecture without weights. Raises EngineUnusable, and what torch raises without the device."""
        config = model_config(folder)
        # A Llama has no layer types: its attention is always full.
        if fault := engine_fault("torch", config.model_type, getattr(config, "layer_types", None) or ()):
            raise EngineUnusable(f"{folder}: {fault}")
        model: Any = build_model(AutoModelForCausalLM, config, attn_implementation=SLOTS_ATTENTION, dtype=dtype)
        self.model = model.eval().requires_grad_(False).to(device)
        self.config = self.model.config
        self.positions: int = positions_of(config.to_dict()) or config.max_position_embeddings
        self._device = device
        self._last: Tensor | None = None
        self.model.get_output_embeddings().register_forward_pre_hook(self._keep_last)

    def logits(
        self, token_ids: Tensor, positions: Tensor, passing: PromptPass | DecodePass, last: Tensor | None = None
    ) -> Tensor:
        """Logits [rows, vocabulary] after the token in column `last` of each row of `token_ids` [rows, width].

        Without `last` there is one column. `positions` [rows or 1, width] are those of the tokens in their sequences.
        """
        self._last = last
        output = self.model(input_ids=token_ids, position_ids=positions, past_key_values=passing, use_cache=False)
        logits: Tensor = output.logits[:, 0]
        return logits

    def _keep_last(self, head: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
        """Of the head's input, keep one state of each row, so that no other logits are computed."""
        if self._last is None:
            return None
        (states,) = inputs
        return (states[torch.arange(len(states), device=states.device), self._last][:, None],)

    @torch.inference_mode()
    def check(self, source: str) -> None:
        """Compare two short rows with their plain forward pass. Raises EngineError naming `source` when they differ."""
        rows, width = len(_CHECKED_PROMPTS), _CHECKED_WIDTH
        ids = (7 + 5 * torch.arange(rows * width, device=self._device)).view(rows, width) % self.config.vocab_size
        window = getattr(self.config, "sliding_window", None)
        try:
            if window:
                self.config.sliding_window = _CHECKED_WINDOW
            ours = self._log_p_with_cache(ids)
            self.model.set_attn_implementation("eager")
            self._last = None
            plain = self.model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
        finally:
            if window:
                self.config.sliding_window = window
            self.model.set_attn_implementation(SLOTS_ATTENTION)
        starts = [length - 1 for length in _CHECKED_PROMPTS]
        wanted = torch.stack([plain[row, start : start + ours.shape[1]] for row, start in enumerate(starts)])
        # NaN, which infinite logits give, is found when it is sampled from.
        differences = (ours - wanted).abs().nan_to_num()
        is_exact = self.model.dtype is torch.float32
        difference = float(differences.max() if is_exact else differences.mean())
        if difference > (_LARGEST if is_exact else _MEAN_OF_16_BITS):
            raise EngineError(
                f"{source}: the torch engine computes this {self.config.model_type} wrong: a log-probability differs by"
                f' {difference:.3g} from transformers\' own; take generation.engine = "vllm"'
            )

    def _log_p_with_cache(self, ids: Tensor) -> Tensor:
        """Log-probabilities [rows, steps, vocabulary] from a prompt pass, and from decoding the other tokens."""
        lengths = torch.tensor(_CHECKED_PROMPTS, device=self._device)
        rows, longest = torch.arange(len(lengths), device=self._device), int(lengths.max())
        cache = KeyValueCache(len(lengths), _CHECKED_WIDTH)
        positions = torch.arange(longest, device=self._device)[None]
        found = [self.logits(ids[:, :longest], positions, PromptPass(cache, 0, rows), lengths - 1)]
        for step in range(_CHECKED_WIDTH - longest):
            at = lengths + step
            passing = DecodePass(cache, at, longest + step + 1)
            found.append(self.logits(ids[rows, at][:, None], at[:, None], passing))
        return torch.stack(found, dim=1).float().log_softmax(-1)
