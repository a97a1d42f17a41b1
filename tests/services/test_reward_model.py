"""Reward models: the score of an answer, training on pairs, resuming, and what a model is worth."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification
from typer.testing import CliRunner

from nouscoder.cli.app import app
from nouscoder.errors import Unusable
from nouscoder.evaluation.scored_samples import ScoredProblem, ScoredSample
from nouscoder.learner.model.synthetic import random_policy, write_policy_folder
from nouscoder.reward_model import train
from nouscoder.reward_model.evaluate import Mean, evaluate_best_of_n, pair_accuracy, rm_bench
from nouscoder.reward_model.model import (
    AnswerEncoder,
    head_of,
    load_reward_model,
    new_reward_model,
    row_scores,
    scores_of,
)
from nouscoder.reward_model.pairs import PairBody, PairRule, read_pairs, write_pairs
from nouscoder.reward_model.train import TrainingSettings, train_reward_model


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    write_policy_folder(folder, random_policy(0))
    return folder


def pairs_of(count: int, seed: int) -> list[PairBody]:
    """Answers with a plus are better than answers with a minus, whatever is around it."""
    draw = Random(seed)
    found = []
    for _ in range(count):
        text = "".join(draw.choices("abcdefgh", k=draw.randint(3, 9)))
        answers = [f"{text[:2]}{sign}{text[2:]}" for sign in "+-"]
        found.append(PairBody(prompt=f"{text[::-1]}?", chosen=answers[0], rejected=answers[1]))
    return found


SETTINGS = TrainingSettings(epochs=2, pairs_per_step=16, learning_rate=3e-3, save_every_steps=3, row_tokens=256)


@pytest.fixture(scope="module")
def trained(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was trained without an interruption."""
    out = tmp_path_factory.mktemp("trained") / "model"
    train_reward_model(policy, pairs_of(96, 1), out, SETTINGS)
    return out


def test_a_packed_answer_has_the_score_that_transformers_gives_it(policy: Path, tmp_path: Path) -> None:
    """transformers scores padded rows at the last token before padding, without this project's code."""
    model, encode = new_reward_model(policy), AnswerEncoder(policy, 64)
    nn.init.normal_(head_of(model).weight, generator=torch.Generator().manual_seed(0))
    model.config.pad_token_id = encode.tokenizer.pad_id
    write_policy_folder(tmp_path, model)
    answers = [encode(pair.prompt, pair.chosen) for pair in pairs_of(7, 3)]
    packed = scores_of(load_reward_model(tmp_path), answers, row_tokens=40)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation="eager")
    width = max(map(len, answers))
    padded = torch.tensor([[*ids, *[encode.tokenizer.pad_id] * (width - len(ids))] for ids in answers])
    lengths = torch.tensor([len(ids) for ids in answers])
    mask = (torch.arange(width) < lengths[:, None]).long()
    with torch.no_grad():
        expected = plain(input_ids=padded, attention_mask=mask).logits[:, 0].tolist()
    assert packed == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 4) for score in packed}) == len(packed)
    # The mask changes nothing but padding, which the last token never sees.
    assert [scores_of(model, [ids], 8)[0] for ids in answers] == pytest.approx(packed, abs=1e-5)


def test_a_new_head_scores_nothing_and_its_loss_is_that_of_a_coin(policy: Path) -> None:
    model, encode = new_reward_model(policy), AnswerEncoder(policy, 64)
    answers = [ids for pair in pairs_of(3, 4) for ids in (encode(pair.prompt, pair.chosen), encode("", pair.rejected))]
    scores = row_scores(model, answers)
    assert scores.tolist() == [0.0] * 6
    better, worse = scores.view(-1, 2).unbind(1)
    loss = -logsigmoid(better - worse).mean()
    assert loss.item() == pytest.approx(math.log(2))
    torch.autograd.backward(loss)
    head_gradient = head_of(model).weight.grad
    assert head_gradient is not None
    assert head_gradient.abs().sum() > 0


