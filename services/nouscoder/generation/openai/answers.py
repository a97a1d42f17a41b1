"""Answers in the two forms of OpenAI's API: chat completions, and completions of a text."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from nouscoder.generation.openai.sampling import Piece

_REPLACEMENT = "\ufffd"


class Answer(ABC):
    """One answer, whole or in pieces. `name` is the model's, `decode` the tokenizer's."""

    id_prefix: str
    whole_object: str
    part_object: str

    def __init__(self, name: str, decode: Callable[[Sequence[int]], str], with_logprobs: bool) -> None:
        self._name = name
        self._decode = decode
        self._with_logprobs = with_logprobs
        self._id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._begun: set[int] = set()

    def whole(self, pieces: Sequence[Piece], num_prompt_tokens: int) -> dict[str, Any]:
        """The answer with every completion, each as one piece."""
        choices = [self._choice(index, piece, is_part=False) for index, piece in enumerate(pieces)]
        record = self._record(self.whole_object, choices, fingerprint(self._name, pieces))
        return {**record, "usage": usage(num_prompt_tokens, pieces)}

    def part(self, index: int, piece: Piece, policy_version: int) -> dict[str, Any]:
        """One piece of the completion at this position. `policy_version` is named until the end is known."""
        known = fingerprint(self._name, [piece]) if piece.ending else f"{self._name}@{policy_version}"
        return self._record(self.part_object, [self._choice(index, piece, is_part=True)], known)

    def usage_part(self, num_prompt_tokens: int, ends: Sequence[Piece]) -> dict[str, Any]:
        """The last part of a stream whose client wants the usage. `ends` are the last pieces."""
        record = self._record(self.part_object, [], fingerprint(self._name, ends))
        return {**record, "usage": usage(num_prompt_tokens, ends)}

    def _record(self, kind: str, choices: list[dict[str, Any]], of_versions: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._name,
            "system_fingerprint": of_versions,
            "choices": choices,
        }

    def _choice(self, index: int, piece: Piece, *, is_part: bool) -> dict[str, Any]:
        is_first = index not in self._begun
        self._begun.add(index)
        return {
            "index": index,
            **(self._delta(piece.text, is_first=is_first) if is_part else self._text(piece.text)),
            "logprobs": self._logprobs(index, piece) if self._with_logprobs else None,
            "finish_reason": piece.ending.finish_reason.value if piece.ending else None,
        }

    @abstractmethod
    def _text(self, text: str) -> dict[str, Any]:
        """The field with the text of a whole completion."""

    @abstractmethod
    def _delta(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """The field with the text of a piece."""

    @abstractmethod
    def _logprobs(self, index: int, piece: Piece) -> dict[str, Any]:
        """The tokens of a piece and their log-probabilities."""


class ChatAnswer(Answer):
    """A chat completion."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    part_object = "chat.completion.chunk"

    def _text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str, *, is_first: bool) -> dict[str, Any]:
        return {"delta": {**({"role": "assistant"} if is_first else {}), "content": text}}

    def _logprobs(self, index: int, piece: Piece) -> dict[str, Any]:
        return {"content": [self._entry(*pair) for pair in zip(piece.token_ids, piece.logprobs, strict=True)]}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._decode([token_id])
        # A token may hold only a part of a character's bytes, which decoding replaces.
        known = None if _REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": known, "top_logprobs": []}


class TextAnswer(Answer):
    """A completion of a text."""

    id_prefix = "cmpl"
    whole_object = part_object = "text_completion"

    def __init__(self, name: str, decode: Callable[[Sequence[int]], str], with_logprobs: bool) -> None:
        super().__init__(name, decode, with_logprobs)
        self._offsets: dict[int, int] = {}

    def _text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, text: str, *, is_first: bool) -> dict[str, Any]:
        return self._text(text)

    def _logprobs(self, index: int, piece: Piece) -> dict[str, Any]:
        texts = [self._decode([token_id]) for token_id in piece.token_ids]
        offsets, offset = [], self._offsets.get(index, 0)
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        logprobs = list(piece.logprobs)
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}


def fingerprint(name: str, pieces: Sequence[Piece]) -> str:
    """NAME@VERSION: the policy that sampled the completions; NAME@OLDEST-NEWEST when it was updated meanwhile."""
    endings = [piece.ending for piece in pieces if piece.ending]
    oldest = min(ending.oldest_version for ending in endings)
    newest = max(ending.newest_version for ending in endings)
    return f"{name}@{oldest}" if oldest == newest else f"{name}@{oldest}-{newest}"


def usage(num_prompt_tokens: int, pieces: Sequence[Piece]) -> dict[str, int]:
    """Tokens of the prompts and of the completions, stop tokens included."""
    sampled = sum(piece.ending.num_tokens for piece in pieces if piece.ending)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": num_prompt_tokens + sampled,
    }
