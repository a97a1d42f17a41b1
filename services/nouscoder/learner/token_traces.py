"""What a step does with each token of a few rollouts: ratios and clips, for the viewer of rollouts.

A ratio is that of the step which trains on the rollout, before the step changes the weights. In the first of the k
steps of a batch it is 1, because the policy is still pi_old.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from nouscoder.learner.batch_statistics import ScoredRollout
from nouscoder.learner.objectives.base import Diagnostic, LossInputs
from nouscoder.learner.objectives.clip import clipped_tokens
from nouscoder.learner.objectives.ratios import bounded_ratio
from nouscoder.learner.ranks import Ranks


@dataclass(frozen=True, slots=True)
class TokenTrace:
    """The sampled tokens of one rollout, in order.

    ratios [tokens]: pi_theta / pi_old. mismatches [tokens]: pi_old / pi_sampler. clipped [tokens]: whether the clip of
    the objective acts on the token. `step` counts from 1.
    """

    rollout_id: str
    step: int
    ratios: tuple[float, ...]
    mismatches: tuple[float, ...]
    clipped: tuple[bool, ...]


class TokenTraces:
    """Collects the traces of the `wanted` rollouts of a batch."""

    def __init__(self, wanted: frozenset[str]) -> None:
        self._wanted = wanted
        self._found: dict[str, TokenTrace] = {}

    @torch.no_grad()
    def add(
        self, step: int, rollouts: Sequence[ScoredRollout], inputs: LossInputs, diagnostics: Mapping[str, Diagnostic]
    ) -> None:
        """Add those of a micro-batch. `rollouts` are the rollouts of its row, in order."""
        for row, scored in enumerate(rollouts):
            rollout_id = scored.graded.rollout.rollout_id
            if rollout_id not in self._wanted:
                continue
            tokens = inputs.rollout_of_token == row
            ratios = bounded_ratio(inputs.logprobs[tokens], inputs.old_logprobs[tokens])
            mismatches = bounded_ratio(inputs.old_logprobs[tokens], inputs.sampler_logprobs[tokens])
            self._found[rollout_id] = TokenTrace(
                rollout_id,
                step,
                tuple(ratios.tolist()),
                tuple(mismatches.tolist()),
                tuple(clipped_tokens(inputs, diagnostics)[tokens].tolist()),
            )

    def over(self, ranks: Ranks) -> dict[str, TokenTrace]:
        """Those of all ranks, by rollout. All ranks must call it together."""
        return {name: trace for part in ranks.gather(self._found) for name, trace in part.items()}
