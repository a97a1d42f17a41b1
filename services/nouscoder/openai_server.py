"""Chat completions and embeddings of any server with OpenAI's API, such as vLLM or SGLang.

INVARIANT: whatever a server sends, at most MAX_ANSWER_BYTES of an answer are in memory, and an answer takes at most
`timeout_s`. Nothing is decompressed: a few bytes would become gigabytes.

Retries are bounded. A request is sent again when the server cannot be reached, is overloaded (408, 409, 429) or fails
(5xx). Any other refusal is final, because it would be refused again. So is an unknown host, and a URL of another kind.

INVARIANT: a server that has never been reached is waited for once, for a short time, by the first request; then every
request fails at once.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import httpx

from nouscoder.client.errors import DeadlinePassed, failure_of_transport
from nouscoder.errors import ExitCode, NousCoderError
from nouscoder.formats.json_values import TooManyValues, ValueCount
from nouscoder.retry import Retry

KEY_ENVIRONMENT = "OPENAI_API_KEY"
MAX_ANSWER_BYTES = 64 * 1024**2
_MAX_WEIGHT = 2_000_000  # of an answer's values: about 100 MB
_SHOWN_BYTES = 4096  # of a refusal
_CONTACT_S = 10.0
_PASSING_STATUSES = frozenset({408, 409, 429})

Answer = TypeVar("Answer")


class CompletionFailed(NousCoderError):
    """The server gave no answer to a request. The message names the server and the reason."""

    exit_code = ExitCode.UNAVAILABLE


class _Unavailable(Exception):
    """No answer now, perhaps later. The text says why."""


_WHILE_UNAVAILABLE = Retry("a completion", (_Unavailable,), for_s=300.0, max_tries=20, wait_s=0.5, max_wait_s=30.0)
_WHILE_STARTING = Retry(
    "reaching the server", (_Unavailable,), for_s=15.0, wait_s=0.5, max_wait_s=1.0, log_after_s=0.0, log_every_s=5.0
)


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """One answer. `reasoning` is the part that a server separates from it. `num_tokens` [tokens] is None if unknown."""

    text: str
    reasoning: str
    finish_reason: str
    num_tokens: int | None
    prefill: str = ""  # the tag of reasoning that the prompt has opened; only our own server says it


class OpenAIServer:
    """A server at `url`, such as http://127.0.0.1:8000/v1. It belongs to one event loop.

    Without a `key` it is that of the environment variable OPENAI_API_KEY. `timeout_s` bounds one answer.
    """

    def __init__(self, url: str, timeout_s: float = 3600.0, num_connections: int = 64, key: str = "") -> None:
        self._url = url.rstrip("/")
        key = key or os.environ.get(KEY_ENVIRONMENT, "")
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=num_connections),
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {}),
        )
        self._first_contact = asyncio.Lock()
        self._is_reached = False
        self._absent = ""  # why it was not reached, once it was waited for

    async def complete(self, model: str, messages: Sequence[Mapping[str, str]], **settings: Any) -> ChatCompletion:
        """One completion; `settings` are further fields of the request. Raises CompletionFailed."""
        request = {"model": model, "messages": list(messages), **settings}
        return await self._answer("chat/completions", request, _completion)

    async def complete_text(self, model: str, prompt: str, **settings: Any) -> ChatCompletion:
        """One completion of a text, as it is. Raises CompletionFailed."""
        return await self._answer("completions", {"model": model, "prompt": prompt, **settings}, _completion)

    async def embed(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        """The embedding of each text, in their order. Raises CompletionFailed."""
        request = {"model": model, "input": list(texts), "encoding_format": "float"}
        return await self._answer("embeddings", request, lambda record: _embeddings(record, len(texts)))

    async def _answer(self, path: str, request: dict[str, Any], read: Callable[[dict[str, Any]], Answer]) -> Answer:
        """The answer to a request, which `read` takes from its JSON. Raises CompletionFailed."""
        await self._reach()
        try:
            return await _WHILE_UNAVAILABLE.call(lambda: self._ask(path, request, read))
        except _Unavailable as error:
            raise CompletionFailed(f"{self._url} gave no answer to {path}: {error}") from None

    async def _reach(self) -> None:
        """Wait until the server is there, the first time. Raises CompletionFailed."""
        if self._is_reached:
            return
        async with self._first_contact:
            if not self._is_reached and not self._absent:
                try:
                    await _WHILE_STARTING.call(self._connect)
                except _Unavailable as error:
                    self._absent = f"{self._url}: {error}; start it, or correct the URL"
                except CompletionFailed as error:
                    self._absent = str(error)
        if self._absent:
            raise CompletionFailed(self._absent)

    async def _connect(self) -> None:
        """Any answer shows that a server is there. Raises _Unavailable and CompletionFailed."""
        try:
            async with self._http.stream("GET", f"{self._url}/models", timeout=_CONTACT_S):
                pass
        except (httpx.ReadError, httpx.ReadTimeout, httpx.ProtocolError):
            pass  # it is there, and busy or odd, which the requests will show
        except httpx.TransportError as error:
            raise self._failed(error) from None
        except httpx.InvalidURL as error:
            raise CompletionFailed(f"{self._url!r} is not a URL: {error}") from None
        self._is_reached = True

    def _failed(self, error: httpx.TransportError) -> _Unavailable | CompletionFailed:
        """The error of a request without an answer: whether it can pass."""
        failure = failure_of_transport(error, "the server")
        passes = failure.is_passing or isinstance(failure, DeadlinePassed)
        return _Unavailable(str(failure)) if passes else CompletionFailed(f"{self._url}: {failure}")

    async def _ask(self, path: str, request: dict[str, Any], read: Callable[[dict[str, Any]], Answer]) -> Answer:
        status, body = await self._sent(path, request)
        if status in _PASSING_STATUSES or status >= 500:
            raise _Unavailable(f"HTTP {status}: {_shown(body)}")
        if status != 200:
            hint = "" if status != 404 or self._url.endswith("/v1") else " (the URL of most servers ends in /v1)"
            raise CompletionFailed(f"{self._url} refused {path}: HTTP {status}: {_shown(body)}{hint}")
        try:
            ValueCount(most=_MAX_WEIGHT).add(body)
            return read(json.loads(body))  # it takes half of a surrogate pair, which models write
        except TooManyValues:
            raise CompletionFailed(f"{self._url}: its answer to {path} holds too many values") from None
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError):
            raise CompletionFailed(f"{self._url} gave no usable answer to {path}: {_shown(body)}") from None

    async def _sent(self, path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        """The status and the body of the answer; of a refusal only its beginning."""
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._http.stream("POST", f"{self._url}/{path}", json=request) as answer,
            ):
                packed = answer.headers.get("content-encoding", "identity")
                if packed != "identity":
                    raise CompletionFailed(
                        f"{self._url} compresses its answers ({packed:.40}), which was not asked for"
                    )
                body = bytearray()
                async for piece in answer.aiter_raw():
                    body += piece
                    if answer.status_code != 200 and len(body) > _SHOWN_BYTES:
                        break
                    if len(body) > MAX_ANSWER_BYTES:
                        most = f"{MAX_ANSWER_BYTES // 1024**2} MiB"
                        raise CompletionFailed(f"{self._url}: its answer to {path} is larger than {most}")
                return answer.status_code, bytes(body)
        except TimeoutError:
            raise _Unavailable(f"there was no whole answer within {self._timeout_s:g} s") from None
        except httpx.TransportError as error:
            raise self._failed(error) from None

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


def _shown(body: bytes) -> str:
    """The beginning of an answer for a message."""
    return body[:_SHOWN_BYTES].decode(errors="replace")[:300]


def _completion(record: dict[str, Any]) -> ChatCompletion:
    choice = record["choices"][0]
    message = choice["message"] if "message" in choice else {"content": choice["text"]}
    num_tokens = (record.get("usage") or {}).get("completion_tokens")
    return ChatCompletion(
        # A completion that ends inside the reasoning has no text.
        text=str(message.get("content") or ""),
        reasoning=str(message.get("reasoning_content") or message.get("reasoning") or ""),
        finish_reason=str(choice.get("finish_reason") or ""),
        num_tokens=None if num_tokens is None else int(num_tokens),
        prefill=str(message.get("prefill") or ""),
    )


def _embeddings(record: dict[str, Any], num_texts: int) -> list[list[float]]:
    """The vectors in the order of the texts: each has its index. Raises ValueError when one is missing."""
    by_place = {int(item["index"]): [float(value) for value in item["embedding"]] for item in record["data"]}
    if by_place.keys() != set(range(num_texts)) or not all(by_place.values()):
        raise ValueError("there is not one vector for each text")
    return [by_place[place] for place in range(num_texts)]
