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
from itertools import accumulate
from typing import Any, TypeVar

from nouscoder.domain.conversation import Message, Role
from nouscoder.domain.reasoning import TAG_TOKENS, opened_by
from nouscoder.domain.rollout import Sampling
from nouscoder.formats.json_values import give_way
from nouscoder.generation.engines.base import seed_from
from nouscoder.generation.metrics import ApiMetrics, ApiTokens
from nouscoder.generation.openai.sampling import ApiSampler, CompletionPiece, WantedCompletion
from nouscoder.generation.openai.schema import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_CHOICES,
    ApiFault,
    ChatRequest,
    CompletionRequest,
    SamplingRequest,
    bodies,
    invalid,
    parsed_body,
)
from nouscoder.generation.openai.shares import Shares
from nouscoder.generation.weights.policies import Policies
from nouscoder.http_server.fair_queue import FairSlots
from nouscoder.http_server.memory_budget import charge_decoded
from nouscoder.policy_folder.chat_template import PROCESSES
from nouscoder.policy_folder.tokenizer import PolicyTokenizer, TokenizerError

CHARACTERS_OF_TOKEN = 16  # more than the mean of any text that a policy is asked
_MOST_WAITING = 100_000  # of prompts: each of a request whose body has a place in the memory budget
_BYTES_OF_TOKEN = 40
_FEW_TOKENS = 2_000  # of an answer that is written in the event loop
_REPLACEMENT = "\ufffd"
Made = TypeVar("Made")


class PromptEncoder:
    """Encodes in a thread, one prompt at a time, so that a long text does not delay the rest of the service.

    A tokenizer is not safe in two threads, so `tokenizer` must not be used elsewhere. Its chat template is: a slow one
    delays no other request. Prompt and completion together have at most `capacity` tokens. A prompt of more than
    CHARACTERS_OF_TOKEN characters for each is refused before it is encoded. Clients take turns with their prompts.
    `thinking` is the template's enable_thinking where a request says nothing of it.
    """

    def __init__(self, tokenizer: PolicyTokenizer, capacity: int, thinking: bool | None = None) -> None:
        self._tokenizer = tokenizer
        self._thinking = thinking
        self.capacity = capacity
        self._turns = FairSlots(1, _MOST_WAITING, lambda waiting, busy: None)
        self._rendering = FairSlots(PROCESSES, _MOST_WAITING, lambda waiting, busy: None)

    async def of_chat(self, request: ChatRequest, client: str) -> tuple[int, ...]:
        """Token ids [prompt tokens] of messages; without a chat template, of one of a user. Raises ApiFault."""
        messages = [message.message() for message in request.messages]
        self._check_length(sum(len(message.content) for message in messages), "messages")
        if self._tokenizer.has_chat_template:
            asked = request.chat_template_kwargs.enable_thinking
            thinking = self._thinking if asked is None else asked
            chat = await self._in_thread(
                self._rendering, lambda: self._tokenizer.render(messages, thinking), "messages", client
            )
            ids = await self._encoded(lambda: self._tokenizer.encode_text(chat), "messages", client)
        elif [message.role for message in messages] == [Role.USER]:
            ids = await self._encoded(lambda: self._tokenizer.encode(messages[0].content), "messages", client)
        else:
            raise invalid("the policy has no chat template: it takes one message, of the user", "messages")
        return self._checked(ids, "messages")

    async def of_replies(self, replies: Sequence[Message], ended_with: int | None, client: str) -> tuple[int, ...]:
        """Token ids between an answer, which `ended_with` that token, and the next one. Raises ApiFault."""
        self._check_length(sum(len(reply.content) for reply in replies), "messages")
        tokenizer = self._tokenizer

        def encode() -> list[int]:
            return tokenizer.reply_ids(replies, ended_with, self._thinking, in_chat=tokenizer.has_chat_template)

        return self._checked(await self._encoded(encode, "messages", client), "messages")

    async def of_completion(self, request: CompletionRequest, client: str) -> list[tuple[int, ...]]:
        """Token ids of each prompt, which may name special tokens, as in vLLM's API. Raises ApiFault."""
        for prompt in request.prompts:
            if isinstance(prompt, str):
                self._check_length(len(prompt), "prompt")
        return [await self._of_prompt(prompt, client) for prompt in request.prompts]

    async def _of_prompt(self, prompt: str | list[int], client: str) -> tuple[int, ...]:
        if isinstance(prompt, str):
            ids = await self._encoded(lambda: self._tokenizer.encode_whole(prompt), "prompt", client)
            return self._checked(ids, "prompt")
        given = self._checked(prompt, "prompt")  # its length first, because the next check looks at each token
        size = self._tokenizer.vocabulary_size
        if not all(0 <= token_id < size for token_id in given):
            raise invalid(f"prompt: a token id is not in the vocabulary of {size} tokens", "prompt")
        return given

    async def _encoded(self, encode: Callable[[], list[int]], param: str, client: str) -> list[int]:
        return await self._in_thread(self._turns, encode, param, client)

    async def _in_thread(self, places: FairSlots, call: Callable[[], Made], param: str, client: str) -> Made:
        async with places.slot(client):
            running = asyncio.ensure_future(asyncio.to_thread(call))
            try:
                return await asyncio.shield(running)
            except TokenizerError as error:
                raise invalid(f"{param}: {error}", param) from None
            finally:  # a client that hangs up does not end the thread, and the place is its own until it ends
                await asyncio.wait({running})

    def _check_length(self, num_characters: int, param: str) -> None:
        most = CHARACTERS_OF_TOKEN * self.capacity
        if num_characters > most:
            raise invalid(
                f"the prompt has {num_characters} characters, and prompt and completion together may have"
                f" {self.capacity} tokens: at most {most} characters are read",
                param,
                "context_length_exceeded",
            )

    def _checked(self, ids: list[int], param: str) -> tuple[int, ...]:
        if not ids:
            raise invalid(f"{param}: there is no token", param)
        if len(ids) >= self.capacity:
            raise invalid(
                f"the prompt has {len(ids)} tokens, and prompt and completion together may have {self.capacity}",
                param,
                "context_length_exceeded",
            )
        charge_decoded(_BYTES_OF_TOKEN * len(ids))
        return tuple(ids)


