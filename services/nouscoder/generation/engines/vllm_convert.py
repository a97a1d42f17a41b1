"""Converts requests to vLLM's form, and vLLM's outputs to completions."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from nouscoder.domain.tokens import Completion, FinishReason, SampledTokens, VersionSpan, float32, int32
from nouscoder.generation.engines.base import EngineError, SampleRequest
from nouscoder.generation.engines.sampling import seed_of

_MAX_SEED = 2**63


def sampling_params(request: SampleRequest, max_tokens: int) -> Any:
    """vLLM's parameters of a request that is cut at `max_tokens`. Each request has its own random stream."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        seed=_stream_of(request),
        max_tokens=max_tokens,
        stop_token_ids=sorted(request.stop_token_ids),
        ignore_eos=True,  # the request names every stop token
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _stream_of(request: SampleRequest) -> int:
    """The seed of vLLM's random stream, which always starts from its beginning.

    So a request with kept tokens has another stream: the same one would give it the numbers of the kept tokens again.
    """
    seed = seed_of(request)
    if request.num_kept:
        seed = int.from_bytes(blake2b(f"{seed}/{request.num_kept}".encode(), digest_size=8).digest(), "little")
    return seed % _MAX_SEED


def prompt_of(request: SampleRequest, policy_version: int) -> Any:
    """vLLM's form of the prompt. Cached prefixes are shared only with requests of the same version."""
    from vllm.inputs.engine import tokens_input

    return tokens_input(list(request.prompt_token_ids), cache_salt=f"policy-{policy_version}")


def completion_of(request_id: str, output: Any) -> Completion:
    """The completion in vLLM's final output of a request. Raises EngineError naming the request.

    vLLM says for each token which weights sampled it: the spans come from its engine process, not from a clock here.
    """
    answer = output.outputs[0]
    name = f"request {request_id}"
    if answer.finish_reason not in ("stop", "length"):
        raise EngineError(f"{name} ended in vLLM with {answer.finish_reason}")
    sampled = _sampled(name, answer.token_ids, answer.logprobs, answer.weight_versions)
    return sampled.ended(FinishReason(answer.finish_reason))


def sampled_of(request_id: str, state: Any, start: int) -> SampledTokens | None:
    """The tokens from number `start` on that vLLM has sampled for a request, from the state of its output.

    None when there is none. Raises EngineError naming the request.
    """
    token_ids = state.detokenizer.output_token_ids
    if len(token_ids) <= start:
        return None
    flat, spans = state.logprobs_processor.logprobs, state._weight_version_spans()
    return _sampled(f"request {request_id}", token_ids, flat, spans).after(start)


def _sampled(name: str, token_ids: Sequence[int], flat: Any, spans: Any) -> SampledTokens:
    """vLLM's tokens, flat log-probabilities and spans of versions. Raises EngineError."""
    if [flat.token_ids[start] for start in flat.start_indices] != list(token_ids):
        raise EngineError(f"{name}: vLLM's log-probabilities are not those of its tokens")
    try:
        return SampledTokens(
            token_ids=int32(token_ids),
            logprobs=float32(flat.logprobs[start] for start in flat.start_indices),
            versions=tuple(VersionSpan(int(span.version), span.end - span.start) for span in spans),
        )
    except ValueError as error:  # a NaN among the log-probabilities
        raise EngineError(f"{name}: vLLM gave no valid completion: {error}") from error
