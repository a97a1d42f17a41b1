"""Prompt and answer of an example beside transformers' own rendering, for the chat templates that trl publishes.

NOUSCODER_TEMPLATES names another folder of *.jinja. `make test-trainers` runs it and prints a line for each template.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests.services.test_end_of_turn import Family, InThisProcess, folder_of
from transformers import AutoTokenizer

from nouscoder.config.generation import SingleTurnSection
from nouscoder.domain.reasoning import parted
from nouscoder.policy_folder import chat_template
from nouscoder.policy_folder.tokenizer import load_tokenizer
from nouscoder.sft.encoder import Encoder
from nouscoder.sft.records import BadExample, example_of

pytestmark = pytest.mark.trainers
ROOT = Path(__file__).parents[2]
TOKENS = re.compile(
    r"<[|\uff5c][^<>'\s{}]{1,40}[|\uff5c]>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>|<SPECIAL_\d+>|\[/?[A-Z_]{3,}\]|</?s>"
    r"|\]~!?b\[?|\[e~\[|\[\|\w+\|\]|<seed:\w+>"
)
BEGIN, END = (f"<\uff5c{side}\u2581of\u2581sentence\uff5c>" for side in ("begin", "end"))
ENDS: tuple[str, ...] = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", END, "<|return|>", "<|end|>")
ENDS += ("<|end_of_text|>", "[e~[", "</s>", "<SPECIAL_12>", "[|endofturn|]", "<|END_OF_TURN_TOKEN|>", "<|endoftext|>")

ASKED = {"role": "user", "content": "1+1?"}
SYSTEM = {"role": "system", "content": "Be brief."}
TWO = {"role": "assistant", "content": "It is 2."}
TRACE = {"role": "assistant", "content": "<think>\nadd them\n</think>\n\nIt is 2."}
FIELD = {**TWO, "reasoning_content": "add them"}
CUT = {"role": "assistant", "content": "<think>\nadd them and then"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "A number."}}},
        },
    }
]


def call(number: int) -> dict[str, Any]:
    return {"id": f"call0000{number}", "type": "function", "function": {"name": "add", "arguments": {"a": number}}}


def result(number: int) -> dict[str, Any]:
    return {"role": "tool", "content": f"result {number}", "name": "add", "tool_call_id": f"call0000{number}"}


def calls(*numbers: int, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call(one) for one in numbers], **more}


CASES: dict[str, tuple[list[dict[str, Any]], list[Any]]] = {
    "single": ([ASKED, TWO], []),
    "system": ([SYSTEM, ASKED, TWO], []),
    "reasoning": ([ASKED, FIELD], []),
    "trace": ([ASKED, TRACE], []),
    "cut": ([ASKED, CUT], []),
    "space": ([ASKED, {"role": "assistant", "content": " It is 2."}], []),
    "indent": ([ASKED, {"role": "assistant", "content": "    return 2\n"}], []),
    "turns": ([ASKED, TWO, {**ASKED, "content": "2+2?"}, {**TWO, "content": "It is 4."}], []),
    "traces": ([ASKED, TRACE, {**ASKED, "content": "2+2?"}, TRACE], []),
    "late": ([ASKED, TWO, {**SYSTEM, "content": "Be long."}, {**ASKED, "content": "2+2?"}, TWO], []),
    "tools": ([ASKED, TWO], TOOLS),
    "call": ([ASKED, calls(1)], TOOLS),
    "thought": ([ASKED, calls(1, reasoning_content="must add")], TOOLS),
    "result": ([ASKED, calls(1), result(1), TWO], TOOLS),
    "results": ([ASKED, calls(1, 2), result(1), result(2), TWO], TOOLS),
}


def folders() -> list[Path]:
    if given := os.environ.get("NOUSCODER_TEMPLATES"):
        return sorted(Path(given).glob("*.jinja"))
    found = sorted(ROOT.glob(".venv-trainers/lib/python*/site-packages/trl/chat_templates/*.jinja"))
    return [path for path in found if "_training" not in path.stem]


def family_of(template: str) -> Family:
    end = next(name for name in ENDS if name in template or name == ENDS[-1])
    begin = next((name for name in ("<|begin_of_text|>", "<bos>", BEGIN) if name in template), "<s>")
    tokens = dict.fromkeys((begin, end, *TOKENS.findall(template)))
    return Family(template, tuple(tokens), end, (end,), end, (end,))


def apart(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose trace is in reasoning_content."""
    thought, close, said = (message.get("content") or "").partition("</think>")
    if message["role"] != "assistant" or not close:
        return message
    return {**message, "content": said.strip(), "reasoning_content": thought.removeprefix("<think>").strip()}


