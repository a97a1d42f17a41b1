"""Sums over the loss tokens of a minibatch, from which the diagnostics of a step are made."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nouscoder.learner.objectives.base import LossInputs, ObjectiveTerms, bounded_ratio


@dataclass(frozen=True, slots=True)
class TokenDiagnostics:
    """Of the loss tokens of one step.

    ratio_*: pi_theta / pi_old, what the clip sees. mismatch_*: pi_old / pi_sampler before truncation (how far sampler
    and learner are apart), mismatch_truncated the share of tokens above C. effective_sample_size: the share
    (sum w)^2 / (n sum w^2) in (0, 1] with w = pi_theta / pi_sampler. approximate_kl (pi_old to pi_theta) and
    mismatch_kl (pi_sampler to pi_old): the estimator r - 1 - log r of J. Schulman's "Approximating KL Divergence".
    """

    entropy: float
    clip_fraction_low: float
    clip_fraction_high: float
    ratio_mean: float
    ratio_min: float
    ratio_max: float
    mismatch_mean: float
    mismatch_max: float
    mismatch_truncated: float
    effective_sample_size: float
    approximate_kl: float
    mismatch_kl: float


class DiagnosticSums:
    """Adds up micro-batches; `result` gives the figures of the whole minibatch."""

    _NUM_SUMS = 10

    def __init__(self, tis_cap: float) -> None:
        self._tis_cap = tis_cap
        self._num_tokens = 0
        self._sums = torch.zeros(self._NUM_SUMS, dtype=torch.float64)
        self._ratio_min = float("inf")
        self._ratio_max = 0.0
        self._mismatch_max = 0.0

    @torch.no_grad()
    def add(self, inputs: LossInputs, terms: ObjectiveTerms, entropies: Tensor) -> None:
        """Count a micro-batch. `entropies` [tokens]."""
        if not inputs.logprobs.numel():
            return
        mismatch = bounded_ratio(inputs.old_logprobs, inputs.sampler_logprobs)
        weight = bounded_ratio(inputs.logprobs, inputs.sampler_logprobs)
        columns = (
            entropies,
            terms.clipped_low,
            terms.clipped_high,
            terms.ratios,
            mismatch,
            mismatch > self._tis_cap,
            weight,
            weight.double() ** 2,
            terms.ratios - 1 - terms.ratios.log(),
            mismatch - 1 - mismatch.log(),
        )
        self._sums += torch.stack([column.double().sum() for column in columns]).cpu()
        self._num_tokens += inputs.logprobs.numel()
        self._ratio_min = min(self._ratio_min, float(terms.ratios.min()))
        self._ratio_max = max(self._ratio_max, float(terms.ratios.max()))
        self._mismatch_max = max(self._mismatch_max, float(mismatch.max()))

    def result(self) -> TokenDiagnostics:
        """Means over all tokens added. Raises ValueError when there were none."""
        if not self._num_tokens:
            raise ValueError("no loss tokens were counted")
        n = self._num_tokens
        entropy, low, high, ratio, mismatch, truncated, weight, square, kl, mismatch_kl = self._sums.tolist()
        return TokenDiagnostics(
            entropy=entropy / n,
            clip_fraction_low=low / n,
            clip_fraction_high=high / n,
            ratio_mean=ratio / n,
            ratio_min=self._ratio_min,
            ratio_max=self._ratio_max,
            mismatch_mean=mismatch / n,
            mismatch_max=self._mismatch_max,
            mismatch_truncated=truncated / n,
            effective_sample_size=weight**2 / (n * square),
            approximate_kl=max(0.0, kl / n),
            mismatch_kl=max(0.0, mismatch_kl / n),
        )
