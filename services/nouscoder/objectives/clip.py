"""PPO's clip, of ratios r of tokens or of rollouts.

Schulman et al., arXiv 1707.06347, equation 7, with a clip of two sides (DAPO, arXiv 2503.14476, equation 10):

    gain = min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

and optionally the dual clip (Ye et al., arXiv 1912.09729): where A < 0, gain = max(gain, c * A).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field

from nouscoder.objectives.base import Diagnostic, LossInputs, Surrogate, bounded_ratio
from nouscoder.objectives.loss import ObjectiveSection

if TYPE_CHECKING:
    from nouscoder.objectives.base import Tensor

# Diagnostics that say which tokens lost their gradient to a clip, or kept it with a bounded factor.
_CLIPS = ("clip_fraction_", "bounded_fraction_")


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

    def diagnostics(self, name: str) -> dict[str, Diagnostic]:
        """The shares of these tokens, as `name`_low and `name`_high."""
        return {f"{name}_low": Diagnostic(self.low), f"{name}_high": Diagnostic(self.high)}


def clipped(ratios: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0) -> Surrogate:
    """The surrogate of `ratios` [tokens]. The diagnostics are shares of tokens whose gradient a clip removed.

    clip_fraction_low, clip_fraction_high: the clip at that side. clip_fraction_dual: the dual clip, when it is on.
    """
    outside = Outside.of(ratios, advantages, clip_low, clip_high)
    gains = (ratios * advantages).minimum(ratios.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)
    diagnostics = outside.diagnostics("clip_fraction")
    if dual_clip:
        gains = dual_clipped(gains, ratios, advantages, dual_clip, diagnostics)
    return Surrogate(gains, diagnostics)


def dual_clipped(
    gains: Tensor, ratios: Tensor, advantages: Tensor, limit: float, diagnostics: dict[str, Diagnostic]
) -> Tensor:
    """`gains` [tokens] with the dual clip; it notes its share of the tokens in `diagnostics`."""
    too_low = (advantages < 0) & (ratios.detach() > limit)
    diagnostics["clip_fraction_dual"] = Diagnostic(too_low)
    return (limit * advantages).where(too_low, gains)


def clipped_tokens(inputs: LossInputs, diagnostics: Mapping[str, Diagnostic]) -> Tensor:
    """Whether the clip of the objective with these diagnostics acts on each token, [tokens]."""
    acts = inputs.accepted.new_zeros(inputs.accepted.shape)
    for name, diagnostic in diagnostics.items():
        if name.startswith(_CLIPS):
            acts = acts | diagnostic.values.bool()
    return acts


def clip_low_key(default: float) -> Any:
    """The key `clip_low` of an objective, with its published value."""
    return Field(default, gt=0, lt=1, description="ratios are clipped from below at 1 - clip_low")


def clip_high_key(default: float) -> Any:
    """The key `clip_high` of an objective, with its published value."""
    return Field(default, gt=0, description="ratios are clipped from above at 1 + clip_high")


class ClippedObjective(ObjectiveSection):
    """An objective whose gain is PPO's clip of each token's ratio to the policy at the start of the batch.

    Diagnostics: clip_fraction_low, clip_fraction_high, and clip_fraction_dual with a dual clip.
    """

    clip_low: float = clip_low_key(0.2)
    clip_high: float = clip_high_key(0.2)
    dual_clip: float = Field(
        0.0, ge=0, description="c > 1: a token with a negative advantage loses at most c * advantage; 0: no bound"
    )

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        if 0 < self.dual_clip <= 1 + self.clip_high:
            yield "dual_clip must be above 1 + clip_high, or 0 for none"

    def denominator(self, inputs: LossInputs) -> Tensor:
        """The log-probabilities below the ratio's line, [tokens]."""
        return inputs.old_logprobs

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The clipped gain of each token, [tokens]."""
        ratios = bounded_ratio(inputs.logprobs, self.denominator(inputs))
        return clipped(ratios, inputs.advantages, self.clip_low, self.clip_high, self.dual_clip)