def as_json(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as JSON."""
    if "tool_calls" not in message:
        return message
    functions = [(one, one["function"]) for one in message["tool_calls"]]
    calls = [{**one, "function": {**f, "arguments": json.dumps(f["arguments"])}} for one, f in functions]
    return {**message, "tool_calls": calls}


def empty(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": message["content"] or ""}


def texts_of(theirs: Any, messages: list[dict[str, Any]], tools: list[Any]) -> list[tuple[str, str]]:
    """transformers' own prompt and conversation, in each form of the messages that the template takes."""
    found = []
    for form in (
        lambda one: one,
        empty,
        apart,
        lambda one: empty(apart(one)),
        as_json,
        lambda one: empty(as_json(one)),
    ):
        how: dict[str, Any] = {"tools": tools or None, "tokenize": False}
        given = [form(one) for one in messages]
        with contextlib.suppress(Exception):
            asked = theirs.apply_chat_template(given[:-1], add_generation_prompt=True, **how)
            whole = ""
            with contextlib.suppress(Exception):
                whole = theirs.apply_chat_template(given, **how)
            found.append((asked, whole))
    return found


def compared(folder: Path, name: str) -> str:
    """`equal`, `as written`, a refusal, or how the text differs from the template's own."""
    messages, tools = CASES[name]
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    encoder = Encoder(tokenizer, SingleTurnSection(prompt_as="messages"))
    try:
        example = encoder.encode(example_of({"messages": messages, **({"tools": tools} if tools else {})}))
    except BadExample as error:
        return f"refused: {error}"
    ours = example.token_ids.tolist()
    text = str(theirs.decode(ours))
    lost = [one for part in (messages[-1].get("content"), messages[-1].get("reasoning_content"))
            for one in re.split("</?think>", part or "") if one.strip() not in text]  # fmt: skip
    if lost or name == "cut":
        return f"DIFFERS it has not {lost}: {text!r}"
    known = texts_of(theirs, messages, tools)
    for _, whole in known:
        ids = theirs.encode(whole, add_special_tokens=False)
        is_prefix = ids[: len(ours)] == ours and not theirs.decode(ids[len(ours) :]).strip()
        if whole and (
            is_prefix or (ids[: len(ours) - 1] == ours[:-1] and not theirs.decode(ids[len(ours) - 1 :]).strip())
        ):
            return "equal"
    # Otherwise what the policy writes follows the prompt, and nothing follows it but the end of the turn.
    said = (messages[-1].get("content") or "").rpartition("</think>")[2].strip()
    for asked, _ in known:
        written = text[len(asked) :]
        if (
            text.startswith(asked)
            and (not said or written.count(said) == 1)
            and parted(asked[-40:] + written)[1] is not None
        ):
            return "as written"
    return f"DIFFERS {text!r} {known!r}"


@pytest.fixture(autouse=True)
def _quick_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_Process", InThisProcess)


@pytest.mark.parametrize("path", folders(), ids=lambda path: path.stem)
def test_examples_are_the_template_s_own_text(path: Path, tmp_path: Path) -> None:
    folder_of(tmp_path, family_of(path.read_text()))
    found = {name: compared(tmp_path, name) for name in CASES}
    print("\n" + json.dumps({"template": path.stem, **found}, ensure_ascii=False))
    assert not [one for one in found.values() if one.startswith("DIFFERS")]
