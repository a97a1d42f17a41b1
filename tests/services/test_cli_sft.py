"""`nouscoder sft` from the command line: a new policy folder with tokenizer and card, and one sentence for a fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.command_line import Ended, nouscoder
from transformers import AutoModelForCausalLM, AutoTokenizer

from nouscoder.domain.prompt import PromptSettings
from nouscoder.learner.model.synthetic import random_policy, write_policy_folder
from nouscoder.policy_folder.inspection import faults_of
from nouscoder.policy_folder.prompt_file import recorded_prompt


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a policy and examples."""
    write_policy_folder(tmp_path / "first", random_policy(0))
    write_examples(tmp_path / "examples.jsonl", 24)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_examples(path: Path, count: int) -> None:
    records = [
        {"problem_id": f"p{number}", "prompt": f"Print {number}.\n", "completion": f"print({number})"}
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def sft(*arguments: str) -> Ended:
    return nouscoder("sft", *arguments)


def test_flags_make_a_policy_folder_with_tokenizer_and_card(place: Path) -> None:
    options = ("--model", "first", "--data", "examples.jsonl", "--name", "tiny", "--epochs", "4", "--batch-size", "6")
    more = ("--learning-rate", "3e-3", "--set", "sft.validation_share=0.2", "--json")
    answer = sft(*options, *more)
    assert answer.exit_code == 0, answer.output
    summary = json.loads(answer.stdout.strip().splitlines()[-1])
    made = place / "runs" / "tiny-sft" / "model"
    assert summary["model"] == str(made)
    assert recorded_prompt(made) == PromptSettings("text")
    assert "## Prompt\ntext, form plain. `nouscoder_prompt.json`" in (made / "README.md").read_text()
    assert summary["examples"] + summary["validation_examples"] == 24
    assert summary["validation_loss"] < summary["validation_loss_before"]
    assert faults_of(made) == []
    AutoModelForCausalLM.from_pretrained(made)
    assert AutoTokenizer.from_pretrained(made)("print(1)")["input_ids"]
    card = (made / "README.md").read_text()
    for sentence in (
        'library_name: "transformers"',
        "# tiny-sft",
        "supervised fine-tuning from first",
        "- examples.jsonl",
    ):
        assert sentence in card
    again = sft(*options, *more, "--resume")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout.strip().splitlines()[-1]) == summary


def test_a_configuration_names_the_same_things_and_an_own_place(place: Path) -> None:
    (place / "my.toml").write_text(
        '[run]\nname = "tiny"\n[policy]\npath = "first"\n[sft]\ntrain = ["examples.jsonl"]\nout = "tuned"\n'
    )
    answer = sft("my.toml")
    assert answer.exit_code == 0, answer.output
    assert f"the policy is in {place / 'tuned'}" in answer.output
    assert "1 steps on 24 examples" in answer.output
    assert faults_of(place / "tuned") == []


def test_a_fine_tuning_goes_on_only_with_its_own_examples(place: Path) -> None:
    options = ("--model", "first", "--data", "examples.jsonl", "--name", "tiny")
    assert sft(*options).exit_code == 0
    assert "holds a run already" in sft(*options).stderr
    write_examples(place / "examples.jsonl", 23)
    answer = sft(*options, "--resume")
    assert answer.exit_code == 78
    assert "are not those that it began with" in answer.output


def test_a_finished_fine_tuning_goes_on_for_more_epochs_and_takes_new_rates(place: Path) -> None:
    options = ("--model", "first", "--data", "examples.jsonl", "--name", "tiny", "--json")
    assert sft(*options).exit_code == 0
    run = place / "runs" / "tiny-sft"
    before = (run / "config.toml").read_text()
    for more, sentence in (
        (
            ("--learning-rate", "1e-3"),
            "finished after 1 steps: sft.learning_rate changes nothing; give more sft.epochs",
        ),
        (("--epochs", "3", "--batch-size", "8"), "sft.batch_size is 8, but the run in"),
        (("--epochs", "3", "--seed", "4"), "run.seed is 4, but the run in"),
    ):
        refused = sft(*options, *more, "--resume")
        assert refused.exit_code == 78
        assert sentence in refused.stderr
        assert (run / "config.toml").read_text() == before
    first = (run / "model" / "model.safetensors").read_bytes()
    answer = sft(*options, "--epochs", "3", "--learning-rate", "1e-3", "--resume")
    assert answer.exit_code == 0, answer.output
    assert "resuming with sft.epochs 1 -> 3, sft.learning_rate 1e-5 -> 0.001" in answer.stderr
    assert json.loads(answer.stdout.strip().splitlines()[-1])["steps"] == 3
    assert (run / "model" / "model.safetensors").read_bytes() != first
    again = sft(*options, "--resume")
    assert json.loads(again.stdout.strip().splitlines()[-1])["steps"] == 3, "the new values last"


@pytest.mark.parametrize(
    ("arguments", "faults"),
    [
        (["--model", "first"], ["sft.train: name a file of examples"]),
        (
            ["--model", "frist", "--data", "exampels.jsonl"],
            ["policy.path: ", "did you mean first?", "sft.train: ", "did you mean examples.jsonl?"],
        ),
        (["--data", "examples.jsonl"], ["policy.path: "]),
        (["--model", "first", "--data", "first"], ["first is not a run folder with saved batches"]),
        (["--model", "first", "--data", "bad.jsonl"], ["bad.jsonl, record 1: it needs either a prompt or messages"]),
        (["--model", "first", "--data", "list.jsonl"], ["list.jsonl, record 1: not a JSON object"]),
        (["--model", "first", "--data", "examples.jsonl", "--epochs", "0"], ["sft.epochs"]),
        (["--model", "first", "--data", "examples.jsonl", "--out", "first"], ["first exists already: give another"]),
        (["--model", "first", "--data", "examples.jsonl", "--out", "bad.jsonl"], ["bad.jsonl is a file, not a folder"]),
        (
            ["--model", "first", "--data", "examples.jsonl", "--set", 'learner.first_checkpoint="first"'],
            ["learner.first_checkpoint: ", "first is not a checkpoint: it has no manifest.json"],
        ),
        (["--model", "first", "--data", "examples.jsonl", "--set", "sft.epoch=1"], ["unknown key sft.epoch"]),
    ],
)
def test_each_fault_has_a_sentence_before_anything_is_trained(
    place: Path, arguments: list[str], faults: list[str]
) -> None:
    (place / "bad.jsonl").write_text('{"question": "a"}\n')
    (place / "list.jsonl").write_text("[1, 2]\n[3]\n")
    files = {file: file.read_bytes() for file in place.rglob("*") if file.is_file()}
    answer = sft(*arguments)
    assert answer.exit_code == 78, answer.output
    for fault in faults:
        assert fault in answer.output
    assert "Traceback" not in answer.output
    assert {file: file.read_bytes() for file in place.rglob("*") if file.is_file()} == files
    assert not (place / "runs").exists()
