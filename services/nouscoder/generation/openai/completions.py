"""Requests as samples of the policy in use, and samples as answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import blake2b
from secrets import randbits
from typing import Any

from nouscoder.domain.rollout import Sampling
from nouscoder.generation.metrics import ApiMetrics, ApiTokens
from nouscoder.generation.openai.answers import Answer, ChatAnswer, TextAnswer
from nouscoder.generation.openai.faults import ApiFault, invalid, unavailable
from nouscoder.generation.openai.prompts import PromptEncoder
from nouscoder.generation.openai.sampling import Piece, Samples, Wanted
from nouscoder.generation.openai.schema import MAX_CHOICES, ChatRequest, CompletionRequest, SamplingRequest, parsed
from nouscoder.generation.weights.policies import Policies
from nouscoder.policy_folder.tokenizer import PolicyTokenizer


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that can be sampled, and the form of its answer."""

    wanted: Sequence[Wanted]
    answer: Answer
    num_prompt_tokens: int
    is_stream: bool
    with_usage: bool


class Completions:
    """Samples for requests that name the model `name`. A request is given up after `limit_s` seconds."""

    def __init__(
        self,
        name: str,
        policies: Policies,
        samples: Samples,
        encoder: PromptEncoder,
        decoder: PolicyTokenizer,
        limit_s: float,
        metrics: ApiMetrics,
    ) -> None:
        """`decoder` is used in the event loop; `encoder` has a tokenizer of its own."""
        self._name = name
        self._policies = policies
        self._samples = samples
        self._encoder = encoder
        self._decode = decoder.decode
        self._limit_s = limit_s
        self._tokens = metrics.tokens

    @property
    def policy_version(self) -> int:
        """The version in use. Raises ApiFault before the first policy."""
        if self._policies.current is None:
            raise unavailable("no policy has been loaded yet; retry later", "policy_missing")
        return self._policies.current.policy_version

    @property
    def models(self) -> list[str]:
        """The names that a request may give. Raises ApiFault before the first policy."""
        return [self._name, f"{self._name}@{self.policy_version}"]

    async def of_chat(self, body: bytes) -> Asked:
        """The request in the body of /v1/chat/completions. Raises ApiFault."""
        request = parsed(ChatRequest, body)
        self._check_model(request.model)
        prompt = await self._encoder.of_chat(request)
        return self._asked(request, [prompt], ChatAnswer(self._name, self._decode, request.wants_logprobs))

    async def of_text(self, body: bytes) -> Asked:
        """The request in the body of /v1/completions. Raises ApiFault."""
        request = parsed(CompletionRequest, body)
        self._check_model(request.model)
        _check_choices(len(request.prompts), request.n)  # before they are encoded, which takes long
        prompts = await self._encoder.of_completion(request)
        return self._asked(request, prompts, TextAnswer(self._name, self._decode, request.wants_logprobs))

    async def whole(self, asked: Asked) -> dict[str, Any]:
        """The answer. Raises EngineError, and ApiFault when it takes too long."""
        try:
            async with asyncio.timeout(self._limit_s):
                pieces = await self._samples.whole(asked.wanted)
        except TimeoutError:
            raise self._too_slow() from None
        self._count_ends(pieces)
        return asked.answer.whole(pieces, asked.num_prompt_tokens)

    async def events(self, asked: Asked) -> AsyncIterator[bytes]:
        """The answer as server-sent events. Raises as `whole`."""
        ends: list[Piece] = []
        try:
            async with aclosing(self._samples.pieces(asked.wanted, self._limit_s)) as pieces:  # type: ignore[type-var]
                async for index, piece in pieces:
                    yield event(asked.answer.part(index, piece, self.policy_version))
                    if piece.ending:
                        ends.append(piece)
                        self._count_ends([piece])
        except TimeoutError:
            raise self._too_slow() from None
        if asked.with_usage:
            yield event(asked.answer.usage_part(asked.num_prompt_tokens, ends))
        yield b"data: [DONE]\n\n"

    def _check_model(self, model: str) -> None:
        """Raises ApiFault for another model, or another version than the one in use."""
        if model not in self.models:
            message = f"the model {model!r:.100} is not served here; there are {' and '.join(self.models)}"
            raise ApiFault(404, message, "model", "model_not_found")

    def _asked(self, request: SamplingRequest, prompts: Sequence[tuple[int, ...]], answer: Answer) -> Asked:
        seed = randbits(64) if request.seed is None else request.seed
        wanted: list[Wanted] = []
        for prompt in prompts:
            room = self._encoder.capacity - len(prompt)
            max_tokens = min(room, request.token_limit or room)
            for _ in range(request.n):
                sampling = Sampling(request.temperature, request.top_p, max_tokens, _seed(seed, len(wanted)))
                wanted.append(Wanted(prompt, sampling, request.stops))
        num_prompt_tokens = sum(map(len, prompts))
        self._tokens.labels(ApiTokens.PROMPT.value).inc(num_prompt_tokens)
        return Asked(wanted, answer, num_prompt_tokens, request.stream, request.stream_options.include_usage)

    def _count_ends(self, ends: Sequence[Piece]) -> None:
        num_tokens = sum(piece.ending.num_tokens for piece in ends if piece.ending)
        self._tokens.labels(ApiTokens.COMPLETION.value).inc(num_tokens)

    def _too_slow(self) -> ApiFault:
        return unavailable(f"the completion took longer than {self._limit_s:g} s", "timeout")


def _check_choices(num_prompts: int, n: int) -> None:
    """Raises ApiFault when there are too many completions."""
    if num_prompts * n > MAX_CHOICES:
        raise invalid(f"n: {num_prompts} prompts times n must be at most {MAX_CHOICES}", "n")


def event(record: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(record).encode() + b"\n\n"


def _seed(seed: int, choice: int) -> int:
    """The seed of one completion of a request, above 0, because 0 lets an engine choose."""
    return int.from_bytes(blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest(), "little") or 1
