"""Weights that correct for the difference between the sampler and the learner. They have no gradient.

With k_t = pi_old / pi_sampler of a token and K_i = product of k_t over rollout i:

    none                w_t = 1
    token               w_t = k_t                        decoupled PPO, AReaL, arXiv 2505.24298, equation 5
    token_truncated     w_t = min(C, k_t)                truncated importance sampling (TIS), Yao et al. 2025,
                                                         "Your Efficient RL Framework Secretly Brings You Off-Policy"
    sequence_truncated  w_t = min(C, K_i)                the same with the weight of the whole rollout
    token_masked        w_t = k_t if f <= k_t <= C, else 0   IcePop, Ling team 2025 (f = 0.5, C = 5)
    sequence_masked     w_t = K_i if K_i <= C, else 0    sequence MIS, Liu et al. 2025, "When Speed Kills Stability"

C is correction.cap and f is correction.floor. log k_t and log K_i are clipped to +-20.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nouscoder.config import CorrectionKind, CorrectionSection
from nouscoder.learner.objectives.base import Diagnostic, LossInputs
from nouscoder.learner.objectives.ratios import bounded_exp, sums_of_rollouts

_OF_SEQUENCE = (CorrectionKind.SEQUENCE_TRUNCATED, CorrectionKind.SEQUENCE_MASKED)
_MASKED = (CorrectionKind.TOKEN_MASKED, CorrectionKind.SEQUENCE_MASKED)


@dataclass(frozen=True, slots=True)
class Correction:
    """weights [tokens] outside the clip. diagnostics: mismatch_truncated or mismatch_masked, a share of tokens."""

    weights: Tensor
    diagnostics: dict[str, Diagnostic]


@torch.no_grad()
def correction_of(settings: CorrectionSection, inputs: LossInputs) -> Correction:
    """The weight of each token."""
    if settings.kind is CorrectionKind.NONE:
        return Correction(torch.ones_like(inputs.old_logprobs), {})
    log_ratios = inputs.old_logprobs - inputs.sampler_logprobs
    if settings.kind in _OF_SEQUENCE:
        log_ratios = sums_of_rollouts(log_ratios, inputs.rollout_of_token)
    ratios = bounded_exp(log_ratios)
    if settings.kind is CorrectionKind.TOKEN:
        return Correction(ratios, {})
    if settings.kind in _MASKED:
        outside = (ratios > settings.cap) | (ratios < settings.floor)
        return Correction(ratios.masked_fill(outside, 0.0), {"mismatch_masked": Diagnostic(outside)})
    return Correction(ratios.clamp(max=settings.cap), {"mismatch_truncated": Diagnostic(ratios > settings.cap)})
