"""Prompt and answer of an example are the chat template's own rendering of the finished conversation.

The templates are short and behave as those of published models do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.services.test_end_of_turn import CHATML, Family, InThisProcess, folder_of
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from nouscoder.config.generation import SingleTurnSection
from nouscoder.domain.reasoning import CLOSING
from nouscoder.policy_folder import chat_template
from nouscoder.policy_folder.tokenizer import load_tokenizer
from nouscoder.sft.encoder import Encoder
from nouscoder.sft.records import BadExample, example_of

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
OPENED = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
STRIPPED = OPENED.replace("message['content']", "message['content'].split('</think>')[-1].lstrip('\n')")  # R1, QwQ
# Qwen3-Thinking and Qwen3.5: the last answer has its reasoning, or an empty one.
LAST_THINKS = OPENED.replace(
    "message['content'] +",
    "(('<think>\n' + (message.reasoning_content if message.reasoning_content else message['content'].split('</think>')"
    "[0].split('<think>')[-1].strip('\n') if '</think>' in message['content'] else '') + '\n</think>\n\n')"
    " if message['role'] == 'assistant' and loop.last else '') +"
    " message['content'].split('</think>')[-1].lstrip('\n') +",
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}"
    "{{ '<|im_start|>user' }}{% endif %}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}{% for c in m.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' + c.function.name + c.function.arguments | tojson + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ASKED = {"role": "user", "content": "1+1?"}
TRACE = "<think>\nadd\n</think>\n\n2"


@pytest.fixture(autouse=True)
def _quick_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_Process", InThisProcess)


def texts_of(folder: Path, template: str, record: dict[str, Any]) -> tuple[list[str], Any]:
    """The text of each segment of the example, and transformers' own tokenizer."""
    family = Family(template, MARKS, MARKS[2], MARKS[2:], "<|im_end|>", ())
    tokenizer = load_tokenizer(folder_of(folder, family))
    rollout = Encoder(tokenizer, SingleTurnSection(prompt_as="messages")).encode(example_of(record))
    found, start = [], 0
    for segment in rollout.segments:
        found.append("".join(tokenizer.pieces(rollout.token_ids[start : start + segment.num_tokens].tolist())))
        start += segment.num_tokens
    return found, AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("begin", ["<think>\n", "", "\n<think>\n", "<|im_start|>assistant\n<think>\n"])
@pytest.mark.parametrize("end", ["", "<|im_end|>", "<|im_end|>\n"])
def test_what_the_prompt_has_is_not_in_the_answer(tmp_path: Path, begin: str, end: str) -> None:
    completion = f"{begin}add\n</think>\n\n2{end}"
    for template in (OPENED, STRIPPED, LAST_THINKS):
        (prompt, answer), _ = texts_of(tmp_path, template, {"prompt": "1+1?", "completion": completion})
        assert prompt.endswith("<|im_start|>assistant\n<think>\n")
        assert answer == "add\n</think>\n\n2<|im_end|>"


def test_an_opened_reasoning_is_closed_by_the_template_or_the_answer_is_refused(tmp_path: Path) -> None:
    (_, answer), _ = texts_of(tmp_path, LAST_THINKS, {"prompt": "1+1?", "completion": "2"})
    assert answer == "\n</think>\n\n2<|im_end|>"
    with pytest.raises(BadExample, match="opens <think>, and the answer has no </think>"):
        texts_of(tmp_path, STRIPPED, {"prompt": "1+1?", "completion": "2"})


def test_an_answer_that_ends_inside_its_reasoning_is_refused(tmp_path: Path) -> None:
    for template in (CHATML, OPENED, STRIPPED, LAST_THINKS):
        with pytest.raises(BadExample, match="the answer ends inside its reasoning"):
            texts_of(tmp_path, template, {"prompt": "1+1?", "completion": "<think>\nadd them and"})


def test_an_answer_follows_an_empty_reasoning_that_only_the_prompt_has(tmp_path: Path) -> None:
    closed = OPENED.replace("<think>\n'", "<think>\n\n</think>\n\n'")
    (prompt, answer), _ = texts_of(tmp_path, closed, {"prompt": "1+1?", "completion": "2"})
    assert prompt.endswith("assistant\n<think>\n\n</think>\n\n")
    assert answer == "2<|im_end|>"


def test_reasoning_content_is_written_by_the_template_or_refused(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "2", "reasoning_content": "add"}
    (_, found), _ = texts_of(tmp_path, LAST_THINKS, {"messages": [ASKED, answer]})
    assert found == "add\n</think>\n\n2<|im_end|>"
    with pytest.raises(BadExample, match="does not write reasoning_content"):
        texts_of(tmp_path, CHATML, {"messages": [ASKED, answer]})


def test_a_later_answer_follows_the_history_that_the_template_writes(tmp_path: Path) -> None:
    messages = [ASKED, {"role": "assistant", "content": TRACE}, ASKED, {"role": "assistant", "content": TRACE}]
    found, theirs = texts_of(tmp_path, LAST_THINKS, {"messages": messages})
    assert "".join(found) + "\n" == theirs.apply_chat_template(messages, tokenize=False)
    assert len(found) == 2


def test_the_end_token_as_text_is_in_no_earlier_answer(tmp_path: Path) -> None:
    answers = [{"role": "assistant", "content": f"{said}<|im_end|>\n"} for said in "24"]
    found, _ = texts_of(tmp_path, CHATML, {"messages": [ASKED, answers[0], ASKED, answers[1]]})
    assert found[1::2] == ["2<|im_end|>", "4<|im_end|>"]
    assert "".join(found).count("<|im_end|>") == 4


