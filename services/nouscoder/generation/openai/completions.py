"""From a request's body to its answer: the prompts as token ids, samples of the policy in use, OpenAI's two forms.

An answer names the policy version that sampled it, or the oldest and the newest when the policy was updated meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Any, TypeVar

from nouscoder.domain.conversation import Role
from nouscoder.domain.rollout import Sampling
from nouscoder.generation.metrics import ApiMetrics, ApiTokens
from nouscoder.generation.openai.sampling import ApiSampler, CompletionPiece, WantedCompletion
from nouscoder.generation.openai.schema import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_CHOICES,
    ApiFault,
    ChatRequest,
    CompletionRequest,
    SamplingRequest,
    invalid,
    parsed,
)
from nouscoder.generation.weights.policies import Policies
from nouscoder.policy_folder.chat_template import PROCESSES
from nouscoder.policy_folder.tokenizer import PolicyTokenizer, TokenizerError

_REPLACEMENT = "\ufffd"
Made = TypeVar("Made")


class PromptEncoder:
    """Encodes in a thread, one request at a time, so that a long text does not delay the rest of the service.

    A tokenizer is not safe in two threads, so `tokenizer` must not be used elsewhere. Its chat template is: a slow one
    delays no other request. Prompt and completion together have at most `capacity` tokens.
    """

    def __init__(self, tokenizer: PolicyTokenizer, capacity: int) -> None:
        self._tokenizer = tokenizer
        self.capacity = capacity
        self._alone = asyncio.Lock()
        self._rendering = asyncio.Semaphore(PROCESSES)  # further requests would wait in threads

    async def of_chat(self, request: ChatRequest) -> tuple[int, ...]:
        """Token ids [prompt tokens] of a conversation. Raises ApiFault.

        A policy without a chat template takes one message of a user, as its text.
        """
        messages = [message.message() for message in request.messages]
        if self._tokenizer.has_chat_template:
            thinking = request.chat_template_kwargs.enable_thinking
            chat = await self._in_thread(
                self._rendering, lambda: self._tokenizer.render(messages, thinking), "messages"
            )
            ids = await self._encoded(lambda: self._tokenizer.encode_rendered(chat), "messages")
        elif [message.role for message in messages] == [Role.USER]:
            ids = await self._encoded(lambda: self._tokenizer.encode(messages[0].content), "messages")
        else:
            raise invalid("the policy has no chat template: it takes one message, of the user", "messages")
        return self._checked(ids, "messages")

    async def of_completion(self, request: CompletionRequest) -> list[tuple[int, ...]]:
        """Token ids of each prompt. Raises ApiFault."""
        return [await self._of_prompt(prompt) for prompt in request.prompts]

    async def _of_prompt(self, prompt: str | list[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self._checked(await self._encoded(lambda: self._tokenizer.encode(prompt), "prompt"), "prompt")
        ids = self._checked(prompt, "prompt")  # its length first, because the next check looks at each token
        size = self._tokenizer.vocabulary_size
        if not all(0 <= token_id < size for token_id in ids):
            raise invalid(f"prompt: a token id is not in the vocabulary of {size} tokens", "prompt")
        return ids

    async def _encoded(self, encode: Callable[[], list[int]], param: str) -> list[int]:
        return await self._in_thread(self._alone, encode, param)

    async def _in_thread(self, place: asyncio.Lock | asyncio.Semaphore, call: Callable[[], Made], param: str) -> Made:
        async with place:
            try:
                return await asyncio.to_thread(call)
            except TokenizerError as error:
                raise invalid(f"{param}: {error}", param) from None

    def _checked(self, ids: list[int], param: str) -> tuple[int, ...]:
        if not ids:
            raise invalid(f"{param}: there is no token", param)
        if len(ids) >= self.capacity:
            raise invalid(
                f"the prompt has {len(ids)} tokens, and prompt and completion together may have {self.capacity}",
                param,
                "context_length_exceeded",
            )
        return tuple(ids)


class AnswerForm:
    """How one answer is written, whole or in parts: as a chat completion, or as the completion of a text."""

    def __init__(
        self, name: str, decode: Callable[[Sequence[int]], str], *, is_chat: bool, with_logprobs: bool
    ) -> None:
        """`name` is the model's, `decode` the tokenizer's."""
        self._name = name
        self._decode = decode
        self._is_chat = is_chat
        self._with_logprobs = with_logprobs
        self._id = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._begun: set[int] = set()
        self._num_characters: dict[int, int] = {}  # of the tokens so far of each completion

    def whole(self, pieces: Sequence[CompletionPiece], num_prompt_tokens: int) -> dict[str, Any]:
        """The answer with every completion, each as one piece."""
        choices = [self._choice(index, piece, is_part=False) for index, piece in enumerate(pieces)]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._record(kind, choices, self._fingerprint(pieces)) | usage(num_prompt_tokens, pieces)

    def part(self, index: int, piece: CompletionPiece, policy_version: int) -> dict[str, Any]:
        """One piece of the completion at this position. `policy_version` is named until the end is known."""
        known = self._fingerprint([piece]) if piece.ending else f"{self._name}@{policy_version}"
        return self._part([self._choice(index, piece, is_part=True)], known)

    def usage_part(self, num_prompt_tokens: int, ends: Sequence[CompletionPiece]) -> dict[str, Any]:
        """The last part of a stream whose client wants the usage. `ends` are the last pieces."""
        return self._part([], self._fingerprint(ends)) | usage(num_prompt_tokens, ends)

    def _part(self, choices: list[dict[str, Any]], of_versions: str) -> dict[str, Any]:
        return self._record("chat.completion.chunk" if self._is_chat else "text_completion", choices, of_versions)

    def _record(self, kind: str, choices: list[dict[str, Any]], of_versions: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._name,
            "system_fingerprint": of_versions,
            "choices": choices,
        }

    def _choice(self, index: int, piece: CompletionPiece, *, is_part: bool) -> dict[str, Any]:
        return {
            "index": index,
            **self._text(index, piece.text, is_part=is_part),
            "logprobs": self._logprobs(index, piece) if self._with_logprobs else None,
            "finish_reason": piece.ending.finish_reason.value if piece.ending else None,
        }

    def _text(self, index: int, text: str, *, is_part: bool) -> dict[str, Any]:
        if not self._is_chat:
            return {"text": text}
        if not is_part:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        role = {} if index in self._begun else {"role": "assistant"}
        self._begun.add(index)
        return {"delta": {**role, "content": text}}

    def _logprobs(self, index: int, piece: CompletionPiece) -> dict[str, Any]:
        texts = [self._decode([token_id]) for token_id in piece.token_ids]
        if not self._is_chat:
            offsets = list(accumulate(map(len, texts), initial=self._num_characters.get(index, 0)))
            self._num_characters[index] = offsets.pop()
            logprobs = list(piece.logprobs)
            return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}
        # A token may hold only a part of a character's bytes, which decoding replaces.
        known = [None if _REPLACEMENT in text else list(text.encode()) for text in texts]
        entries = zip(texts, piece.logprobs, known, strict=True)
        return {
            "content": [
                {"token": text, "logprob": logprob, "bytes": encoded, "top_logprobs": []}
                for text, logprob, encoded in entries
            ]
        }

    def _fingerprint(self, pieces: Sequence[CompletionPiece]) -> str:
        """NAME@VERSION: the policy that sampled the completions; NAME@OLDEST-NEWEST when it was updated meanwhile."""
        endings = [piece.ending for piece in pieces if piece.ending]
        oldest = min(ending.oldest_version for ending in endings)
        newest = max(ending.newest_version for ending in endings)
        return f"{self._name}@{oldest}" if oldest == newest else f"{self._name}@{oldest}-{newest}"


def usage(num_prompt_tokens: int, pieces: Sequence[CompletionPiece]) -> dict[str, dict[str, int]]:
    """Tokens of the prompts and of the completions, stop tokens included."""
    sampled = sum(piece.ending.num_tokens for piece in pieces if piece.ending)
    total = num_prompt_tokens + sampled
    return {"usage": {"prompt_tokens": num_prompt_tokens, "completion_tokens": sampled, "total_tokens": total}}


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that can be sampled, and the form of its answer."""

    wanted: Sequence[WantedCompletion]
    form: AnswerForm
    num_prompt_tokens: int
    is_stream: bool
    with_usage: bool


