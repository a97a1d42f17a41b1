"""The end of a turn is what the chat template writes after an answer, in examples and in sampling alike.

The tokenizers are small. They have the special tokens of known models and the words of their templates.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.utils.chat_template_utils import render_jinja_template

from nouscoder.config.generation import SingleTurnSection
from nouscoder.domain.tokens import FinishReason
from nouscoder.generation.environments.prompts import Prompts
from nouscoder.policy_folder import chat_template
from nouscoder.policy_folder.tokenizer import PolicyTokenizer, load_tokenizer
from nouscoder.reward_model.model import end_token_of
from nouscoder.sft.encoder import Encoder
from nouscoder.sft.records import example_of
from nouscoder.sft.rollouts import written

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else 'user' %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + ' ' + eos_token }}"
    "{% else %}{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
PHI_3 = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
GLM_4 = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
QWEN_3 = CHATML.replace(
    "message['content']",
    "('<think>\n\n</think>\n\n' if message['role'] == 'assistant' and loop.last else '') + message['content']",
)
COHERE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|START_OF_TURN_TOKEN|><|START_RESPONSE|>' }}{% endif %}"
    "{{ message['content'] }}{% if message['role'] == 'assistant' %}{{ '<|END_RESPONSE|>' }}{% endif %}"
    "{{ '<|END_OF_TURN_TOKEN|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|>' }}{% endif %}"
)
ONLY_USERS = "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}{{ messages[0]['content'] }}"


@dataclass(frozen=True)
class Family:
    """A tokenizer, with the tokens that its configuration names, and what must end an answer and a completion."""

    template: str
    special: tuple[str, ...]
    eos: str
    configured: tuple[str, ...]
    end: str
    stops: tuple[str, ...]


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
)
_LLAMA_STOPS = ("<|end_of_text|>", "<|eot_id|>", "<|eom_id|>")
_GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_LLAMA_2, _PHI = ("<s>", "</s>"), ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>")
_COHERE = ("<|START_OF_TURN_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>")
FAMILIES = {
    "Qwen2.5-Coder base": Family(CHATML, _CHATML, _CHATML[0], _CHATML[:1], "<|im_end|>", (_CHATML[0], _CHATML[2])),
    "Qwen2.5 instruct": Family(CHATML, _CHATML, _CHATML[2], _CHATML[::2], "<|im_end|>", (_CHATML[0], _CHATML[2])),
    "Qwen3": Family(QWEN_3, (*_CHATML, "<think>"), _CHATML[2], _CHATML[::2], "<|im_end|>", _CHATML[::2]),
    "Llama 3": Family(LLAMA_3, _LLAMA, _LLAMA[1], _LLAMA[1:2], "<|eot_id|>", (_LLAMA[1], _LLAMA[4])),
    "Llama 3 instruct": Family(LLAMA_3, _LLAMA, _LLAMA[4], _LLAMA_STOPS, "<|eot_id|>", _LLAMA_STOPS),
    "Gemma": Family(GEMMA, _GEMMA, "<eos>", ("<eos>",), "<end_of_turn>", ("<eos>", "<end_of_turn>")),
    "Llama 2": Family(LLAMA_2, _LLAMA_2, "</s>", ("</s>",), " </s>", ("</s>",)),
    "Phi 3": Family(PHI_3, _PHI, "<|endoftext|>", ("<|endoftext|>",), "<|end|>", ("<|endoftext|>", "<|end|>")),
    "Cohere 2": Family(COHERE, _COHERE, _COHERE[3], _COHERE[3:], "".join(_COHERE[2:]), _COHERE[3:]),
    "no end in the template": Family(GLM_4, _PHI, _PHI[0], _PHI[:2], _PHI[0], _PHI[:2]),
    "a template that takes no answer": Family(ONLY_USERS, _CHATML, _CHATML[0], _CHATML[:1], _CHATML[0], _CHATML[:1]),
    "no template": Family("", _CHATML, _CHATML[0], _CHATML[:1], _CHATML[0], _CHATML[:1]),
}


class InThisProcess:
    """Renders like the process of a template, which takes a second to begin."""

    def ask(self, request: bytes) -> dict[str, Any]:
        return chat_template._answer(json.loads(request), render_jinja_template)


@pytest.fixture(autouse=True)
def _quick_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_Process", InThisProcess)


def folder_of(folder: Path, family: Family) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in family.special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": family.special[0],
        "eos_token": family.eos,
        "pad_token": family.special[0],
        **({"chat_template": family.template} if family.template else {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ids = [tokenizer.token_to_id(name) for name in family.configured]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder


@pytest.fixture(params=FAMILIES)
def known(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Family, PolicyTokenizer]:
    family = FAMILIES[request.param]
    return family, load_tokenizer(folder_of(tmp_path, family))


def text_of(tokenizer: PolicyTokenizer, ids: Any) -> str:
    return "".join(tokenizer.pieces([int(one) for one in ids]))


def example(*answers: str, prompt: str = "1+1?") -> Any:
    messages = [{"role": "user", "content": prompt}]
    for answer in answers:
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And 2+2?"}]
    return example_of({"messages": messages[:-1]})


def test_an_example_ends_as_the_template_ends_a_turn_and_sampling_stops_there(
    known: tuple[Family, PolicyTokenizer],
) -> None:
    family, tokenizer = known
    assert {*tokenizer.pieces(sorted(tokenizer.stop_ids))} == {*family.stops}
    end = tokenizer.turn_end or (tokenizer.eos_id,)
    assert text_of(tokenizer, end) == family.end
    assert end[-1] in tokenizer.stop_ids
    assert tokenizer.pieces([tokenizer.eos_id]) == [family.eos]
    if family.template:
        rollout = Encoder(tokenizer, SingleTurnSection(prompt_as="messages")).encode(example("2"))
        assert text_of(tokenizer, np.frombuffer(rollout.token_ids, np.int32)).endswith(f"2{family.end}")
    as_text = Encoder(tokenizer, SingleTurnSection(prompt_as="text", prompt_template="{prompt}"))
    rollout = as_text.encode(example_of({"prompt": "1", "completion": "2"}))
    assert text_of(tokenizer, rollout.token_ids).endswith(f"12{family.eos}")


# Of Llama 2 the template writes a space before an answer, which is a part of no prompt.
CONVERSATIONS = [name for name, family in FAMILIES.items() if family.template in (CHATML, LLAMA_3, GEMMA, PHI_3)]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_of_several_answers_is_the_template_s_own_text(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    tokenizer = load_tokenizer(folder_of(tmp_path, family))
    rollout = Encoder(tokenizer, SingleTurnSection(prompt_as="messages")).encode(example("2", "4"))
    roles = ("user", "assistant", "user", "assistant")
    conversation = [
        {"role": role, "content": content} for role, content in zip(roles, ("1+1?", "2", "And 2+2?", "4"), strict=True)
    ]
    special: dict[str, Any] = {"bos_token": family.special[0], "eos_token": family.eos}
    whole: str = render_jinja_template([conversation], chat_template=family.template, **special)[0][0]
    before, _, after = whole.rpartition("4")
    assert text_of(tokenizer, rollout.token_ids) == f"{before}4{family.end}"
    assert after.startswith(family.end)


def test_a_reply_follows_an_answer_that_ended_with_another_stop_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_of(tmp_path, FAMILIES["Llama 2"]))
    prompts = Prompts(tokenizer, SingleTurnSection(prompt_as="messages"))
    answer = [*tokenizer.encode_inside("2"), tokenizer.eos_id]
    assert text_of(tokenizer, prompts.reply_to(written(answer), "more")) == "<s>[INST] more [/INST]"
    cut = replace(written(answer[:-1]), finish_reason=FinishReason.LENGTH)
    assert text_of(tokenizer, prompts.reply_to(cut, "more")) == " </s><s>[INST] more [/INST]"


def test_a_reward_model_scores_at_the_end_of_a_turn(known: tuple[Family, PolicyTokenizer]) -> None:
    family, tokenizer = known
    ends = tokenizer.pieces([end_token_of(tokenizer)])
    assert family.end.strip().endswith(ends[0]) if tokenizer.turn_end else ends[0] in family.stops
