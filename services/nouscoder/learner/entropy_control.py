"""Adaptive entropy control: the coefficient of the entropy bonus follows the entropy of the batches.

He et al., "Skywork Open Reasoner 1", arXiv 2505.22312. With e_k the mean entropy of the loss tokens of batch
k before its first step, and c_0 = entropy.coefficient:

    coefficient of batch k = c_k if e_k <= target, else 0
    c_{k+1} = clip(c_k + delta if e_k < target, c_k - delta if e_k > target, else c_k;  0, maximum)

Without a target the coefficient is entropy.coefficient. c_k is part of every checkpoint.
"""

from __future__ import annotations

from nouscoder.config import EntropySection


def active_coefficient(settings: EntropySection, coefficient: float, entropy: float) -> float:
    """The coefficient in the loss of a batch, from c_k and e_k."""
    return coefficient if entropy <= settings.target else 0.0


def next_coefficient(settings: EntropySection, coefficient: float, entropy: float) -> float:
    """c_{k+1} from c_k and e_k."""
    if entropy < settings.target:
        coefficient += settings.delta
    elif entropy > settings.target:
        coefficient -= settings.delta
    return min(max(coefficient, 0.0), settings.maximum)