@dataclass(frozen=True, slots=True)
class Serving:
    """What every answer needs. `name` is the model's. A request is given up after `limit_s` seconds.

    `decode` is used in the event loop; `encoder` has a tokenizer of its own.
    """

    name: str
    encoder: PromptEncoder
    decode: Callable[[Sequence[int]], str]
    stop_ids: frozenset[int]
    limit_s: float
    counts: ApiMetrics

    def too_slow(self) -> ApiFault:
        """The refusal of a request that took too long."""
        return ApiFault(503, f"the completion took longer than {self.limit_s:g} s", code="timeout")


class AnswerForm:
    """How one answer is written, whole or in parts: as a chat completion, or as the completion of a text."""

    def __init__(self, serving: Serving, *, is_chat: bool, with_logprobs: bool, prefill: str = "") -> None:
        self._name = serving.name
        self._decode = serving.decode
        self._is_chat = is_chat
        self._prefill = {"prefill": prefill} if prefill else {}
        self._with_logprobs = with_logprobs
        self._id = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._begun: set[int] = set()
        self._num_characters: dict[int, int] = {}  # of the tokens so far of each completion

    def whole(self, pieces: Sequence[CompletionPiece], num_prompt_tokens: int) -> bytes:
        """The answer with every completion, each as one piece. Written one by one, because each takes a while."""
        kind = "chat.completion" if self._is_chat else "text_completion"
        record = self._record(kind, [], self._fingerprint(pieces)) | usage(num_prompt_tokens, pieces)
        del record["choices"]
        parts = []
        for index, piece in enumerate(pieces):
            parts.append(json.dumps(self._choice(index, piece, is_part=False)).encode())
            give_way(len(parts[-1]))
        return json.dumps(record).encode()[:-1] + b', "choices": [' + b", ".join(parts) + b"]}"

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
            return {"message": {"role": "assistant", "content": text, "refusal": None, **self._prefill}}
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
    client: str


