"""`nouscoder eval --policy FOLDER`: the samples are those of the policy in the folder, with its context or YaRN's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from nouscoder.cli.app import app
from nouscoder.demo.policy import EOS_ID
from nouscoder.errors import NousCoderError
from nouscoder.evaluation.served_policy import ServedPolicy
from nouscoder.generation.openai import api
from nouscoder.learner.model.synthetic import random_policy, write_policy_folder
from nouscoder.policy_folder.tokenizer import load_tokenizer

PROMPTS = {"p0": "Print 1.\n", "p1": "Print the number 2.\n"}
MAX_TOKENS = 24


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two policies, `first` and `second`, and problems."""
    for seed, name in enumerate(("first", "second")):
        policy = random_policy(seed)
        with torch.no_grad():
            policy.lm_head.weight.mul_(20)  # far from uniform, so that rounding changes no greedy token
        write_policy_folder(tmp_path / name, policy)
    lines = [
        {"problem_id": name, "prompt": prompt, "tests": {"type": "stdin", "cases": [{"input": "", "output": "1"}]}}
        for name, prompt in PROMPTS.items()
    ]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def evaluated(*options: str, max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
    """The record of an evaluation with one greedy sample a problem."""
    usual = ("--n", "1", "--temperature", "0", "--max-tokens", str(max_tokens), "--json")
    answer = CliRunner().invoke(app, ["eval", "problems.jsonl", *usual, *options])
    if answer.exception is not None and not isinstance(answer.exception, SystemExit):
        raise answer.exception
    record: dict[str, Any] = json.loads(answer.stdout.strip().splitlines()[-1])
    return record


def greedy(folder: Path, prompt: str, max_tokens: int = MAX_TOKENS) -> str:
    """The completion of transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    ids = torch.tensor([tokenizer.encode(prompt)])
    with torch.no_grad():
        found = model.generate(
            ids, max_new_tokens=max_tokens, do_sample=False, eos_token_id=EOS_ID, pad_token_id=EOS_ID
        )
    text: str = tokenizer.decode([token for token in found[0, ids.shape[1] :].tolist() if token != EOS_ID])
    return text


def stored(record: dict[str, Any]) -> dict[str, str]:
    """The completion of each problem."""
    lines = (Path("evaluations") / record["model"] / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    return {sample["problem_id"]: sample["completion"] for sample in samples}


@pytest.mark.heavy
def test_the_samples_are_those_of_the_policy_in_the_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = evaluated("--policy", "first"), evaluated("--policy", "second")
    assert first["num_samples"] == 2
    for name, record in (("first", first), ("second", second)):
        assert record["model"].startswith(f"{name}-")
        assert stored(record) == {problem: greedy(place / name, prompt) for problem, prompt in PROMPTS.items()}
    assert stored(first) != stored(second)
    # All samples are there, so no engine is started.
    monkeypatch.delattr(api, "serving_folder")
    assert evaluated("--policy", "first") == first


@pytest.mark.heavy
def test_a_template_that_opens_the_reasoning_begins_the_answers_as_in_training(place: Path) -> None:
    """They had no tag before, so code of a reasoning that was cut was accepted, and no_code in training."""
    (place / "first" / "chat_template.jinja").write_text("{{ bos_token + messages[-1].content + '<think>\\n' }}")
    found = stored(evaluated("--policy", "first"))
    assert found == {name: "<think>\n" + greedy(place / "first", f"{text}<think>\n") for name, text in PROMPTS.items()}


def test_other_weights_under_the_same_name_are_another_model(place: Path) -> None:
    before = ServedPolicy.named("first").model("mine")
    (place / "second" / "model.safetensors").replace(place / "first" / "model.safetensors")
    after = ServedPolicy.named("first").model("mine")
    assert before.rpartition("-")[0] == after.rpartition("-")[0] == "mine"
    assert before != after


@pytest.mark.heavy
def test_yarn_gives_the_context_and_the_positions_of_a_configuration_with_yarn(place: Path) -> None:
    config = json.loads((place / "first" / "config.json").read_text())
    context = config["max_position_embeddings"]
    wanted = context + 20
    longest = max(len(load_tokenizer(place / "first").encode(prompt)) for prompt in PROMPTS.values())
    message = rf"the context of \S+ is {context}: give --max-tokens {context - longest} instead of {wanted}"
    with pytest.raises(NousCoderError, match=message):
        evaluated("--policy", "first", max_tokens=wanted)
    assert not (place / "evaluations").exists(), "a refusal leaves nothing"
    record = evaluated(
        "--policy", "first", "--yarn-factor", "2", "--yarn-original-tokens", str(context), max_tokens=wanted
    )
    assert record["model"].endswith(f"-yarn-2x{context}")
    scaled = place / "scaled"
    scaled.mkdir()
    for file in (place / "first").iterdir():
        (scaled / file.name).write_bytes(file.read_bytes())
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": context}
    config["rope_parameters"] = {**config["rope_parameters"], **yarn}
    config["max_position_embeddings"] = 2 * context
    (scaled / "config.json").write_text(json.dumps(config))
    expected = {problem: greedy(scaled, prompt, wanted) for problem, prompt in PROMPTS.items()}
    assert stored(record) == expected
    assert expected != {problem: greedy(place / "first", prompt, wanted) for problem, prompt in PROMPTS.items()}
    assert json.loads((place / "first" / "config.json").read_text())["max_position_embeddings"] == context


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--policy", "absent"), "absent is not a folder"),
        (("--policy", "."), "has no config.json, so it is not a Hugging Face model folder; nouscoder export writes"),
        (("--policy", "first", "--url", "http://x", "--model", "m"), "give one of --url .*, --policy and --samples"),
        (("--policy", "first", "--yarn-factor", "2"), "YaRN needs --yarn-factor above 1 and --yarn-original-tokens"),
        (("--yarn-factor", "2"), "need --policy"),
        (
            ("--policy", "first", "--set", "generation.device=cuda:7"),
            'generation.device is "cuda:7", and .*: take "cpu"',
        ),
        (("--policy", "first", "--extra", '{"top_k": 20}'), "top_k"),
        (("--policy", "first", "--prompt", "lbc"), "--prompt 'lbc' is none of plain, livecodebench"),
    ],
)
def test_what_cannot_be_evaluated_is_one_sentence(place: Path, options: tuple[str, ...], message: str) -> None:
    with pytest.raises(NousCoderError, match=message):
        evaluated(*options)
    assert not (place / "evaluations").exists()
