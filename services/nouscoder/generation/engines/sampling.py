"""Chooses the next token of every row at once, each from its own random stream.

The stream of a request is a Philox sequence with its seed as key. Its i-th number determines the i-th token,
independently of the other rows of the batch. The token is the inverse of the cumulative distribution at that number.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from nouscoder.generation.engines.base import SampleRequest

# With a smaller one, logits divided by it could be infinite in float32, and one request would end the engine.
_MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen tokens and their log-probabilities, both [rows]."""

    token_ids: Tensor
    logprobs: Tensor


def seed_of(request: SampleRequest) -> int:
    """The request's seed. Seed 0 is replaced by one from the request id, so that repeated requests sample the same."""
    if request.sampling.seed:
        return request.sampling.seed % 2**64
    return int.from_bytes(blake2b(request.request_id.encode(), digest_size=8).digest(), "little")


def draws_of(request: SampleRequest, num_tokens: int) -> Tensor:
    """The random numbers in (0, 1] of the next `num_tokens` tokens of a request, [num_tokens] float64.

    Those of the kept tokens come before them in the stream.
    """
    stream = np.random.Generator(np.random.Philox(key=seed_of(request)))
    return torch.from_numpy(1.0 - stream.random(request.num_kept + num_tokens)[request.num_kept :])


def choose_tokens(logits: Tensor, draws: Tensor, temperature: Tensor, top_p: Tensor | None) -> Choice:
    """Sample one token per row from `logits` [rows, vocabulary] with `draws`, `temperature` and `top_p` [rows].

    Temperature 0 selects the most likely token; any other below 1e-6 counts as 1e-6. `top_p` None means 1 for all rows.
    The log-probability of the sampled token is that of the full softmax at the sampling temperature (for temperature 0:
    at 1), before top-p truncation, so that truncation does not bias ratios to a policy's probabilities. A row with NaN
    logits gets a NaN log-probability and token 0.
    """
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature.clamp_min(_MIN_TEMPERATURE))[:, None]
    all_logprobs = torch.log_softmax(scaled, dim=-1)
    probabilities = all_logprobs.double().exp_()
    if top_p is not None:
        probabilities = _truncate(probabilities, top_p)
    cumulative = probabilities.cumsum_(dim=-1)
    # 0 < draws * total <= total, so a first entry that reaches it exists, and its probability is above 0.
    token_ids = torch.searchsorted(cumulative, (draws * cumulative[:, -1])[:, None])
    token_ids = torch.where(greedy[:, None], scaled.argmax(dim=-1, keepdim=True), token_ids)
    not_numbers = torch.isnan(all_logprobs).any(dim=-1, keepdim=True)
    token_ids = token_ids.masked_fill_(not_numbers, 0)
    logprobs = all_logprobs.gather(1, token_ids).masked_fill_(not_numbers, float("nan"))
    return Choice(token_ids[:, 0], logprobs[:, 0])


def _truncate(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Zero all but the smallest set of most likely tokens whose mass reaches top_p (nucleus sampling, 1904.09751)."""
    ordered, order = probabilities.sort(dim=-1, descending=True)
    mass_before = ordered.cumsum(dim=-1) - ordered
    ordered.masked_fill_(mass_before >= top_p[:, None], 0.0)
    return torch.zeros_like(probabilities).scatter_(1, order, ordered)
