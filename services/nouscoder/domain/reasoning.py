"""The tags between which models write their reasoning. Pure.

`<think>` of DeepSeek-R1, Qwen, GLM, Nemotron and others; the others are those that vLLM's reasoning parsers know:
Magistral, Cohere, Seed-OSS, Apertus, Kimi, EXAONE Deep, LongCat, gpt-oss (harmony) and Gemma 4.

An opening tag counts at the begin of a line or behind another tag. The end of a prompt may have opened the reasoning:
then the tag belongs to the answer, which is read as if the policy had written it.
"""

from __future__ import annotations

import re

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
# Tokens that make up tags. Tokenizers that call them special leave them out of a text.
TOKENS = frozenset({*CLOSING, *CLOSING.values(), "<|channel|>", "<|message|>", "<|channel>", "<channel|>"})


def opened_by(prompt: str) -> str:
    """The opening tag with which a prompt ends, and the white space after it; empty for another prompt."""
    found = _END_OF_PROMPT.search(prompt[-_MOST_CHARS:])
    return "" if found is None else found.group()


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
