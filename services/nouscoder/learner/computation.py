"""The model that computes the passes of a trainer, made from the masters that are trained:

    masters -> adapters -> copy of another type or on another device -> attention, graphs, experts, checkpoints -> FSDP2

lora.py, precision.py, attention.py, compilation.py, router_replay.py, activation_checkpointing.py and ranks.py are
these parts. Each is there only when the settings ask for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from nouscoder.config import Config, OptimizerStates
from nouscoder.learner.activation_checkpointing import checkpoint_activations
from nouscoder.learner.attention import use_attention
from nouscoder.learner.compilation import compile_layers
from nouscoder.learner.logprobs import Scorer
from nouscoder.learner.lora import add_adapters
from nouscoder.learner.precision import ComputeCopy, compute_dtype, needs_copy, round_weights
from nouscoder.learner.ranks import Ranks
from nouscoder.learner.router_replay import replay_experts


class Computation:
    """`model` computes: the masters themselves, or their copy. Its passes go through `scorer`."""

    def __init__(self, masters: PreTrainedModel, config: Config, ranks: Ranks) -> None:
        """Raises ValueError for a model that does not have what the settings ask for."""
        settings = config.learner
        self.device = torch.device(settings.device)
        self._settings, self._ranks, self._dtype = settings, ranks, compute_dtype(settings)
        self._masters_on_cpu = settings.optimizer_states is OptimizerStates.CPU
        add_adapters(masters, settings.lora, config.run.seed)
        self._copy: ComputeCopy | None = None
        if ranks.size == 1 and needs_copy(settings):
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

    def refresh(self) -> None:
        """Take over the masters. Call it after they have changed."""
        if self._copy is not None:
            self._copy.refresh()

    def reference(self, load: Callable[[], PreTrainedModel]) -> Scorer:
        """The loaded model, for log-probabilities only, with the same type, attention and ranks."""
        # FSDP2 rounds the weights that it gathers.
        dtype = self._dtype if self._ranks.size == 1 else torch.float32
        model = round_weights(load(), dtype, self.device)
        self._attend(model)
        return self._root_of(model)

    def _attend(self, model: PreTrainedModel) -> None:
        shares_rows = self._ranks.row is not None
        use_attention(model, self._settings.attention, self._dtype, shares_rows=shares_rows)

    def _root_of(self, model: PreTrainedModel) -> Scorer:
        # The ratios need exactly the distribution that was sampled from, so dropout is off.
        root = Scorer(model, self._ranks.row, compiled=self._settings.compile).eval()
        self._ranks.shard(root, model, self._dtype, on_cpu=self._masters_on_cpu)
        return root