class Completions:
    """Samples for requests that name the model `name`. A request is given up after `limit_s` seconds."""

    def __init__(
        self,
        name: str,
        policies: Policies,
        sampler: ApiSampler,
        encoder: PromptEncoder,
        decode: Callable[[Sequence[int]], str],
        limit_s: float,
        metrics: ApiMetrics,
    ) -> None:
        """`decode` is used in the event loop; `encoder` has a tokenizer of its own."""
        self._name = name
        self._policies = policies
        self._sampler = sampler
        self._encoder = encoder
        self._decode = decode
        self._limit_s = limit_s
        self._tokens = metrics.tokens

    @property
    def policy_version(self) -> int:
        """The version in use. Raises ApiFault before the first policy."""
        if self._policies.current is None:
            raise ApiFault(503, "no policy has been loaded yet; retry later", code="policy_missing")
        return self._policies.current.policy_version

    @property
    def models(self) -> list[str]:
        """The names that a request may give. Raises ApiFault before the first policy."""
        return [self._name, f"{self._name}@{self.policy_version}"]

    async def of_chat(self, body: bytes) -> PreparedRequest:
        """The request in the body of /v1/chat/completions. Raises ApiFault."""
        request = parsed(ChatRequest, body)
        self._check_model(request.model)
        prompt = await self._encoder.of_chat(request)
        limits = [limit for limit in (request.max_tokens, request.max_completion_tokens) if limit is not None]
        form = AnswerForm(self._name, self._decode, is_chat=True, with_logprobs=request.logprobs)
        return self._prepared(request, [prompt], min(limits, default=None), form)

    async def of_text(self, body: bytes) -> PreparedRequest:
        """The request in the body of /v1/completions. Raises ApiFault."""
        request = parsed(CompletionRequest, body)
        self._check_model(request.model)
        num_prompts = len(request.prompts)
        if num_prompts * request.n > MAX_CHOICES:  # before they are encoded, which takes long
            raise invalid(f"n: {num_prompts} prompts times n must be at most {MAX_CHOICES}", "n")
        prompts = await self._encoder.of_completion(request)
        form = AnswerForm(self._name, self._decode, is_chat=False, with_logprobs=request.logprobs is not None)
        return self._prepared(request, prompts, request.max_tokens or DEFAULT_COMPLETION_TOKENS, form)

    async def whole(self, prepared: PreparedRequest) -> dict[str, Any]:
        """The answer. Raises EngineError, and ApiFault when it takes too long."""
        try:
            async with asyncio.timeout(self._limit_s):
                pieces = await self._sampler.whole(prepared.wanted)
        except TimeoutError:
            raise self._too_slow() from None
        self._count_ends(pieces)
        return prepared.form.whole(pieces, prepared.num_prompt_tokens)

    async def events(self, prepared: PreparedRequest) -> AsyncIterator[bytes]:
        """The answer as server-sent events. Raises as `whole`."""
        ends: list[CompletionPiece] = []
        try:
            async with aclosing(self._sampler.pieces(prepared.wanted, self._limit_s)) as pieces:  # type: ignore[type-var]
                async for index, piece in pieces:
                    yield event(prepared.form.part(index, piece, self.policy_version))
                    if piece.ending:
                        ends.append(piece)
                        self._count_ends([piece])
        except TimeoutError:
            raise self._too_slow() from None
        if prepared.with_usage:
            yield event(prepared.form.usage_part(prepared.num_prompt_tokens, ends))
        yield b"data: [DONE]\n\n"

    def _check_model(self, model: str) -> None:
        """Raises ApiFault for another model, or another version than the one in use."""
        if model not in self.models:
            message = f"the model {model!r:.100} is not served here; there are {' and '.join(self.models)}"
            raise ApiFault(404, message, "model", "model_not_found")

    def _prepared(
        self, request: SamplingRequest, prompts: Sequence[tuple[int, ...]], limit: int | None, form: AnswerForm
    ) -> PreparedRequest:
        """`limit`: tokens of a completion at most; None: as many as fit."""
        seed = secrets.randbits(64) if request.seed is None else request.seed
        wanted: list[WantedCompletion] = []
        for prompt in prompts:
            room = self._encoder.capacity - len(prompt)
            max_tokens = min(room, limit or room)
            for _ in range(request.n):
                sampling = Sampling(request.temperature, request.top_p, max_tokens, _seed(seed, len(wanted)))
                wanted.append(WantedCompletion(prompt, sampling, request.stops))
        num_prompt_tokens = sum(map(len, prompts))
        self._tokens.labels(ApiTokens.PROMPT.value).inc(num_prompt_tokens)
        return PreparedRequest(wanted, form, num_prompt_tokens, request.stream, request.stream_options.include_usage)

    def _count_ends(self, ends: Sequence[CompletionPiece]) -> None:
        num_tokens = sum(piece.ending.num_tokens for piece in ends if piece.ending)
        self._tokens.labels(ApiTokens.COMPLETION.value).inc(num_tokens)

    def _too_slow(self) -> ApiFault:
        return ApiFault(503, f"the completion took longer than {self._limit_s:g} s", code="timeout")


def event(record: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(record).encode() + b"\n\n"


def _seed(seed: int, choice: int) -> int:
    """The seed of one completion of a request, above 0, because 0 lets an engine choose."""
    return int.from_bytes(blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest(), "little") or 1
