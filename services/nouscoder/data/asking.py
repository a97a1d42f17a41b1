"""Asks servers with OpenAI's API questions, and keeps each answer as it comes.

INVARIANT: a question whose answer is in the log is not asked again, and an answer is in the log before it is used. The
key of an answer is a digest of the whole request, so the log is also the cache, and what was interrupted goes on.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from nouscoder.domain.reasoning import begun_by, parted
from nouscoder.errors import NousCoderError, first_error
from nouscoder.formats.body import Body
from nouscoder.openai_server import CompletionFailed, OpenAIServer
from nouscoder.progress_bar import progress_bar
from nouscoder.record_log import RecordLog, key_of

Item = TypeVar("Item")


class NotAnswered(NousCoderError):
    """A server did not answer a question. The message says why; the answers that came are kept."""


class ServedModel(Body):
    """A model of a server with OpenAI's API. Where it is served says nothing about its answers, so no hash has it."""

    url: str = Field(exclude=True, min_length=1, description="such as http://127.0.0.1:8000/v1")
    model: str = Field(min_length=1, description="its name at the server")


@dataclass(frozen=True, slots=True)
class Question(ABC):
    """Something to ask a model. `asked` is all else that the answer depends on."""

    served: ServedModel
    asked: dict[str, Any]

    @property
    def key(self) -> str:
        """A digest of all that the answer depends on."""
        return key_of({"model": self.served.model, **self.asked})

    @abstractmethod
    async def ask(self, server: OpenAIServer) -> dict[str, Any]:
        """The record of the answer. Raises CompletionFailed."""


class ChatQuestion(Question):
    """A request of a chat completion: the `content` of its one message, and its other `settings`."""

    async def ask(self, server: OpenAIServer) -> dict[str, Any]:
        """See Question."""
        messages = [{"role": "user", "content": self.asked["content"]}]
        answer = await server.complete(self.served.model, messages, **self.asked["settings"])
        # Half of a surrogate pair, which JSON can carry, is no text that can be sent or kept in a problem.
        text = begun_by(answer.prefill, answer.text).encode("utf8", "replace").decode()
        # A verdict or a program inside reasoning that was cut is none.
        return {"answer": parted(text)[1] or "", "finish_reason": answer.finish_reason}


def open_answers(path: Path) -> RecordLog:
    """The log of answers in a file. Raises LogUnusable and StorageError."""
    return RecordLog(path, "answer")


def ask_all(questions: Sequence[Question], answers: RecordLog, at_once: int, name: str) -> None:
    """Ask every question without an answer, `at_once` at a time. Raises NotAnswered at the first that gets none."""
    missing = {question.key: question for question in questions if question.key not in answers}
    if missing:
        asyncio.run(_ask_all(missing, answers, at_once, name))


async def _ask_all(missing: dict[str, Question], answers: RecordLog, at_once: int, name: str) -> None:
    async with AsyncExitStack() as stack:
        urls = {question.served.url for question in missing.values()}
        servers = {
            url: await stack.enter_async_context(OpenAIServer(url, num_connections=at_once)) for url in sorted(urls)
        }

        async def ask(question: Question) -> dict[str, Any]:
            try:
                return await question.ask(servers[question.served.url])
            except CompletionFailed as error:
                kept = "the other answers are kept: start again when the model is served there"
                raise NotAnswered(f"{error}; {kept} (such as by `vllm serve`), or give another address") from None

        advance = stack.enter_context(progress_bar(name, len(missing)))
        await fill(answers, missing.items(), at_once, ask, advance)


async def fill(
    log: RecordLog,
    missing: Iterable[tuple[str, Item]],
    at_once: int,
    make: Callable[[Item], Awaitable[dict[str, Any] | None]],
    advance: Callable[[float], object] = lambda more: None,
) -> None:
    """Add what `make` makes for each key, `at_once` at a time; None is not added. Raises its first error."""
    waiting = iter(missing)

    async def work() -> None:
        for key, item in waiting:
            if (record := await make(item)) is not None:
                log.add(key, record)
            advance(1)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work())
    except BaseExceptionGroup as failed:
        raise first_error(failed) from None
