"""PPO's clipped surrogate, for ratios of tokens or of rollouts.

Schulman et al., arXiv 1707.06347, equation 7, with a clip of two sides (DAPO, arXiv 2503.14476, equation 10):

    gain = min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

and optionally the dual clip (Ye et al., arXiv 1912.09729): where A < 0, gain = max(gain, c * A).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nouscoder.config import ClippedSettings
from nouscoder.learner.objectives.base import Diagnostic, LossInputs, bounded_ratio

# Diagnostics that say which tokens lost their gradient to a clip, or kept it with a bounded factor.
_CLIPS = ("clip_fraction_", "bounded_fraction_")


@dataclass(frozen=True, slots=True)
class Surrogate:
    """gains [tokens], to be maximised, with gradient; diagnostics by name, over tokens."""

    gains: Tensor
    diagnostics: dict[str, Diagnostic]


@dataclass(frozen=True, slots=True)
class Outside:
    """The tokens on which the clip acts, [tokens]: below with a negative, above with a positive advantage."""

    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, ratios: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Outside:
        """The tokens outside of 1 - clip_low .. 1 + clip_high on the side to which their gain pulls."""
        fixed = ratios.detach()
        return cls((fixed < 1.0 - clip_low) & (advantages < 0), (fixed > 1.0 + clip_high) & (advantages > 0))


def clipped(
    ratios: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> Surrogate:
    """The surrogate of `ratios` [tokens]. The diagnostics are shares of tokens whose gradient a clip removed.

    clip_fraction_low, clip_fraction_high: the clip at that side. clip_fraction_dual: the dual clip, when it is on.
    """
    outside = Outside.of(ratios, advantages, clip_low, clip_high)
    gains = torch.minimum(ratios * advantages, ratios.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)
    diagnostics = {"clip_fraction_low": Diagnostic(outside.low), "clip_fraction_high": Diagnostic(outside.high)}
    if dual_clip:
        gains = dual_clipped(gains, ratios, advantages, dual_clip, diagnostics)
    return Surrogate(gains, diagnostics)


def dual_clipped(
    gains: Tensor, ratios: Tensor, advantages: Tensor, limit: float, diagnostics: dict[str, Diagnostic]
) -> Tensor:
    """`gains` [tokens] with the dual clip; it notes its share of the tokens in `diagnostics`."""
    too_low = (advantages < 0) & (ratios.detach() > limit)
    diagnostics["clip_fraction_dual"] = Diagnostic(too_low)
    return torch.where(too_low, limit * advantages, gains)


def clipped_token_ratios(inputs: LossInputs, denominators: Tensor, settings: ClippedSettings) -> Surrogate:
    """The surrogate of each token's ratio pi_theta / `denominators`, where these are log-probabilities [tokens]."""
    return clipped(
        bounded_ratio(inputs.logprobs, denominators),
        inputs.advantages,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
    )


def clipped_tokens(inputs: LossInputs, diagnostics: Mapping[str, Diagnostic]) -> Tensor:
    """Whether the clip of the objective with these diagnostics acts on each token, [tokens]."""
    acts = torch.zeros_like(inputs.accepted)
    for name, diagnostic in diagnostics.items():
        if name.startswith(_CLIPS):
            acts = acts | diagnostic.values.bool()
    return acts
