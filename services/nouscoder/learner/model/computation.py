"""The model that computes the passes of a trainer, made from the masters that are trained:

    masters -> adapters -> copy of another type or on another device -> attention, graphs, experts, checkpoints -> FSDP2

Adapters are in weights.py, attention in attention.py, experts in experts.py and FSDP2 in ranks.py. Each part is there
only when the settings ask for it.

The masters are the weights of the trainer's model: the optimizer changes them, and checkpoints and published policies
hold them. They are float32, also when the model computes in another type: Micikevicius et al., "Mixed Precision
Training", arXiv 1710.03740. One process computes with a copy of the model, whose gradients are added up in the masters.
Of several ranks FSDP2 does the same: it rounds the weights that it gathers (ranks.py).

INVARIANT: whenever a pass begins, each weight of the copy is its master, rounded to the type of the computation. A
frozen weight exists once, in that type.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn.attention import varlen as _varlen  # noqa: F401 - defines an operation that is kept
from transformers import PreTrainedModel

from nouscoder.config import ComputeType, Config, LearnerSection, OptimizerStates
from nouscoder.learner.model.adapters import add_adapters
from nouscoder.learner.model.admission import admit
from nouscoder.learner.model.attention import use_attention
from nouscoder.learner.model.decoder_layers import checkpoint_activations, compile_layers
from nouscoder.learner.model.experts import replay_experts
from nouscoder.learner.model.logprobs import Scorer
from nouscoder.learner.model.packed_attention import PACKED_ATTENTION
from nouscoder.learner.parallel.ranks import Ranks

log = logging.getLogger(__name__)

_DTYPES = {ComputeType.FLOAT32: torch.float32, ComputeType.BFLOAT16: torch.bfloat16}


def compute_dtype(settings: LearnerSection) -> torch.dtype:
    """The type of the forward and the backward pass."""
    return _DTYPES[settings.dtype]


def round_weights(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Give all weights of the model this type and device. Buffers, such as the frequencies of RoPE, keep their type."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device, dtype)
    return _with_buffers_at(model, device)


def _with_buffers_at(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return model


class ComputeCopy:
    """The copy of a model that computes. `model` is the copy."""

    def __init__(
        self, masters: PreTrainedModel, dtype: torch.dtype, device: torch.device, masters_at: torch.device
    ) -> None:
        """Copy `masters` to `device` and move them to `masters_at`. No weight is there a third time meanwhile."""
        copies: dict[int, nn.Parameter] = {}
        self._pairs: list[tuple[Tensor, Tensor]] = []
        for master in masters.parameters():
            trained = master.requires_grad
            copied = copies[id(master)] = nn.Parameter(master.detach().to(device, dtype, copy=trained), trained)
            if not trained:
                master.data = copied.data
                continue
            master.data = master.data.to(masters_at)
            if device.type == "cuda" and masters_at.type == "cpu":
                master.data = master.data.pin_memory()
            copied.register_post_accumulate_grad_hook(partial(_hand_over, master))  # type: ignore[no-untyped-call]
            self._pairs.append((master, copied))
        self.model = _with_buffers_at(deepcopy(masters, memo=copies), device)

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters again. Call it after they have changed."""
        for master, copied in self._pairs:
            copied.copy_(master)


def _hand_over(master: Tensor, copied: Tensor) -> None:
    """Add the gradient of the copy to that of its master, in the type of the master."""
    gradient, copied.grad = copied.grad, None
    assert gradient is not None
    if master.grad is None:
        master.grad = gradient.to(master.device, master.dtype)
    else:  # in the type of the master too, without a copy of the gradient in it
        master.grad.add_(gradient.to(master.device))


# Models whose layers mix tokens by attention only, so that a row with shared prompts gives the same scores.
_SHARE_PROMPTS = frozenset({"llama", "mistral", "qwen2", "qwen3"})


class Computation:
    """`model` computes: the masters themselves, or their copy. Its passes go through `scorer`."""

    def __init__(self, masters: PreTrainedModel, config: Config, ranks: Ranks) -> None:
        """Raises ValueError for a model that does not have what the settings ask for."""
        settings = config.learner
        self.device = torch.device(settings.device)
        self._settings, self._ranks, self._dtype = settings, ranks, compute_dtype(settings)
        self._masters_on_cpu = settings.optimizer_states is OptimizerStates.CPU
        if (sentence := add_adapters(masters, settings.lora, config.run.seed)) and not ranks.rank:
            log.info(sentence)
        self._copy: ComputeCopy | None = None
        if not ranks.is_group and (self._dtype != torch.float32 or self._masters_on_cpu):
            masters_at = torch.device("cpu") if self._masters_on_cpu else self.device
            self._copy = ComputeCopy(masters, self._dtype, self.device, masters_at)
        else:
            masters.to(self.device)  # type: ignore[arg-type]
        self.model = self._copy.model if self._copy else masters
        self._attend(self.model)
        if settings.compile:
            compile_layers(self.model)
        if config.policy.router_replay:
            replay_experts(self.model)
        checkpoint_activations(self.model, settings.activation_checkpointing, settings.checkpointed_layers)
        self.scorer = self._root_of(self.model)

    def shares_prompts(self, model: PreTrainedModel) -> bool:
        """Whether its rows may hold a prompt once for all rollouts: every layer finds its tokens by the layout."""
        config = model.config
        packed = config._attn_implementation == PACKED_ATTENTION and self._ranks.row is None
        return packed and config.model_type in _SHARE_PROMPTS

    def refresh(self) -> None:
        """Take over the masters. Call it after they have changed."""
        if self._copy is not None:
            self._copy.refresh()

    def admit(self) -> None:
        """Measure whether the passes are those of the model. All ranks must call it together. Raises Unusable."""
        self.refresh()
        admit(self.scorer, self._dtype, self._ranks)

    def reference(self, load: Callable[[], PreTrainedModel]) -> Scorer:
        """The loaded model, for log-probabilities only, with the same type, attention and ranks. Raises Unusable."""
        # FSDP2 rounds the weights that it gathers.
        dtype = torch.float32 if self._ranks.is_group else self._dtype
        model = round_weights(load(), dtype, self.device)
        self._attend(model)
        scorer = self._root_of(model)
        admit(scorer, self._dtype, self._ranks)
        return scorer

    def _attend(self, model: PreTrainedModel) -> None:
        shares_rows = self._ranks.row is not None
        use_attention(model, self._settings.attention, self._dtype, shares_rows=shares_rows)

    def _root_of(self, model: PreTrainedModel) -> Scorer:
        # The ratios need exactly the distribution that was sampled from, so dropout is off.
        root = Scorer(model, self._ranks.row, compiled=self._settings.compile).eval()
        self._ranks.shard(root, model, self._dtype, on_cpu=self._masters_on_cpu)
        register_fsdp_forward_method(root, "own_logprobs")  # does nothing to a root that is not sharded
        return root
