"""Asks servers with OpenAI's API questions, and keeps each answer as it comes.

INVARIANT: a question whose answer is in the log is not asked again, and an answer is in the log before it is used. The
key of an answer is a digest of the whole request, so the log is also the cache, and what was interrupted goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from nouscoder.errors import NousCoderError, first_error
from nouscoder.formats.body import Body
from nouscoder.openai_server import CompletionFailed, OpenAIServer
from nouscoder.progress_bar import progress_bar
from nouscoder.record_log import RecordLog, key_of


class NotAnswered(NousCoderError):
    """A server did not answer a question. The message says why; the answers that came are kept."""


class ServedModel(Body):
    """A model of a server with OpenAI's API. Where it is served says nothing about its answers, so no hash has it."""

    url: str = Field(exclude=True, min_length=1, description="such as http://127.0.0.1:8000/v1")
    model: str = Field(min_length=1, description="its name at the server")


class Question(Protocol):
    """Something to ask."""

    @property
    def served(self) -> ServedModel:
        """Who is asked."""
        ...

    @property
    def key(self) -> str:
        """A digest of all that the answer depends on."""
        ...

    async def ask(self, server: OpenAIServer) -> dict[str, Any]:
        """The record of the answer. Raises CompletionFailed."""
        ...


@dataclass(frozen=True, slots=True)
class ChatQuestion:
    """A request of a chat completion with one message. `settings` are its other fields, such as the temperature."""

    served: ServedModel
    content: str
    settings: dict[str, Any]

    @property
    def key(self) -> str:
        """See Question."""
        return key_of({"model": self.served.model, "content": self.content, "settings": self.settings})

    async def ask(self, server: OpenAIServer) -> dict[str, Any]:
        """See Question."""
        messages = [{"role": "user", "content": self.content}]
        answer = await server.complete(self.served.model, messages, **self.settings)
        # Half of a surrogate pair, which JSON can carry, is no text that can be sent or kept in a problem.
        text = answer.text.encode("utf8", "replace").decode()
        return {"answer": text, "finish_reason": answer.finish_reason}


def open_answers(path: Path) -> RecordLog:
    """The log of answers in a file. Raises LogUnusable and StorageError."""
    return RecordLog(path, "answer")


def ask_all(questions: Sequence[Question], answers: RecordLog, at_once: int, name: str) -> None:
    """Ask every question without an answer, at most `at_once` at a time. `name` is that of the progress bar.

    Raises NotAnswered at the first question that gets none.
    """
    missing = {question.key: question for question in questions if question.key not in answers}
    if missing:
        try:
            asyncio.run(_ask_all([*missing.values()], answers, at_once, name))
        except ExceptionGroup as group:  # of the workers, which all stop when one fails
            raise first_error(group) from None


async def _ask_all(questions: Sequence[Question], answers: RecordLog, at_once: int, name: str) -> None:
    async with AsyncExitStack() as stack:
        urls = {question.served.url for question in questions}
        servers = {
            url: await stack.enter_async_context(OpenAIServer(url, num_connections=at_once)) for url in sorted(urls)
        }
        advance = stack.enter_context(progress_bar(name, len(questions)))
        waiting = iter(questions)

        async def work(waiting: Iterator[Question]) -> None:
            for question in waiting:
                try:
                    answers.add(question.key, await question.ask(servers[question.served.url]))
                except CompletionFailed as error:
                    kept = "the other answers are kept: start again when the model is served there"
                    raise NotAnswered(f"{error}; {kept} (such as by `vllm serve`), or give another address") from None
                advance(1)

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work(waiting))
