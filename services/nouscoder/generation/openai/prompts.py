"""Requests as token ids: conversations in the policy's chat template, texts, and tokens that a client gives itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from nouscoder.domain.conversation import Role
from nouscoder.generation.openai.faults import invalid
from nouscoder.generation.openai.schema import ChatRequest, CompletionRequest
from nouscoder.policy_folder.tokenizer import PolicyTokenizer, TokenizerError

Tokens = TypeVar("Tokens")


class PromptEncoder:
    """Encodes in a thread, one request at a time, so that a long text does not delay the rest of the service.

    A tokenizer is not safe in two threads, so `tokenizer` must not be used elsewhere. Prompt and completion together
    have at most `capacity` tokens.
    """

    def __init__(self, tokenizer: PolicyTokenizer, capacity: int) -> None:
        self._tokenizer = tokenizer
        self.capacity = capacity
        self._alone = asyncio.Lock()

    async def of_chat(self, request: ChatRequest) -> tuple[int, ...]:
        """Token ids [prompt tokens] of a conversation. Raises ApiFault.

        A policy without a chat template takes one message of a user, as its text.
        """
        messages = [message.message() for message in request.messages]
        if self._tokenizer.has_chat_template:
            thinking = request.chat_template_kwargs.enable_thinking
            return self._checked(
                await self._encoded(lambda: self._tokenizer.encode_messages(messages, thinking), "messages"), "messages"
            )
        if [message.role for message in messages] != [Role.USER]:
            raise invalid("the policy has no chat template: it takes one message, of the user", "messages")
        text = messages[0].content
        return self._checked(await self._encoded(lambda: self._tokenizer.encode(text), "messages"), "messages")

    async def of_completion(self, request: CompletionRequest) -> list[tuple[int, ...]]:
        """Token ids of each prompt. Raises ApiFault."""
        found = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                text = prompt
                ids = await self._encoded(lambda text=text: self._tokenizer.encode(text), "prompt")  # type: ignore[misc]
            else:
                ids = prompt
                self._checked(ids, "prompt")  # its length first, because the next check looks at each token
                size = self._tokenizer.vocabulary_size
                if not all(0 <= token_id < size for token_id in ids):
                    raise invalid(f"prompt: a token id is not in the vocabulary of {size} tokens", "prompt")
            found.append(self._checked(ids, "prompt"))
        return found

    async def _encoded(self, encode: Callable[[], list[int]], param: str) -> list[int]:
        async with self._alone:
            try:
                return await asyncio.to_thread(encode)
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
