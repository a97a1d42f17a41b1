"""The records of a file of examples, and the examples that they are.

A record is a JSON object, one a line, or a row of a parquet file:

    prompt       the problem as a run asks it, in the run's prompt template; or
    messages     a conversation: system, user, assistant and tool, in the policy's chat template
    completion   the answer: a text, or turns [{"text", "given"}]; messages may end in the answer instead
    problem_id, accepted or verdict, prompt_template, starter_code, languages, tests_type or tests    optional

    tools        descriptions of the functions of `tool_calls`, a list or its JSON

The chat template writes each message in its role, with reasoning_content, tool_calls and name; what it leaves out is
refused (policy_folder/finished_chat.py). Turns that are `given` (outputs of tools) carry no loss, and neither does any
message but the assistant's, nor one with "weight": 0 or "train": false. A line of a run's samples.jsonl (prompt,
program, verdict) is a record too. Other fields are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import AliasChoices, ConfigDict, Field, ValidationError

from nouscoder.domain.prompt import rendered_mark
from nouscoder.domain.reasoning import parted
from nouscoder.domain.tokens import FinishReason
from nouscoder.domain.verdict import VerdictKind
from nouscoder.formats.body import Body, first_fault
from nouscoder.policy_folder.trained_on import digest_of


class BadExample(Exception):
    """A record is no example. The text says why."""


class Turn(Body):
    """A part of the answer: written by the policy, or `given` to it as the output of a tool."""

    text: str
    given: bool = False


class _TextPart(Body):
    type: Literal["text"]
    text: str


class _MessageBody(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] = ""
    reasoning_content: str | None = Field(
        None, validation_alias=AliasChoices("reasoning_content", "reasoning", "thinking")
    )
    tool_calls: list[dict[str, Any]] = Field([])
    tool_call_id: str = ""
    name: str = ""
    weight: Literal[0, 1] = 1
    train: bool = True

    @property
    def is_trained(self) -> bool:
        return self.role == "assistant" and self.weight == 1 and self.train

    def message(self) -> dict[str, Any]:
        """As a chat template takes it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        optional = ("reasoning_content", "tool_calls", "tool_call_id", "name")
        given = {name: value for name in optional if (value := getattr(self, name))}
        return {"role": self.role, "content": content or (None if self.tool_calls else ""), **given}


class Record(Body):
    """A record, see the module."""

    model_config = ConfigDict(extra="ignore")

    problem_id: str = ""
    prompt: str = ""
    prompt_template: str = Field("", pattern=r"^$|\{prompt\}")
    starter_code: str = ""
    languages: list[str] = Field([])
    tests_type: str = "stdin"
    tests: Any = None
    messages: list[_MessageBody] = Field([])
    tools: list[Any] | str = Field([])
    completion: str | list[Turn] = ""
    program: str = ""
    finish_reason: str = ""
    accepted: bool | None = None
    verdict: VerdictKind | None = Field(None, strict=False)

    @property
    def text_digest(self) -> str:
        """The digest of its problem: the prompt, or the first message of a user."""
        asked = (str(one.message()["content"]) for one in self.messages if one.role == "user")
        return digest_of(self.prompt or next(asked, ""), self.starter_code)


@dataclass(frozen=True, slots=True)
class Example:
    """One example: its record, and the turns of its completion.

    The turns begin and end with one of the policy, and no two of a kind follow each other. There are none where
    `messages` end in the answer. `accepted` is None when nobody has graded the answer.
    """

    record: Record
    turns: tuple[Turn, ...]
    accepted: bool | None

    @property
    def is_unfinished(self) -> bool:
        """Whether the answer was cut off: its record says so, or it is wrong and ends inside its reasoning."""
        is_open = self.accepted is False and bool(self.turns) and parted(self.turns[-1].text)[1] is None
        return is_open or self.record.finish_reason == FinishReason.LENGTH


def example_of(record: Any) -> Example:
    """The example that a record is. Raises BadExample."""
    try:
        body = Record.model_validate(without_nulls(record, 2))  # of the record, and of each message
    except ValidationError as error:
        field, fault = first_fault(error)
        raise BadExample(fault if field == "body" else f"{field}: {fault}") from None
    if bool(body.prompt) == bool(body.messages):
        raise BadExample("it needs either a prompt or messages")
    completion = body.completion or body.program
    turns = completion if isinstance(completion, list) else [Turn(text=completion)] if completion else []
    _check(body.messages, turns)
    if body.verdict is VerdictKind.INTERNAL_ERROR:
        raise BadExample("internal_error is no verdict on an answer: leave the record out")
    accepted = body.accepted if body.verdict is None else body.verdict is VerdictKind.ACCEPTED
    return Example(body, tuple(turns), accepted)


def without_nulls(value: Any, levels: int) -> Any:
    """A value without the fields that are null: rows of parquet have every field of every record in them."""
    if isinstance(value, list):
        return [without_nulls(item, levels) for item in value]
    if isinstance(value, dict) and levels:
        return {name: without_nulls(item, levels - 1) for name, item in value.items() if item is not None}
    return value


def _check(messages: Sequence[_MessageBody], turns: Sequence[Turn]) -> None:
    for number, message in enumerate(messages):
        if message.role == "assistant" and not (number and (message.content or message.tool_calls)):
            raise BadExample("messages: an answer has no message before it" if not number else "an answer is empty")
        text = str(message.message()["content"] or "")
        if message.reasoning_content and parted(text) != ("", text):
            raise BadExample("messages: an answer has reasoning_content, and reasoning in its content: leave one out")
        mark = rendered_mark(text)
        if mark and message.role != "assistant":
            raise BadExample(
                f"messages: a content is in a chat template already (it begins with {mark}): give its text"
            )
    if turns and len(turns) > 1 and any(message.role == "assistant" for message in messages):
        raise BadExample(
            "a completion of several turns follows messages that have answers: put the turns into messages"
        )
    if not ((turns and not turns[-1].given) or (not turns and messages and messages[-1].role == "assistant")):
        raise BadExample("it does not end with an answer: completion is missing, or the last message is no assistant's")
    if not turns and not any(message.is_trained for message in messages):
        raise BadExample("messages: no answer is trained")
    for number, turn in enumerate(turns):
        if turn.given != bool(number % 2):
            raise BadExample(f"turn {number + 1} of the answer and the one before it are of the same side")
        if not turn.text:
            raise BadExample(f"turn {number + 1} of the answer is empty")
