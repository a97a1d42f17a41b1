"""The answers of a finished conversation, as a policy writes them after the generation prompt of its chat template.

    prompt    what the template writes before an answer, with the beginning of an answer: it may open <think>
    answer    what its rendering of the conversation has after the prompt, up to the end of the turn

INVARIANT: prompt and answer together are the template's own text of the conversation. There are two exceptions. Many
templates leave the reasoning out of a finished answer: then the answer is as the policy writes it, with the reasoning.
Some write an empty reasoning into the prompt alone: then the answer follows it. What a template leaves out else is
refused by name, and so is an answer that ends inside its reasoning.

Later answers stand after earlier ones as the template writes these. Where it leaves their reasoning out, each answer is
an example of its own; else one example has them all.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nouscoder.domain.reasoning import CLOSED, CLOSING, OPENING, opened_by, parted
from nouscoder.policy_folder.chat_template import ChatMessage
from nouscoder.policy_folder.tokenizer import PolicyTokenizer, TokenizerError

# Token ids, and whether they are in the loss.
Part = tuple[list[int], bool]

OPEN, CLOSE = "<think>", "</think>"
_EMPTY = re.compile(rf"(?:{'|'.join(map(re.escape, CLOSING))})?\s*(?:{CLOSED.pattern})\s*\Z")
_MARK = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]|\]~b\]|◁think▷")
_TAIL = 400  # characters of a prompt that may be its beginning of an answer


class NotOfTemplate(ValueError):
    """A chat template does not write a conversation as it is meant. The message says what it leaves out."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer after its prompt. Not `is_ended`: the template writes no end."""

    prompt: str
    text: str
    is_ended: bool


def unmarked(tokenizer: PolicyTokenizer, prompt: str, answer: str) -> str:
    """An answer without what its prompt has already, such as <think>, and without the end token as text."""
    ends = [end for end in tokenizer.pieces(sorted(tokenizer.stop_ids)) if len(end.strip()) > 1]
    while found := next((end for end in ends if answer.rstrip().endswith(end)), ""):
        answer = answer.rstrip().removesuffix(found)
    tail = prompt[-_TAIL:]
    bare = answer.lstrip()
    for begin in (tail[mark.start() :].strip() for mark in _MARK.finditer(tail)):
        if bare.startswith(begin):
            rest = bare.removeprefix(begin)
            return rest.lstrip("\n") if prompt.endswith("\n") else rest
    return answer