class Completions:
    """Samples for requests that name the model, at most `max_requests` at a time."""

    def __init__(self, serving: Serving, policies: Policies, sampler: ApiSampler, max_requests: int) -> None:
        self._serving = serving
        self._policies = policies
        self._sampler = sampler
        self._shares = Shares(max_requests, "requests are in progress")

    @property
    def policy_version(self) -> int:
        """The version in use. Raises ApiFault before the first policy."""
        if self._policies.current is None:
            raise ApiFault(503, "no policy has been loaded yet; retry later", code="policy_missing")
        return self._policies.current.policy_version

    @property
    def models(self) -> list[str]:
        """The names that a request may give. Raises ApiFault before the first policy."""
        return [self._serving.name, f"{self._serving.name}@{self.policy_version}"]

    async def of_chat(self, body: bytes, client: str) -> PreparedRequest:
        """The request in the body of /v1/chat/completions. Raises ApiFault, MemoryBudgetExceeded and QueueFull."""
        request = await parsed_body(ChatRequest, body)
        self._check_model(request.model)
        prompt = await self._serving.encoder.of_chat(request, client)
        opened = opened_by(self._serving.decode(prompt[-TAG_TOKENS:]))
        form = AnswerForm(self._serving, is_chat=True, with_logprobs=request.logprobs, prefill=opened)
        return self._prepared(request, [prompt], request.most_tokens, form, client)

    async def of_text(self, body: bytes, client: str) -> PreparedRequest:
        """The request in the body of /v1/completions. Raises as `of_chat`."""
        request = await parsed_body(CompletionRequest, body)
        self._check_model(request.model)
        num_prompts = len(request.prompts)
        if num_prompts * request.n > MAX_CHOICES:  # before they are encoded, which takes long
            raise invalid(f"n: {num_prompts} prompts times n must be at most {MAX_CHOICES}", "n")
        prompts = await self._serving.encoder.of_completion(request, client)
        form = AnswerForm(self._serving, is_chat=False, with_logprobs=request.logprobs is not None)
        return self._prepared(request, prompts, request.max_tokens or DEFAULT_COMPLETION_TOKENS, form, client)

    async def whole(self, prepared: PreparedRequest) -> bytes:
        """The answer. Raises EngineError, MemoryBudgetExceeded, and ApiFault when it takes too long."""
        try:
            with self._shares.place(prepared.client):
                async with asyncio.timeout(self._serving.limit_s):
                    pieces = await self._sampler.whole(prepared.wanted, prepared.client)
        except TimeoutError:
            raise self._serving.too_slow() from None
        self._count_ends(pieces)
        if sum(len(piece.token_ids) for piece in pieces) <= _FEW_TOKENS:
            return prepared.form.whole(pieces, prepared.num_prompt_tokens)
        return await bodies.thread.run(prepared.form.whole, pieces, prepared.num_prompt_tokens)

    async def events(self, prepared: PreparedRequest) -> AsyncIterator[bytes]:
        """The answer as server-sent events. Raises as `whole`."""
        ends: list[CompletionPiece] = []
        try:
            with self._shares.place(prepared.client):
                sampled = self._sampler.pieces(prepared.wanted, prepared.client, self._serving.limit_s)
                async with aclosing(sampled) as pieces:
                    async for index, piece in pieces:
                        yield event(prepared.form.part(index, piece, self.policy_version))
                        if piece.ending:
                            ends.append(piece)
                            self._count_ends([piece])
        except TimeoutError:
            raise self._serving.too_slow() from None
        if prepared.with_usage:
            yield event(prepared.form.usage_part(prepared.num_prompt_tokens, ends))
        yield b"data: [DONE]\n\n"

    def _check_model(self, model: str) -> None:
        """Raises ApiFault for another model, or another version than the one in use."""
        if model not in self.models:
            message = f"the model {model!r:.100} is not served here; there are {' and '.join(self.models)}"
            raise ApiFault(404, message, "model", "model_not_found")

    def _prepared(
        self,
        request: SamplingRequest,
        prompts: Sequence[tuple[int, ...]],
        limit: int | None,
        form: AnswerForm,
        client: str,
    ) -> PreparedRequest:
        """`limit`: tokens of a completion at most; None: as many as fit."""
        seed = secrets.randbits(64) if request.seed is None else request.seed
        wanted: list[WantedCompletion] = []
        for prompt in prompts:
            room = self._serving.encoder.capacity - len(prompt)
            max_tokens = min(room, limit or room)
            for _ in range(request.n):  # a seed of 0 would let an engine choose
                sampling = Sampling(request.temperature, request.top_p, max_tokens, seed_from(seed, len(wanted)) or 1)
                wanted.append(WantedCompletion(prompt, sampling, request.stops))
        num_prompt_tokens = sum(map(len, prompts))
        self._serving.counts.count_tokens(ApiTokens.PROMPT.value, num_prompt_tokens)
        with_usage = request.stream_options.include_usage
        return PreparedRequest(wanted, form, num_prompt_tokens, request.stream, with_usage, client)

    def _count_ends(self, ends: Sequence[CompletionPiece]) -> None:
        num_tokens = sum(piece.ending.num_tokens for piece in ends if piece.ending)
        self._serving.counts.count_tokens(ApiTokens.COMPLETION.value, num_tokens)


def event(record: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(record).encode() + b"\n\n"
