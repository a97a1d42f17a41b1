"""A reward model: the decoder of a causal language model, and a linear head that scores an answer at its last token.

It is a ...ForSequenceClassification model of transformers with one label, in a Hugging Face folder with its tokenizer,
so other programs can use it. Answers are packed in rows without padding, as the learner packs rollouts, where that
gives the model's own scores (learner/model/admission.py). Else each answer has a row of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils import logging as transformers_logging

from nouscoder.domain.conversation import Message, Role
from nouscoder.errors import Unusable
from nouscoder.learner.model.admission import choose_rows, probes, short_spans
from nouscoder.learner.model.logprobs import attending_alone
from nouscoder.learner.model.packed_attention import RowLayout, attend_packed, last_states, packs
from nouscoder.learner.model.packing import plan
from nouscoder.policy_folder.finished_chat import unmarked
from nouscoder.policy_folder.pretrained import load_pretrained, load_whole
from nouscoder.policy_folder.prompt_file import recorded_prompt
from nouscoder.policy_folder.tokenizer import PolicyTokenizer, TokenizerError, load_tokenizer
from nouscoder.policy_folder.weights_files import WeightsMissing, WeightsUnusable

_DAY = "2024-07-26"  # for templates that write one: Llama's without a clock


class AnswerEncoder:
    """Turns a prompt and an answer into token ids, at most `max_tokens`: what is beyond is cut from the answer's end.

    The prompt is a user's message in the chat template of the folder, or text if it has none. A template writes the day
    that the folder records, or a fixed one. An end token follows the answer.
    """

    def __init__(self, folder: Path, max_tokens: int) -> None:
        """Raises Unusable."""
        try:
            recorded = recorded_prompt(folder)
            self.tokenizer: PolicyTokenizer = load_tokenizer(folder, (recorded and recorded.date) or _DAY)
        except TokenizerError as error:
            raise Unusable(str(error)) from error
        self._max_tokens = max_tokens
        self._end_id = end_token_of(self.tokenizer)

    def __call__(self, prompt: str, answer: str) -> list[int]:
        """Token ids [tokens]. Raises Unusable."""
        try:
            in_chat = self.tokenizer.has_chat_template
            text = self.tokenizer.render([Message(Role.USER, prompt)]) if in_chat else prompt
            ids = self.tokenizer.encode_text(text) if in_chat else self.tokenizer.encode(text)
            answer = unmarked(self.tokenizer, text, answer)
            answer = self.tokenizer.spelled(answer) if in_chat else answer
            ids += self.tokenizer.encode_after(text, answer, in_chat=in_chat)
        except TokenizerError as error:
            raise Unusable(str(error)) from error
        return [*ids[: self._max_tokens - 1], self._end_id]


def end_token_of(tokenizer: PolicyTokenizer) -> int:
    """The token at which an answer is scored: the end of a turn in the chat template, or another stop token.

    transformers scores the last token before padding, so it is not padding if there is another one.
    """
    if tokenizer.turn_end and tokenizer.turn_end[-1] != tokenizer.pad_id:
        return tokenizer.turn_end[-1]
    return min(tokenizer.stop_ids - {tokenizer.pad_id} or tokenizer.stop_ids)


def new_reward_model(policy: Path) -> PreTrainedModel:
    """The decoder of the policy folder with a head of zeros, in float32. Raises Unusable."""
    with torch.random.fork_rng(devices=[]):  # transformers draws a head, which is replaced
        model = _loaded(policy, without="lm_head.", new=("score.weight",))
    nn.init.zeros_(head_of(model).weight)
    return model


def load_reward_model(folder: Path) -> PreTrainedModel:
    """The reward model of a folder, in float32. Raises Unusable."""
    try:
        names = load_pretrained(AutoConfig, folder).architectures or []
    except (OSError, ValueError, KeyError) as error:
        raise Unusable(f"{folder} does not hold a usable model: {error}") from error
    if not any(name.endswith("ForSequenceClassification") for name in names):
        raise Unusable(f"{folder} is no reward model but {', '.join(names)}")
    return _loaded(folder)


def _loaded(folder: Path, **head: Any) -> PreTrainedModel:
    """`head`: see `load_whole`, for a policy, which has another head."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model: PreTrainedModel = load_whole(
            AutoModelForSequenceClassification,
            folder,
            **head,
            num_labels=1,
            dtype=torch.float32,
        )
    except (WeightsMissing, WeightsUnusable) as error:
        raise Unusable(str(error)) from error
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise Unusable(f"{folder} does not hold a usable model: {error}") from error
    head_of(model)
    attend_packed(model)
    _admit(model.eval())  # type: ignore[no-untyped-call]
    return model


_LENGTHS = (6, 10, 7, 4, 12, 5)


@torch.no_grad()
def _admit(model: PreTrainedModel) -> None:
    """Choose packed rows for the model, or rows of one answer. Raises Unusable if neither gives its own scores.

    The head that transformers draws for a new model is still there.
    """
    # transformers scores the last token that is no padding.
    answers = [ids for ids in probes(model, _LENGTHS) if int(ids[-1]) != model.config.pad_token_id]
    rows = [ids.tolist() for ids in answers]
    with short_spans(model):
        with attending_alone(model):
            own = torch.cat([model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0] for ids in answers])
        choose_rows(model, own, lambda: _one_row(model, rows), lambda: _rows_of_one(model, rows), torch.float32)


def head_of(model: PreTrainedModel) -> nn.Linear:
    """The linear head with one output. Raises Unusable when the model has another one."""
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise Unusable(f"a {type(model).__name__} has no linear head `score` with one output")
    return head


def row_scores(model: PreTrainedModel, answers: Sequence[Sequence[int]]) -> Tensor:
    """The score of each of some encoded answers [answers]: in one row, if the model's answers can be packed."""
    if packs(model):
        return _one_row(model, answers)
    return _rows_of_one(model, answers)


def _rows_of_one(model: PreTrainedModel, answers: Sequence[Sequence[int]]) -> Tensor:
    return torch.cat([_one_row(model, [ids]) for ids in answers])


def _one_row(model: PreTrainedModel, answers: Sequence[Sequence[int]]) -> Tensor:
    lengths = [len(ids) for ids in answers]
    device = head_of(model).weight.device
    tokens = torch.tensor([token for ids in answers for token in ids], device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    hidden = last_states(model, tokens.unsqueeze(0), positions.unsqueeze(0), RowLayout.of(lengths, device))
    last = torch.tensor([end - 1 for end in accumulate(lengths)], device=device)
    scores: Tensor = head_of(model)(hidden.index_select(0, last))[:, 0]
    return scores


@torch.no_grad()
def scores_of(model: PreTrainedModel, answers: Sequence[Sequence[int]], row_tokens: int) -> list[float]:
    """The score of each encoded answer, in rows of at most `row_tokens` tokens; a longer answer has its own row."""
    found = [0.0] * len(answers)
    for row in plan([len(ids) for ids in answers], row_tokens):
        for place, score in zip(row, row_scores(model, [answers[place] for place in row]).tolist(), strict=True):
            found[place] = score
    return found