class FinishedChats:
    """Divides finished conversations of one policy into prompts and answers."""

    def __init__(self, tokenizer: PolicyTokenizer, thinking: bool | None) -> None:
        self._tokenizer = tokenizer
        self._thinking = thinking
        self._end = "".join(tokenizer.pieces(tokenizer.turn_end))
        self._written: set[str] = set()

    def parts(
        self, chat: Sequence[ChatMessage], trained: Collection[int], tools: Sequence[Any]
    ) -> Iterator[list[Part]]:
        """The examples of a conversation: each of the `trained` messages is in the loss of one of them, once.

        The last messages come first. Raises NotOfTemplate and TokenizerError.
        """
        chat = self._readable([self._with_reasoning(self._unended(message)) for message in chat], tools)
        left = sorted(trained)
        self._check(chat[: left[-1] + 1], tools)
        answers = {place: self.answer(chat[: place + 1], tools) for place in left}
        while left:
            last = answers[left.pop()]
            parts: list[Part] = []
            done = 0
            for place in [*left]:
                one = answers[place]
                end = self._end_within(one, last.prompt)
                if end > done:
                    parts += self._parts(last.prompt, done, len(one.prompt), end)
                    done = end
                    left.remove(place)
            text = last.text if last.is_ended else last.text + self._tokenizer.pieces([self._tokenizer.eos_id])[0]
            yield parts + self._parts(last.prompt + text, done, len(last.prompt), len(last.prompt + text))

    def _parts(self, text: str, start: int, middle: int, end: int) -> list[Part]:
        encode = self._tokenizer.encode_after
        return [(encode(text[:start], text[start:middle]), False), (encode(text[:middle], text[middle:end]), True)]

    def _end_within(self, one: Answer, prompt: str) -> int:
        """Where an answer ends in the prompt of a later one; 0 when it does not stand there as it was written."""
        text = one.prompt + one.text
        if not prompt.startswith(text):
            return 0
        if one.is_ended:
            return len(text)
        # The beginning of the next turn is the end of this one.
        stops = self._tokenizer.pieces(sorted(self._tokenizer.stop_ids))
        after = next((stop for stop in stops if stop and prompt.startswith(stop, len(text))), "")
        return len(text + after) if after else 0

    def answer(self, chat: Sequence[ChatMessage], tools: Sequence[Any] = ()) -> Answer:
        """The last message, of the assistant, after the messages before it. Raises NotOfTemplate, TokenizerError."""
        *before, last = chat
        prompt = self._text(before, tools, next_answer=True)
        given: str = last.get("content") or ""
        begun = unmarked(self._tokenizer, prompt.removesuffix(opened_by(prompt)), given).lstrip()
        if (opened := OPENING.match(begun)) and parted(begun)[1] is None:
            raise NotOfTemplate(f"the answer ends inside its reasoning ({opened['tag']} is not closed): leave it out")
        content = self._tokenizer.spelled(unmarked(self._tokenizer, prompt, given))
        last = self._with_reasoning({**last, "content": content} if content else last)
        content, reasoning = last.get("content") or "", last.get("reasoning_content")
        if _EMPTY.search(prompt):
            thought = content.partition(CLOSE)[0] if CLOSE in content else ""
            if (reasoning or thought.replace(OPEN, "")).strip():
                raise NotOfTemplate(
                    "the prompt ends the reasoning, and the answer has one: set generation.environment.thinking to"
                    ' "on", or leave the reasoning out'
                )
            content = content.rpartition(CLOSE)[2].lstrip("\n") if CLOSE in content else content
            last = {name: value for name, value in last.items() if name != "reasoning_content"} | {"content": content}
        text = self._text([*before, last], tools, may_fail="tool_calls" not in last)
        for begin in (prompt, _EMPTY.sub("", prompt)):
            written = (
                text[len(begin) :] if begin == prompt else CLOSED.sub("", text[len(begin) :].lstrip("\n"), count=1)
            )
            if text.startswith(begin) and _keeps(opened_by(begin).strip(), written, content, reasoning):
                return self._ended(prompt, written)
        return self._as_written(before, prompt, last, tools)

    def _as_written(self, before: list[ChatMessage], prompt: str, last: ChatMessage, tools: Any) -> Answer:
        """An answer that the finished conversation does not have as the policy writes it."""
        content, reasoning = last.get("content") or "", last.get("reasoning_content")
        opened, has_calls = opened_by(prompt).strip(), "tool_calls" in last
        closing = CLOSING.get(opened, CLOSE)
        if opened and reasoning is None and CLOSE not in content and closing not in content:
            raise NotOfTemplate(
                f"the chat template opens {opened}, and the answer has no {CLOSE}: give the answer its reasoning,"
                f" or begin it with {CLOSE}"
            )
        if reasoning is not None and (has_calls or not opened):
            raise NotOfTemplate(
                f"the chat template does not write reasoning_content: put it into content, between {OPEN} and {CLOSE}"
            )
        mark = secrets.token_hex(16)
        text = self._text([*before, {"role": "assistant", "content": mark}], tools, may_fail=True)
        if has_calls or (text and not opened and CLOSE not in content):
            what = "tool_calls" if has_calls else "the answer"
            raise NotOfTemplate(f"the chat template does not write {what} after its own beginning of an answer")
        begin, _, tail = text.rpartition(mark)
        if reasoning is not None:
            content = f"{reasoning}\n{closing}\n\n{content}"
        elif opened and opened != OPEN:
            content = content.lstrip().removeprefix(OPEN).replace(CLOSE, closing, 1)
        lead = begin.removeprefix(prompt) if begin.startswith(prompt) and not opened else ""
        return self._ended(prompt, ("" if CLOSE in lead else lead) + content + tail)

    @cached_property
    def _splits_traces(self) -> bool:
        """Whether <think> of a content goes to reasoning_content: else it would be text, doubled or left out."""
        thought, said = secrets.token_hex(8), secrets.token_hex(8)
        answers = (
            {"content": said, "reasoning_content": thought},
            {"content": f"{OPEN}\n{thought}\n{CLOSE}\n\n{said}"},
        )
        asked = {"role": "user", "content": "-"}
        field, plain = (self._text([asked, {"role": "assistant", **one}], (), may_fail=True) for one in answers)
        return thought in field and (thought not in plain or plain.count(CLOSE) != field.count(CLOSE))

    def _with_reasoning(self, message: ChatMessage) -> ChatMessage:
        head, closing, final = (message.get("content") or "").partition(CLOSE)
        head = head.strip()
        if message["role"] != "assistant" or not closing or not (head.startswith(OPEN) or OPEN not in head):
            return message
        if message.get("reasoning_content") or not self._splits_traces:
            return message
        return {**message, "content": final.lstrip("\n"), "reasoning_content": head.removeprefix(OPEN).strip("\n")}

    def _unended(self, message: ChatMessage) -> ChatMessage:
        is_said = message["role"] == "assistant" and message.get("content")
        return {**message, "content": unmarked(self._tokenizer, "", message["content"])} if is_said else message

    def _readable(self, chat: list[ChatMessage], tools: Sequence[Any]) -> list[ChatMessage]:
        """The conversation with calls as the template takes them.

        Arguments are an object or its JSON; a content that is not there is left out, null or empty. Raises as `parts`.
        """
        failed: TokenizerError | None = None
        for content in ({}, {"content": None}, {"content": ""}):
            for form in (lambda given: given, _as_object, _as_json):
                found = [_called(message, form, content) for message in chat]
                if found == chat and not any("tool_calls" in message for message in chat):
                    return chat
                try:
                    text = self._text(found, tools)
                except TokenizerError as error:
                    failed = failed or error
                    continue
                calls = [call for message in found for call in message.get("tool_calls", ())]
                if not any(_is_spoilt(call.get("function", call).get("arguments"), text) for call in calls):
                    return found
        raise failed or NotOfTemplate("the chat template does not write the arguments of tool_calls as JSON")

    def _text(
        self, chat: Sequence[ChatMessage], tools: Any, *, next_answer: bool = False, may_fail: bool = False
    ) -> str:
        """The text of a conversation; empty when `may_fail` and the template takes no such answer."""
        try:
            return self._tokenizer.texts([chat], self._thinking, next_answer=next_answer, tools=tools)[0]
        except TokenizerError:
            if may_fail:
                return ""
            raise

    def _ended(self, prompt: str, written: str) -> Answer:
        if self._end and self._end in written:
            return Answer(prompt, written[: written.rindex(self._end) + len(self._end)], True)
        bare = written.rstrip()
        is_ended = any(bare.endswith(name) for name in self._tokenizer.special_names)
        return Answer(prompt, bare if is_ended else written.rstrip("\n"), is_ended)

    def _check(self, chat: Sequence[ChatMessage], tools: Sequence[Any]) -> None:
        """Raises NotOfTemplate for a part of a conversation that the template leaves out."""
        shape = json.dumps([[{**one, "content": bool(one.get("content"))} for one in chat], len(tools)], default=str)
        if shape in self._written:
            return
        marks: dict[str, str] = {}

        def mark(what: str) -> str:
            marks[found := f"m{secrets.token_hex(8)}"] = what
            return found

        def marked(message: ChatMessage) -> dict[str, Any]:
            role, found = message["role"], {**message}
            found.pop("reasoning_content", None)
            if message.get("content"):
                beside = " beside tool_calls" if message.get("tool_calls") else ""
                found["content"] = mark(f"the content of a message of {role}{beside}")
            if "name" in message and role != "tool":
                found["name"] = mark(f"the name in a message of {role}")
            if "tool_calls" in message:
                calls = message["tool_calls"]
                found["tool_calls"] = [_changed(call, name=mark("a call of tool_calls")) for call in calls]
            return found

        conversation = [marked(message) for message in chat]
        named = [_changed(tool, name=mark("a tool of tools")) for tool in tools]
        text = self._text(conversation, named, may_fail="tool_calls" not in chat[-1])
        if not text:
            text = self._text(conversation[:-1], named, next_answer=True) + str(conversation[-1]["content"])
        lost = [what for found, what in marks.items() if found not in text]
        if lost:
            raise NotOfTemplate(f"the chat template does not write {lost[0]}")
        self._written.add(shape)


