"""The form of an example of supervised fine-tuning, and the records of its files.

A record is a JSON object, one a line, or a row of a parquet file:

    prompt       the problem as a run asks it, in the run's prompt template; or
    messages     a conversation: system, user, assistant and tool, in the policy's chat template
    completion   the answer: a text, or turns [{"text", "given"}]; messages may end in the answer instead
    problem_id, accepted or verdict, prompt_template, starter_code, languages    optional

Turns that are `given` (outputs of tools) carry no loss, and neither does any message but the assistant's. A line of a
run's samples.jsonl (prompt, program, verdict) is a record too. Other fields are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from nouscoder.domain.conversation import Message, Role
from nouscoder.domain.verdict import VerdictKind
from nouscoder.formats.body import Body, first_fault


class BadExample(Exception):
    """A record is no example. The text says why."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A part of the answer: written by the policy, or `is_given` to it as the output of a tool."""

    text: str
    is_given: bool = False


@dataclass(frozen=True, slots=True)
class Example:
    """One example. Either `prompt` or `messages` begin it; `is_rendered`: the prompt needs no template any more.

    The turns begin and end with one of the policy, and no two of a kind follow each other. `accepted` is None when
    nobody has graded the answer.
    """

    turns: tuple[Turn, ...]
    prompt: str = ""
    prompt_template: str = ""
    messages: tuple[Message, ...] = ()
    problem_id: str = ""
    accepted: bool | None = None
    is_rendered: bool = False
    starter_code: str = ""
    languages: tuple[str, ...] = ()


class _TurnBody(Body):
    text: str
    given: bool = False


class _MessageBody(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class _ExampleBody(Body):
    model_config = ConfigDict(extra="ignore")

    problem_id: str = ""
    prompt: str = ""
    prompt_template: str = Field("", pattern=r"^$|\{prompt\}")
    starter_code: str = ""
    languages: list[str] = Field([])
    messages: list[_MessageBody] = Field([])
    completion: str | list[_TurnBody] = ""
    program: str = ""
    accepted: bool | None = None
    verdict: VerdictKind | None = Field(None, strict=False)


def example_of(record: Any) -> Example:
    """The example that a record is. Raises BadExample."""
    if isinstance(record, dict):
        record = {name: _without_nulls(value) for name, value in record.items() if value is not None}
    try:
        body = _ExampleBody.model_validate(record)
    except ValidationError as error:
        field, fault = first_fault(error)
        raise BadExample(fault if field == "body" else f"{field}: {fault}") from None
    if bool(body.prompt) == bool(body.messages):
        raise BadExample("it needs either a prompt or messages")
    begin, turns = _divided(body)
    turns += _turns_of(body.completion or body.program)
    _check(turns)
    if body.verdict is VerdictKind.INTERNAL_ERROR:
        raise BadExample("internal_error is no verdict on an answer: leave the record out")
    accepted = body.accepted if body.verdict is None else body.verdict is VerdictKind.ACCEPTED
    return Example(
        turns=tuple(turns),
        prompt=body.prompt,
        prompt_template=body.prompt_template,
        messages=begin,
        problem_id=body.problem_id,
        accepted=accepted,
        is_rendered=bool(body.program),
        starter_code=body.starter_code,
        languages=tuple(body.languages),
    )


def _without_nulls(value: Any) -> Any:
    """Rows of parquet have every field of every message, null where it is missing."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {name: item for name, item in value.items() if item is not None}
    return value


def _divided(body: _ExampleBody) -> tuple[tuple[Message, ...], list[Turn]]:
    """The messages before the first answer, and the turns from it on."""
    roles = [message.role for message in body.messages]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    begin = tuple(Message(Role(message.role), message.content) for message in body.messages[:first])
    if body.messages and not begin:
        raise BadExample("messages: an answer has no message before it")
    return begin, [Turn(message.content, message.role != "assistant") for message in body.messages[first:]]


def _turns_of(completion: str | Sequence[_TurnBody]) -> list[Turn]:
    if isinstance(completion, str):
        return [Turn(completion)] if completion else []
    return [Turn(turn.text, turn.given) for turn in completion]


def _check(turns: Sequence[Turn]) -> None:
    if not turns or turns[-1].is_given:
        raise BadExample("it does not end with an answer: completion is missing, or the last message is no assistant's")
    for number, turn in enumerate(turns):
        if turn.is_given != bool(number % 2):
            raise BadExample(f"turn {number + 1} of the answer and the one before it are of the same side")
        if not turn.text:
            raise BadExample(f"turn {number + 1} of the answer is empty")