def test_training_learns_which_answers_are_better(trained: Path) -> None:
    encode, model = AnswerEncoder(trained, 64), load_reward_model(trained)
    accuracy = pair_accuracy(
        pairs_of(100, 2), lambda asked: scores_of(model, [encode(prompt, answer) for prompt, answer in asked], 512)
    )
    assert accuracy.value > 0.95
    assert accuracy.count == 100


def test_a_step_is_that_of_a_hand_written_loop(policy: Path, tmp_path: Path) -> None:
    """One step with all pairs in one minibatch, in rows of any size, against plain AdamW on padded rows."""
    pairs = pairs_of(5, 6)
    settings = TrainingSettings(pairs_per_step=5, learning_rate=1e-3, warmup_share=1.0, row_tokens=50)
    result = train_reward_model(policy, pairs, tmp_path / "model", settings)
    encode = AnswerEncoder(policy, 64)
    model = new_reward_model(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for pair in pairs:
        better, worse = (row_scores(model, [encode(pair.prompt, one)])[0] for one in (pair.chosen, pair.rejected))
        losses.append(-logsigmoid(better - worse))
    loss = torch.stack(losses).mean()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert result.loss == pytest.approx(loss.item(), abs=1e-6)
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert set(found) == set(model.state_dict())
    for name, weight in model.state_dict().items():
        # Adam's first step is the sign of the gradient, which for a gradient of zero is that of rounding.
        assert torch.allclose(found[name], weight, atol=1e-6), name


def test_a_killed_training_goes_on_to_the_same_weights(
    policy: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    step = train._Training._step

    def killed(self: Any, number: int) -> tuple[int, float, float]:
        if number == 8:
            raise Killed
        return step(self, number)

    out = tmp_path / "model"
    with monkeypatch.context() as patched:
        patched.setattr(train._Training, "_step", killed)
        with pytest.raises(Killed):
            train_reward_model(policy, pairs_of(96, 1), out, SETTINGS)
    assert not out.exists()
    with pytest.raises(Unusable, match="of another training"):
        train_reward_model(policy, pairs_of(96, 2), out, SETTINGS)
    asked: list[int] = []

    def counted(self: Any, number: int) -> tuple[int, float, float]:
        asked.append(number)
        return step(self, number)

    monkeypatch.setattr(train._Training, "_step", counted)
    train_reward_model(policy, pairs_of(96, 1), out, SETTINGS)
    assert asked == list(range(6, 12))  # the state after six steps was the last one
    assert (out / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.lock"]


def test_an_answer_that_is_too_long_is_cut_and_keeps_its_end_token(policy: Path) -> None:
    encode = AnswerEncoder(policy, 10)
    ids = encode("ab", "c" * 50)
    assert len(ids) == 10
    assert ids[-1] in encode.tokenizer.stop_ids
    assert ids[-1] != encode.tokenizer.pad_id
    assert len(encode("ab", "c")) == 5  # bos, prompt, answer, end


@pytest.mark.parametrize("kind", ["policy", "absent"])
def test_what_is_no_reward_model_is_refused_in_one_sentence(policy: Path, tmp_path: Path, kind: str) -> None:
    folder = policy if kind == "policy" else tmp_path / "absent"
    with pytest.raises(Unusable, match=r"is no reward model but Qwen3ForCausalLM|not hold a usable model"):
        load_reward_model(folder)


def sample(score: float | None, answer: str = "x") -> ScoredSample:
    return ScoredSample(answer, score == 1.0, score)


def test_pairs_are_written_by_the_rule_and_read_again(tmp_path: Path) -> None:
    problems = [
        ScoredProblem("a", "A?", (sample(1.0, "best"), sample(0.5, "half"), sample(0.0, "none"), sample(0.9, "most"))),
        ScoredProblem("b", "B?", (sample(1.0), sample(1.0))),
    ]
    counts = write_pairs(problems, PairRule(), 0, 0, tmp_path / "pairs.jsonl")
    assert (counts.problems, counts.with_pairs, counts.pairs) == (2, 1, 1)
    [pair] = read_pairs(tmp_path / "pairs.jsonl")
    assert (pair.prompt, pair.chosen, pair.rejected) == ("A?", "best", "half")
    with pytest.raises(Unusable, match="no two samples"):
        write_pairs(problems[1:], PairRule(), 0, 0, tmp_path / "none.jsonl")
    with pytest.raises(Unusable, match="evaluate them with --all-tests"):
        write_pairs([ScoredProblem("c", "C?", (sample(None),))], PairRule(), 0, 0, tmp_path / "none.jsonl")
    assert not (tmp_path / "none.jsonl").exists()


def test_best_of_n_lies_between_pass_at_1_and_pass_at_n() -> None:
    def problem(name: str, right: Sequence[bool]) -> ScoredProblem:
        samples = tuple(ScoredSample(f"{name}{at}{one}", one, None) for at, one in enumerate(right))
        return ScoredProblem(name, name, samples)

    problems = [problem("a", [True, False, False, False]), problem("b", [False] * 4), problem("c", [True] * 4)]
    knows = evaluate_best_of_n(problems, 4, lambda asked: [float("True" in answer) for _, answer in asked])
    assert knows.pass_at_1.value == pytest.approx((0.25 + 0 + 1) / 3)
    assert knows.best_of_n == knows.pass_at_n
    assert knows.best_of_n.value == pytest.approx(2 / 3)
    assert knows.correlation == pytest.approx(1.0)
    assert knows.gain.value == pytest.approx(0.25)
    assert knows.gain.standard_error == pytest.approx(0.25)  # 0.75, 0, 0
    blind = evaluate_best_of_n(problems, 4, lambda asked: [0.0] * len(asked))
    assert blind.best_of_n == blind.pass_at_1
    assert blind.correlation is None
    with pytest.raises(Unusable, match="3 problems have fewer than 5 samples, such as a, b, c"):
        evaluate_best_of_n(problems, 5, lambda asked: [0.0] * len(asked))


def test_rm_bench_by_style_and_domain(tmp_path: Path) -> None:
    """The scorer likes long answers, so it fails exactly where the wrong answer is the longer one."""
    lines = [
        {"id": at, "prompt": "p", "chosen": ["++", "++++", "++++++"], "rejected": ["-", "---", "-----"], "domain": name}
        for at, name in enumerate(["code", "code", "math"])
    ]
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(lines))
    found = rm_bench(file, lambda asked: [float(len(answer)) for _, answer in asked])
    assert {name: mean.value for name, mean in found.items()} == {
        "hard": 0.0,
        "normal": 1.0,
        "easy": 1.0,
        "mean": pytest.approx(2 / 3),
        "domain code": pytest.approx(2 / 3),
        "domain math": pytest.approx(2 / 3),
    }
    file.write_text(json.dumps([lines[0] | {"rejected": ["-", "--"]}]))
    with pytest.raises(Unusable, match="record 0 has not as many"):
        rm_bench(file, lambda asked: [0.0] * len(asked))


def test_the_mean_and_its_standard_error() -> None:
    found = Mean.of([1.0, 0.0, 1.0, 0.0])
    assert (found.value, found.count) == (0.5, 4)
    assert found.standard_error == pytest.approx(math.sqrt(1 / 3 / 4))
    assert Mean.of([0.3]).standard_error == 0.0


def test_the_commands_train_and_measure(policy: Path, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(pair.model_dump_json() + "\n" for pair in pairs_of(96, 5)))
    out = tmp_path / "model"
    options = ["--learning-rate", "0.003", "--pairs-per-step", "16", "--epochs", "2", "--json"]
    answer = CliRunner().invoke(app, ["reward-model", "train", str(policy), str(file), "--out", str(out), *options])
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["steps"] == 12
    answer = CliRunner().invoke(app, ["reward-model", "eval", str(out), "--pairs", str(file), "--json"])
    assert json.loads(answer.stdout)["pair_accuracy"]["value"] > 0.9
    answer = CliRunner().invoke(app, ["reward-model", "eval", str(out)])
    assert isinstance(answer.exception, Unusable)
