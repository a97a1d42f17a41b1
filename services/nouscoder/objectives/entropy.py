"""The entropy bonus: its coefficient is fixed, or follows the entropy of the batches towards a target.

Adaptive entropy control: He et al., "Skywork Open Reasoner 1", arXiv 2505.22312. With e_k the mean entropy of the loss
tokens of batch k before its first step, and c_0 = coefficient:

    coefficient of batch k = c_k if e_k <= target, else 0
    c_{k+1} = clip(c_k + delta if e_k < target, c_k - delta if e_k > target, else c_k;  0, maximum)

Without a target the coefficient is entropy.coefficient. c_k is part of every checkpoint.
"""

from __future__ import annotations

from pydantic import Field

from nouscoder.sections import Section


class EntropySection(Section):
    """An entropy bonus: fixed, or controlled towards a target (Skywork-OR1)."""

    coefficient: float = Field(0.0, ge=0, description="weight of the mean entropy; with a target only its start")
    target: float = Field(
        0.0, ge=0, description="nats: the bonus is on while the batch's entropy is at most this; 0: fixed coefficient"
    )
    delta: float = Field(5e-4, gt=0, description="with a target: change of the coefficient after each batch")
    maximum: float = Field(5e-3, gt=0, description="with a target: the coefficient stays between 0 and this")

    def active(self, coefficient: float, entropy: float) -> float:
        """The coefficient in the loss of a batch, from c_k and e_k."""
        return coefficient if entropy <= self.target else 0.0

    def following(self, coefficient: float, entropy: float) -> float:
        """c_{k+1} from c_k and e_k."""
        if entropy < self.target:
            coefficient += self.delta
        elif entropy > self.target:
            coefficient -= self.delta
        return min(max(coefficient, 0.0), self.maximum)
