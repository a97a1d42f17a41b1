"""The answers of a finished conversation, as a policy writes them after the generation prompt of its chat template.

    prompt    what the template writes before an answer, with the beginning of an answer: it may open <think>
    answer    what its rendering of the conversation has after the prompt, up to the end of the turn

INVARIANT: prompt and answer together are the template's own text of the conversation. There is one exception, because
many templates leave the reasoning out of a finished answer: then the answer is as the policy writes it, with the
reasoning. What a template leaves out else is refused by name.

Later answers stand after earlier ones as the template writes these. Where it leaves their reasoning out, each answer is
an example of its own; else one example has them all.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nouscoder.policy_folder.chat_template import ChatMessage
from nouscoder.policy_folder.tokenizer import PolicyTokenizer, TokenizerError

# Token ids, and whether they are in the loss.
Part = tuple[list[int], bool]

OPEN, CLOSE = "<think>", "</think>"
_TAG = r"((?:\w+:)?th(?:ink|ought)\w*)>\s*\Z"
_OPENED, _CLOSED = re.compile("<" + _TAG), re.compile("</" + _TAG)
_MARK = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]|\]~b\]")
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
                content = str(chat[place].get("content") or "")
                if CLOSE in content and CLOSE not in one.text and self._tokenizer.spelled(content) in last.prompt:
                    raise NotOfTemplate(
                        f"the chat template writes the {OPEN} of an earlier answer as text: give reasoning_content"
                    )
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
        (prompt,) = self._tokenizer.texts([before], self._thinking, tools=tools)
        given: str = last.get("content") or ""
        content: str = self._tokenizer.spelled(unmarked(self._tokenizer, prompt, given))
        reasoning: str | None = last.get("reasoning_content")
        final, is_field = content, reasoning is not None
        if reasoning is None and CLOSE in content:
            reasoning, _, final = content.partition(CLOSE)
            reasoning, final = reasoning.strip().removeprefix(OPEN).strip("\n"), final.lstrip("\n")
        if _CLOSED.search(prompt):
            if reasoning and reasoning.strip():
                raise NotOfTemplate(
                    "the prompt ends the reasoning, and the answer has one: set generation.environment.thinking to"
                    ' "on", or leave the reasoning out'
                )
            content, reasoning, is_field = final, None, False
        is_cut = reasoning is None and given.lstrip().startswith(OPEN)  # no </think>
        if not is_cut:
            choices = [] if reasoning is None else [{**last, "content": final, "reasoning_content": reasoning}]
            plain = {name: value for name, value in last.items() if name != "reasoning_content"}
            choices += [] if is_field else [{**plain, "content": content or last.get("content")}]
            for message in choices:
                text = self._finished([*before, message], tools, may_fail="tool_calls" not in last)
                if text.startswith(prompt) and _keeps(text[len(prompt) :], (reasoning or "").strip(), final.strip()):
                    return self._ended(prompt, text[len(prompt) :])
        return self._as_written(before, prompt, content, reasoning if is_field else None, is_cut, tools)

    def _as_written(
        self, before: list[ChatMessage], prompt: str, content: str, reasoning: str | None, is_cut: bool, tools: Any
    ) -> Answer:
        """An answer that the finished conversation does not have as the policy writes it."""
        mark = secrets.token_hex(16)
        text = self._finished([*before, {"role": "assistant", "content": mark}], tools, may_fail=True)
        begin, _, tail = text.rpartition(mark)
        if opened := _OPENED.search(prompt):
            if reasoning is not None:
                content = f"{reasoning}\n{CLOSE}\n\n{content}"
            elif CLOSE not in content and not is_cut:
                raise NotOfTemplate(
                    f"the chat template opens <{opened[1]}>, and the answer has no {CLOSE}: give the answer its"
                    f" reasoning, or begin it with {CLOSE}"
                )
            content = content.lstrip().removeprefix(OPEN) if opened[1] != "think" else content
            return self._ended(prompt, content.replace(CLOSE, f"</{opened[1]}>", 1) + tail)
        if reasoning is not None:
            raise NotOfTemplate(
                f"the chat template does not write reasoning_content: put it into content, between {OPEN} and {CLOSE}"
            )
        if text and not (is_cut or CLOSE in content):
            raise NotOfTemplate("the chat template does not write the answer after its own beginning of an answer")
        lead = begin.removeprefix(prompt) if begin.startswith(prompt) else ""
        return self._ended(prompt, ("" if CLOSE in lead else lead) + content + tail)

    def _finished(self, chat: Sequence[ChatMessage], tools: Any, *, may_fail: bool) -> str:
        """The text of a conversation; empty when `may_fail` and the template takes no such answer."""
        try:
            (text,) = self._tokenizer.texts([chat], self._thinking, next_answer=False, tools=tools)
        except TokenizerError:
            if may_fail:
                return ""
            raise
        return text

    def _ended(self, prompt: str, written: str) -> Answer:
        if self._end and self._end in written:
            return Answer(prompt, written[: written.rindex(self._end) + len(self._end)], True)
        bare = written.rstrip()
        is_ended = any(bare.endswith(name) for name in self._tokenizer.special_names)
        return Answer(prompt, bare if is_ended else written.rstrip("\n"), is_ended)

    def _check(self, chat: Sequence[ChatMessage], tools: Sequence[Any]) -> None:
        """Raises NotOfTemplate for a part of a conversation that the template leaves out."""
        shape = json.dumps([[{**one, "content": bool(one["content"])} for one in chat], len(tools)], default=str)
        if shape in self._written:
            return
        marks: dict[str, str] = {}

        def mark(what: str) -> str:
            marks[found := f"m{secrets.token_hex(8)}"] = what
            return found

        def marked(message: ChatMessage) -> dict[str, Any]:
            role, found = message["role"], {**message}
            found.pop("reasoning_content", None)
            if message["content"]:
                beside = " beside tool_calls" if message.get("tool_calls") else ""
                found["content"] = mark(f"the content of a message of {role}{beside}")
            if "name" in message and role != "tool":
                found["name"] = mark(f"the name in a message of {role}")
            if "tool_calls" in message:
                found["tool_calls"] = [_renamed(call, mark("a call of tool_calls")) for call in message["tool_calls"]]
            return found

        conversation = [marked(message) for message in chat]
        named = [_renamed(tool, mark("a tool of tools")) for tool in tools]
        text = self._finished(conversation, named, may_fail="tool_calls" not in chat[-1])
        if not text:
            (text,) = self._tokenizer.texts([conversation[:-1]], self._thinking, tools=named)
            text += str(conversation[-1]["content"])
        lost = [what for found, what in marks.items() if found not in text]
        if lost:
            raise NotOfTemplate(f"the chat template does not write {lost[0]}")
        self._written.add(shape)


def _renamed(described: Any, name: str) -> Any:
    """A tool, or a call of one, under another name."""
    if isinstance(described, dict) and isinstance(described.get("function"), dict):
        return {**described, "function": {**described["function"], "name": name}}
    return {**described, "name": name} if isinstance(described, dict) else described


def _keeps(written: str, reasoning: str, final: str) -> bool:
    """Whether a finished answer has its reasoning and its text."""
    return final in written and (not reasoning or written.count(reasoning) > final.count(reasoning))
