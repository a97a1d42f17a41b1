"""The log-probabilities of sampled tokens as transformers computes them from policy folders."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from nouscoder.domain.tokens import Completion
from nouscoder.generation.engines.base import SampleRequest


@lru_cache(maxsize=8)
def model_of(folder: Path) -> Any:
    """The model of a policy folder, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def fresh_logprobs(folder: Path, request: SampleRequest, completion: Completion) -> torch.Tensor:
    """Those of one forward pass over prompt and completion, [tokens]."""
    ids = torch.tensor([[*request.prompt_token_ids, *completion.token_ids]])
    with torch.inference_mode():
        logits = model_of(folder)(ids).logits[0]
    return _of_sampled(logits[len(request.prompt_token_ids) - 1 : -1], request, completion)


def replayed_logprobs(folders: Mapping[int, Path], request: SampleRequest, completion: Completion) -> torch.Tensor:
    """Those of an engine that keeps keys and values of older weights, [tokens]. `folders`: the policy of each version.

    Each version computes the tokens that it sampled, on top of the keys and values that the versions before it made.
    """
    ids = [*request.prompt_token_ids, *completion.token_ids]
    cache, parts = DynamicCache(), []
    begin, first = 0, len(request.prompt_token_ids) - 1  # the logits at `first` give the next sampled token
    for span in completion.versions:
        end = first + span.num_tokens
        model = model_of(folders[span.policy_version])
        with torch.inference_mode():
            logits = model(torch.tensor([ids[begin:end]]), past_key_values=cache, use_cache=True).logits[0]
        parts.append(logits[first - begin :])
        begin = first = end
    return _of_sampled(torch.cat(parts), request, completion)


def _of_sampled(logits: torch.Tensor, request: SampleRequest, completion: Completion) -> torch.Tensor:
    logprobs = torch.log_softmax(logits / request.sampling.temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(list(completion.token_ids))[:, None])[:, 0]