def _changed(described: Any, **fields: Any) -> Any:
    """A tool, or a call of one, with other fields."""
    if isinstance(described, dict) and isinstance(described.get("function"), dict):
        return {**described, "function": {**described["function"], **fields}}
    return {**described, **fields} if isinstance(described, dict) else described


def _called(message: ChatMessage, form: Callable[[Any], Any], empty: ChatMessage) -> ChatMessage:
    if "tool_calls" not in message:
        return message
    calls = [
        _changed(call, arguments=form(call.get("function", call).get("arguments"))) for call in message["tool_calls"]
    ]
    return {**empty, **{name: value for name, value in message.items() if value is not None}, "tool_calls": calls}


def _as_object(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        raise NotOfTemplate("tool_calls: the arguments of a call are not JSON") from None


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _is_spoilt(arguments: Any, text: str) -> bool:
    """Whether arguments stand in a text as JSON within JSON, or as Python writes them."""
    as_json = json.dumps(arguments, ensure_ascii=False)
    return as_json in text if isinstance(arguments, str) else repr(arguments) != as_json and repr(arguments) in text


def _keeps(opened: str, written: str, content: str, reasoning: str | None) -> bool:
    """Whether a finished answer has its reasoning once, closed if the prompt opens it, and its text."""
    thought, _, final = (
        content.partition(CLOSE) if reasoning is None and CLOSE in content else (reasoning or "", "", content)
    )
    thought = thought.strip().removeprefix(OPEN).strip()
    if opened and CLOSING[opened] not in written:
        return False
    if reasoning is None and CLOSE in content and written.count(CLOSE) != content.count(CLOSE):
        return False
    return final.strip() in written and (not thought or written.count(thought) > final.count(thought))
