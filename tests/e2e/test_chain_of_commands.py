"""The chain `sft sample`, `data inspect`, `sft`, `train`, `eval`, `grade`: one text has one form and one verdict.

The policy learns a teacher's answers by heart, so that what it samples is known.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.openai_mock import MockServer, serving
from transformers import AutoTokenizer

from nouscoder.config import load_config
from nouscoder.demo.policy import PolicySize, build_policy, save_policy
from nouscoder.learner.state.saved_batches import SavedBatches
from nouscoder.policy_folder.tokenizer import load_tokenizer
from nouscoder.sft.encoder import Encoder
from nouscoder.sft.records import example_of

pytestmark = pytest.mark.alone

OPENED = "<think>\n"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: "
)
CODE = "```python\nprint({})\n```"
ANSWERS = {"one": CODE.format(1), "two": "None."}  # the second has code in its reasoning alone
THOUGHT = "Try\n" + CODE.format(2)


def teacher(request: dict[str, Any]) -> dict[str, Any]:
    """The first sample of a problem is whole, and the second is cut inside its reasoning."""
    text = request["messages"][-1]["content"]
    asked.append(text)
    message = {"reasoning_content": THOUGHT}
    if asked.count(text) == 1:
        message["content"] = next(answer for name, answer in ANSWERS.items() if name in text)
    return {"choices": [{"message": message, "finish_reason": "stop" if "content" in message else "length"}]}


asked: list[str] = []


def run(place: Path, *arguments: object) -> str:
    command = [sys.executable, "-m", "nouscoder", *map(str, arguments)]
    ended = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("begin", [OPENED, ""])
def test_a_taught_text_is_asked_sampled_and_graded_as_the_template_writes_it(begin: str, tmp_path: Path) -> None:
    asked.clear()
    save_policy(build_policy(seed=0, size=PolicySize(64, 2, 128, max_positions=256)), tmp_path / "policy")
    (tmp_path / "policy" / "chat_template.jinja").write_text(TEMPLATE + begin + "{% endif %}")
    problems = [
        {
            "problem_id": name,
            "prompt": f"Print {name}.",
            "tests": {"type": "stdin", "cases": [{"input": "", "output": str(n)}]},
        }
        for n, name in enumerate(ANSWERS, 1)
    ]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(one) + "\n" for one in problems))
    with serving(MockServer(teacher)) as server:
        options = ("--url", server.url, "--model", "m", "--n", 2, "--at-once", 1, "--out", "taught.jsonl")
        run(tmp_path, "sft", "sample", "problems.jsonl", *options)
    run(tmp_path, "data", "inspect", "problems.jsonl")
    as_asked = "generation.environment.prompt_as=messages"
    choice = ("--epochs", 150, "--batch-size", 2, "--learning-rate", 3e-3, "--set", "sft.wrong_below=0.5")
    run(tmp_path, "sft", "--model", "policy", "--data", "taught.jsonl", "--name", "a", "--set", as_asked, *choice)
    model = tmp_path / "runs" / "a-sft" / "model"
    noted = json.loads((model.parent / "examples.json").read_text())
    assert noted["train"] == 2
    assert noted["dropped"] == {"wrong": 1, "unfinished": 1}

    whole: Any = AutoTokenizer.from_pretrained(model)

    def rendered(name: str, answer: str) -> list[int]:
        chat = [{"role": "user", "content": f"Print {name}."}, {"role": "assistant", "content": answer}]
        ids: list[int] = whole.apply_chat_template(chat, return_dict=False)
        return ids

    encoder = Encoder(load_tokenizer(model), load_config(None, [as_asked]).generation.environment)
    taught = {one["problem_id"]: one for one in lines(tmp_path / "taught.jsonl") if one["finish_reason"] == "stop"}
    for name, record in taught.items():
        assert encoder.encode(example_of(record)).token_ids.tolist() == rendered(name, record["completion"])

    (tmp_path / "run.toml").write_text(
        '[run]\nname = "b"\ntotal_batches = 1\n[problems]\ntrain = "problems.jsonl"\nheld_out = "problems.jsonl"\n'
        f'[policy]\npath = "{model}"\n[broker]\ngroup_size = 4\nbatch_size = 8\ndrop_zero_variance = false\n'
        "[generation]\nthreads = 1\nmax_tokens_total = 256\n[generation.sampling]\ntemperature = 0.3\n"
        "[learner]\nsteps_per_batch = 1\nthreads = 1\n"
    )
    run(tmp_path, "train", "run.toml")
    batches = SavedBatches(tmp_path / "runs" / "b" / "batches", 1)
    rollouts = [one for number in batches.numbers() for one in batches.load(number).rollouts]
    asks = ("--policy", model, "--temperature", 0, "--n", 1, "--max-tokens", 128, "--out", "evaluated")
    run(tmp_path, "eval", "problems.jsonl", *asks)
    verdicts = {one["problem_id"]: one["verdict"] for one in lines(tmp_path / "evaluated" / "verdicts.jsonl")}
    assert verdicts == {"one": "accepted", "two": "no_code"}
    sampled = {one["problem_id"]: one["completion"] for one in lines(tmp_path / "evaluated" / "samples.jsonl")}
    assert sampled == {name: record["completion"] for name, record in taught.items()}

    known = [{"task_id": name, "completion": text, "verdict": verdicts[name]} for name, text in sampled.items()]
    for one in rollouts:
        rollout, name = one.rollout, one.rollout.problem_id
        if rollout.text == sampled[name]:
            assert rollout.token_ids.tolist() == rendered(name, rollout.text)
        known.append({"task_id": name, "completion": rollout.text, "verdict": one.verdict.kind.value})
        bare = rollout.text.removeprefix(begin)  # as a server writes it
        known.append({**known[-1], "completion": bare, "prompt": f"user: Print {name}.assistant: {begin}"})
    assert any(one.rollout.text == sampled[one.rollout.problem_id] for one in rollouts)
    before = json.loads((tmp_path / "runs" / "b" / "evaluation_before.json").read_text())["problems"]
    assert {one["problem_id"]: one["passed"] for one in before} == {"one": 1, "two": 0}
    (tmp_path / "known.jsonl").write_text("".join(json.dumps(one) + "\n" for one in known))
    graded = run(tmp_path, "grade", "known.jsonl", "--problems", "problems.jsonl").splitlines()
    assert [json.loads(line)["verdict"] for line in graded] == [one["verdict"] for one in known]
