"""Which model types the learner trains, as docs/models.md says, and that it computes them as transformers does.

Each type is a small random model. What the learner's own measurement finds is compared with the document, and its
log-probabilities and gradients with eager attention of transformers, one sequence at a time.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tests.services.model_types import TYPES, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from nouscoder.config import Config, PolicySection, RunSection
from nouscoder.demo.policy import CharTokenizer
from nouscoder.domain.rollout import Rollout
from nouscoder.errors import Unusable
from nouscoder.generation.engines.architecture import Architecture
from nouscoder.learner.model.admission import admit
from nouscoder.learner.model.logprobs import Head, Scorer, score_tokens
from nouscoder.learner.model.packed_attention import attend_packed, packs, row_budget
from nouscoder.learner.model.packing import pack
from nouscoder.learner.model.synthetic import write_policy_folder
from nouscoder.learner.model.weights import stored_dtypes
from nouscoder.policy_folder.weights_files import weights_files
from nouscoder.sft.rollouts import rollout_of
from nouscoder.sft.training import SupervisedTraining, training_config

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
PACKED, ALONE, REFUSED = "packed", "one sequence", "refused"
# In the default tests: each way in which a model may be computed wrong, and the families that people train most.
COMMON = {
    *("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "gemma3_text", "deepseek_v3"),
    *("gemma2", "cohere", "granite", "gpt_oss", "falcon_h1", "qwen3_5_text", "qwen3_next", "llama4_text"),
    *("stablelm", "lfm2", "phimoe", "mamba2", "gptj", "bert", "doge"),
}
# Types whose folders have other names than their models, and one whose experts are stored together.
WRITTEN = {"mixtral", "gpt_oss", "gpt_neox"}
_REFUSED = {"bert", "big_bird", "doge", "modernbert-decoder", "roberta"}


def _mark(kind: str, default: set[str]) -> Any:
    return () if kind in default else pytest.mark.heavy


EVERY_TYPE = [pytest.param(kind, marks=_mark(kind, COMMON)) for kind in TYPES]
TRAINED = [pytest.param(kind, marks=_mark(kind, WRITTEN)) for kind in TYPES if kind not in _REFUSED]
CPU = torch.device("cpu")
SENTENCE = re.compile(
    r"a model of type [\w-]+ cannot be trained: what the learner computes differs from the model's own numbers by"
    r" [\d.]+, and [\d.e-]+ is the most: choose a model of another type \(docs/models.md\)"
)


pytestmark = pytest.mark.usefixtures("one_thread")


def documented() -> dict[str, tuple[str, str]]:
    """What the document says of each type: how its rows are, and what else its logits and its attention need."""
    rows = re.findall(r"^\| `([\w-]+)` \|[^|]*\|([^|]*)\|([^|]*)\|$", DOCUMENT.read_text(), re.MULTILINE)
    assert len(rows) == len({kind for kind, _, _ in rows}), "each type once"
    return {kind: (form.strip(), more.strip()) for kind, form, more in rows}


def examples(seed: int) -> list[Rollout]:
    """Sequences of other lengths and tokens than those of the learner's measurement, some longer than windows."""
    random = Random(seed)
    ids = range(3, CharTokenizer().vocab_size)
    sizes = ((2, 4), (3, 17), (1, 5), (4, 8))
    return [rollout_of([(random.choices(ids, k=n), False), (random.choices(ids, k=k), True)]) for n, k in sizes]


def own_scores(model: PreTrainedModel, rollouts: list[Rollout]) -> list[Tensor]:
    """Log-probabilities of the sampled tokens of each rollout alone, by the forward pass of transformers."""
    scores = []
    for rollout in rollouts:
        ids = torch.tensor([*rollout.token_ids])
        logprobs = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        ((start, end),) = rollout.sampled_ranges()
        scores.append(logprobs[torch.arange(start - 1, end - 1), ids[start:end]])
    return scores


def gradient(model: PreTrainedModel, scores: Tensor) -> dict[str, Tensor]:
    """That of the sum of the scores, by weight."""
    model.zero_grad()
    torch.autograd.backward(scores.sum())
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def admitted(model: PreTrainedModel) -> str:
    """What the learner finds about the model."""
    attend_packed(model)
    try:
        admit(Scorer(model), torch.float32)
    except Unusable as error:
        return REFUSED if SENTENCE.fullmatch(str(error)) else str(error)
    return PACKED if packs(model) else ALONE


def needs(model: PreTrainedModel) -> str:
    """What the model's logits and its attention need beside a linear head and a softmax."""
    head, config = Head.of(model), model.config.get_text_config()
    found = {
        "scaled logits": head.scale != 1,
        "capped logits": head.cap != 0,
        "capped attention": getattr(config, "attn_logit_softcapping", None) is not None,
        "attention sinks": any(name.endswith(".sinks") for name, _ in model.named_parameters()),
    }
    return ", ".join(name for name, is_so in found.items() if is_so)


@pytest.mark.parametrize("kind", EVERY_TYPE)
def test_a_type_is_computed_as_transformers_does_or_refused(kind: str) -> None:
    model = tiny_model(kind)
    form = admitted(model)
    form_there, needs_there = documented()[kind]
    assert form == form_there
    if form == REFUSED:
        return
    assert needs(model) == needs_there
    rollouts = examples(1)
    parts = pack(rollouts, row_budget(model, 1000), CPU)
    assert len(parts) == (1 if form == PACKED else len(rollouts))
    scores = torch.cat([score_tokens(model, part).logprobs for part in parts])
    found = gradient(model, scores)
    owners = [part.rollout_indices[row] for part in parts for row in part.rollout_of_token.tolist()]
    if model._can_set_attn_implementation():
        model.set_attn_implementation("eager")
    own = own_scores(model, rollouts)
    for number, expected in enumerate(own):
        mine = scores[[place for place, owner in enumerate(owners) if owner == number]]
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)
    for name, expected in gradient(model, torch.cat(own)).items():
        assert float((found[name] - expected).norm()) <= 1e-3 * float(expected.norm()) + 1e-4, name


@pytest.mark.parametrize("kind", TRAINED)
def test_a_fine_tuned_type_is_written_as_transformers_reads_it(kind: str, tmp_path: Path) -> None:
    """One step of fine-tuning: its loss, and that of the written folder, are those of transformers."""
    first = tmp_path / "first"
    write_policy_folder(first, tiny_model(kind))
    config = training_config(Config(run=RunSection(root=tmp_path), policy=PolicySection(path=first)), 1)
    training = SupervisedTraining(config, [examples(1)])
    training.run()
    (line,) = map(json.loads, (config.run.folder / "metrics.jsonl").read_text().splitlines())
    assert line["loss"] == pytest.approx(mean_loss(first), abs=1e-4)
    training.write_policy(tmp_path / "written", "")
    assert stored_dtypes(tmp_path / "written") == stored_dtypes(first)
    for folder in (first, tmp_path / "written"):  # as every engine does before it reads a policy
        Architecture(first).check(weights_files(folder), "the policy")
    after = training.trainer.mean_loss(examples(1))
    assert after == pytest.approx(mean_loss(tmp_path / "written"), abs=1e-4)
    assert after != pytest.approx(line["loss"], abs=1e-5)


def mean_loss(folder: Path) -> float:
    """That of the examples under the model in the folder, by transformers alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return -float(torch.cat(own_scores(model.eval(), examples(1))).double().mean())


def test_the_document_lists_exactly_these_types() -> None:
    assert documented().keys() == TYPES.keys()
    assert len(TYPES) >= 45
