"""The tags between which models write their reasoning. Pure.

`<think>` of DeepSeek-R1, Qwen, GLM, Nemotron and others; the others are those that vLLM's reasoning parsers know:
Magistral, Cohere, Seed-OSS, Apertus, Kimi, EXAONE Deep, LongCat, gpt-oss (harmony) and Gemma 4.

An opening tag counts at the begin of a line or behind another tag. The end of a prompt may have opened the reasoning:
then the tag belongs to the answer, which is read as if the policy had written it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_FINAL = "<|channel|>final<|message|>"
CLOSING = {
    **{f"<{name}>": f"</{name}>" for name in ("think", "thinking", "thought", "reasoning", "seed:think")},
    "<longcat_think>": "</longcat_think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "◁think▷": "◁/think▷",
    "<|channel|>analysis<|message|>": _FINAL,
    "<|channel|>commentary<|message|>": _FINAL,
    "<|channel>thought": "<channel|>",
}
_OPENINGS, _CLOSINGS = ("|".join(map(re.escape, tags)) for tags in (CLOSING, dict.fromkeys(CLOSING.values())))
OPENING = re.compile(rf"(?:(?<=[\n>\]])|\A)[ \t]*(?:assistant)?(?P<tag>{_OPENINGS})")
CLOSED = re.compile(_CLOSINGS)
TAGS = f"{_OPENINGS}|{_CLOSINGS}"
_END_OF_PROMPT = re.compile(rf"(?:{_OPENINGS})\s*\Z")
_MOST_CHARS = 100  # of the end of a prompt
TAG_TOKENS = 16  # of a tag there, at most
# Tokens that make up tags. Tokenizers that call them special leave them out of a text.
TOKENS = frozenset({*CLOSING, *CLOSING.values(), "<|channel|>", "<|message|>", "<|channel>", "<channel|>"})


def opened_by(prompt: object) -> str:
    """The opening tag with which a prompt ends, and the white space after it; empty for another prompt.

    A prompt is a text, or messages of which the last may begin the answer.
    """
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict) and prompt[-1].get("role") == "assistant":
        prompt = prompt[-1].get("content")
    found = _END_OF_PROMPT.search(prompt[-_MOST_CHARS:]) if isinstance(prompt, str) else None
    return "" if found is None else found.group()


def begun_by(prompt: object, answer: str) -> str:
    """The answer behind the tag that its prompt has opened. A server may have written that tag before the answer."""
    return answer if OPENING.match(answer.lstrip()) else opened_by(prompt) + answer


@dataclass(slots=True)
class UnknownPrompts:
    """How many completions close reasoning that they do not open, and how many have no tag."""

    closing: int = 0
    untagged: int = 0

    def add(self, completion: str) -> None:
        """Count a completion behind what is known of its prompt."""
        opened, closed = OPENING.search(completion), CLOSED.search(completion)
        self.closing += closed is not None and (opened is None or closed.start() < opened.start())
        self.untagged += opened is closed is None

    def warning(self) -> str:
        """What to say when some completions show that the prompts open reasoning; those without a tag may be in it."""
        if not (self.closing and self.untagged):
            return ""
        return (
            f"warning: {self.closing} completions close reasoning that their prompt has opened; {self.untagged} have no"
            " tag, and may have been cut inside it: give --prefill '<think>', or the field prompt with each\n"
        )


def parted(text: str) -> tuple[str, str | None]:
    """The reasoning that a text begins with, and what follows; None: the reasoning is opened and never closed.

    A closing tag alone ends reasoning, because the template of many models ends with the opening one.
    """
    opened, closed = OPENING.search(text), CLOSED.search(text)
    if opened is None or (closed is not None and closed.start() < opened.start()):
        return ("", text) if closed is None else (text[: closed.start()], text[closed.end() :])
    thinking, tag, rest = text[opened.end() :].partition(CLOSING[opened["tag"]])
    return thinking, rest if tag else None


def has_thinking(text: str) -> bool:
    """Whether a thinking part begins the text: it is closed and not empty."""
    thinking, rest = parted(text)
    return rest is not None and bool(thinking.strip())


def without_reasoning(program: str) -> str:
    """A text that is a program as a whole, without the reasoning that it begins with, or its opening tag alone."""
    opened = OPENING.match(program)
    if opened is None:
        return program
    inside, _, behind = program[opened.end() :].partition(CLOSING[opened["tag"]])
    return behind or inside
