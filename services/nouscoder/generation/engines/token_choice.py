"""The choice of the next token of every row at once, and the random numbers that it takes.

The random stream of a request is a Philox sequence with its seed as key. Its i-th number determines the i-th token,
independently of the other rows of the batch. The token is the inverse of the cumulative distribution at that number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nouscoder.generation.engines.base import SampleRequest, seed_of

# With a smaller one, logits divided by it could be infinite in float32, and one request would end the engine.
_MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The chosen tokens and their log-probabilities, both [rows]."""

    token_ids: Tensor
    logprobs: Tensor


def draws_of(request: SampleRequest, num_tokens: int) -> Tensor:
    """Random numbers in (0, 1] of the next tokens of a request, after those of the kept ones, [num_tokens] float64."""
    stream = np.random.Generator(np.random.Philox(key=seed_of(request)))
    return torch.from_numpy(1.0 - stream.random(request.num_kept + num_tokens)[request.num_kept :])


@dataclass(frozen=True, slots=True)
class Truncation:
    """Which tokens are candidates, each [rows]: see SampleRequest. `top_p` is 1, `top_k` and `min_p` are 0 for all."""

    top_p: Tensor
    top_k: Tensor
    min_p: Tensor


def choose_tokens(logits: Tensor, draws: Tensor, temperature: Tensor, truncation: Truncation | None) -> ChosenTokens:
    """Sample one token per row from `logits` [rows, vocabulary] with `draws`, `temperature` and `truncation` [rows].

    Temperature 0 selects the most likely token; any other below 1e-6 counts as 1e-6. Without `truncation` all tokens
    are candidates. The log-probability of the sampled token is that of the full softmax at the sampling temperature
    (for temperature 0: at 1), before truncation, so that truncation does not bias ratios to a policy's probabilities.
    A row with NaN logits gets a NaN log-probability and token 0.
    """
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature.clamp_min(_MIN_TEMPERATURE))[:, None]
    all_logprobs = torch.log_softmax(scaled, dim=-1)
    probabilities = all_logprobs.exp()
    if truncation is not None:
        probabilities = _truncate(probabilities.double(), truncation)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    # 0 < draws * total <= total, so a first entry that reaches it exists, and its probability is above 0.
    token_ids = torch.searchsorted(cumulative, (draws * cumulative[:, -1])[:, None])
    if bool(greedy.any()):
        token_ids = torch.where(greedy[:, None], scaled.argmax(dim=-1, keepdim=True), token_ids)
    not_numbers = torch.isnan(cumulative[:, -1:])
    token_ids = token_ids.masked_fill_(not_numbers, 0)
    logprobs = all_logprobs.gather(1, token_ids).masked_fill_(not_numbers, float("nan"))
    return ChosenTokens(token_ids[:, 0], logprobs[:, 0])


def _truncate(probabilities: Tensor, truncation: Truncation) -> Tensor:
    """Zero all but the candidates, in vLLM's order: min-p (2407.01082), then top-k, then of those the smallest set of
    most likely tokens whose share reaches top-p (nucleus sampling, 1904.09751).
    """
    ordered, order = probabilities.sort(dim=-1, descending=True)
    ranks = torch.arange(ordered.shape[-1], device=ordered.device)
    limits = truncation.top_k.where(truncation.top_k > 0, ordered.shape[-1])
    ordered.masked_fill_(ordered < truncation.min_p[:, None] * ordered[:, :1], 0.0)
    ordered.masked_fill_(ranks >= limits[:, None], 0.0)
    cumulative = ordered.cumsum(dim=-1)
    ordered.masked_fill_(cumulative - ordered >= truncation.top_p[:, None] * cumulative[:, -1:], 0.0)
    return torch.zeros_like(probabilities).scatter_(1, order, ordered)