@pytest.mark.parametrize("template", [CHATML, OPENED])
@pytest.mark.parametrize("begin", [one for one in CLOSING if not one.startswith("<|channel|>")])
def test_the_tags_of_reasoning_of_a_policy_are_its_tokens(tmp_path: Path, begin: str, template: str) -> None:
    end, template = CLOSING[begin], template.replace("<think>", begin)
    family = Family(template, (*MARKS, begin, end, "<|channel>"), MARKS[2], MARKS[2:], "<|im_end|>", ())
    tokenizer = load_tokenizer(folder_of(tmp_path, family))
    record = {"messages": [ASKED, {"role": "assistant", "content": f"{begin}add{end}2"}]}
    ids = Encoder(tokenizer, SingleTurnSection()).encode(example_of(record)).token_ids.tolist()
    assert [ids.count(tokenizer.vocabulary()[tag]) for tag in (begin, end)] == [1, 1]


@pytest.mark.parametrize("kind", ["first", "always", "never", "legacy"])
@pytest.mark.parametrize("said", ["```2", "2", " 2", "(2)"])
def test_an_answer_has_no_space_of_its_own_where_a_token_would_reach_into_the_prompt(
    tmp_path: Path, kind: str, said: str
) -> None:
    """SentencePiece's kinds put a space before each text, or before what follows a special token."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if kind == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    words = [f"ASSISTANT:{said} USER:1+1? 2```(2) 4;"] * 9
    names = ["<unk>", *(f"<0x{number:02X}>" for number in range(256))]
    tokenizer.train_from_iterator(words, trainers.BpeTrainer(special_tokens=names, show_progress=False))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in MARKS])
    folder_of(tmp_path, Family("", MARKS, MARKS[2], MARKS[2:], "<|im_end|>", ()))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    for begin in ("<|im_start|>ASSISTANT:", "1+1? ASSISTANT"):
        first, ids = ours.encode_text(begin), ours.encode_after(begin, said)
        assert ours.decode([*first, *ids]).strip() == ours.decode(first).strip() + said, (begin, ours.pieces(ids))


def call(arguments: Any) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "add", "arguments": arguments}}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
def test_roles_calls_and_tools_are_the_template_s(tmp_path: Path, arguments: Any) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    results = [{"role": "tool", "content": "2", "name": "add"}, {"role": "tool", "content": "3"}]
    end = [{"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "5"}]
    messages = [ASKED, call(arguments), *results, *end]
    found, theirs = texts_of(tmp_path, TOOLS, {"messages": messages, "tools": tools})
    read = [ASKED, call({"a": 1}), *results, *end]
    assert "".join(found) + "\n" == theirs.apply_chat_template(read, tools=tools, tokenize=False)
    assert found[1::2] == ['\n<tool_call>\nadd{"a": 1}\n</tool_call><|im_end|>', "5<|im_end|>"]


@pytest.mark.parametrize(
    ("messages", "tools", "what"),
    [
        ([ASKED, call({}), {"role": "tool", "content": "2"}, {"role": "assistant", "content": "2"}], [], "tool_calls"),
        ([ASKED, {"role": "assistant", "content": "2"}], [{"function": {"name": "add"}}], "a tool of tools"),
        ([{**ASKED, "name": "Ann"}, {"role": "assistant", "content": "2"}], [], "the name in a message of user"),
    ],
)
def test_what_the_template_leaves_out_is_refused_by_name(
    tmp_path: Path, messages: list[dict[str, Any]], tools: list[Any], what: str
) -> None:
    template = CHATML.replace("message['content']", "(message['content'] or '')")
    with pytest.raises(BadExample, match=f"the chat template does not write .*{what}"):
        texts_of(tmp_path, template, {"messages": messages, "tools": tools})


def test_an_answer_may_be_left_out_of_the_loss_and_a_rendered_prompt_is_refused(tmp_path: Path) -> None:
    answers = [{"role": "assistant", "content": "2", "weight": 0}, {"role": "assistant", "content": "4"}]
    found, _ = texts_of(tmp_path, CHATML, {"messages": [ASKED, answers[0], ASKED, answers[1]]})
    assert found[1::2] == ["4<|im_end|>"]
    rendered = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    for record in ({"prompt": rendered}, {"messages": [{"role": "user", "content": rendered}]}):
        with pytest.raises(BadExample, match=r"in a chat template already \(it begins with <\|im_start\|>\)"):
            texts_of(tmp_path, CHATML, {**record, "completion": "2"})


def test_a_prompt_as_text_does_not_end_with_the_end_token_that_a_tokenizer_appends(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, Family("", MARKS, MARKS[2], MARKS[2:], "<|im_end|>", ()))
    saved = json.loads((folder / "tokenizer.json").read_text())
    begin, end = ({"SpecialToken": {"id": mark, "type_id": 0}} for mark in (MARKS[1], MARKS[2]))
    saved["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}, end],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {mark: {"id": mark, "ids": [256 + n], "tokens": [mark]} for n, mark in enumerate(MARKS)},
    }
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    tokenizer = load_tokenizer(folder)
    assert "".join(tokenizer.pieces(tokenizer.encode("1+1?"))) == "<|im_start|>1+1?"
    assert tokenizer.count(["1+1?"]) == [5]
    rollout = Encoder(tokenizer, SingleTurnSection(prompt_as="text")).encode(
        example_of({"prompt": "1+1?", "completion": "2<|im_end|>"})
    )
    assert "".join(tokenizer.pieces(rollout.token_ids.tolist())) == "<|im_start|>1+1?2<|im_end|>"
