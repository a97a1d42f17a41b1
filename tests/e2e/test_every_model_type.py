"""Every model type of docs/models.md through the whole: `sft`, then `train`, then `eval` of what was trained.

A type is trained, and each fresh token has the log-probability that the engine sampled it with; or it is refused in one
sentence before a folder is made. `make test-models` prints a line for each type.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.services.model_types import TYPES, tiny_model
from transformers import AutoModelForCausalLM

from nouscoder.data.problems import save_problems
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import StdinCase, StdinTests
from nouscoder.learner.model.synthetic import write_policy_folder
from nouscoder.policy_folder.engine_types import TORCH_ENGINE, VLLM

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

# Float32 on both sides: what is left is the order of sums. A wrong layer gives tenths.
MOST_MISMATCH = 1e-3
RUN = """
[run]
name = "run"
root = "{root}"
total_batches = 3
[policy]
path = "{policy}"
[problems]
train = "{problems}"
held_out = "{problems}"
[evaluation]
samples = 1
[broker]
group_size = 4
batch_size = 8
drop_zero_variance = false
[broker.reward]
rule = "soft"
[generation]
max_tokens_total = 128
sampling.max_new_tokens = 24
[learner]
steps_per_batch = 2
threads = 1
learning_rate = 0.01
[sft]
train = ["{examples}"]
out = "{tuned}"
"""


def nouscoder(*words: str) -> tuple[int, str]:
    """A command's exit code, and the end of what it printed."""
    done = subprocess.run([sys.executable, "-m", "nouscoder", *words], capture_output=True, text=True, timeout=600)
    return done.returncode, (done.stdout + done.stderr)[-3000:]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    tests = StdinTests((StdinCase("1\n", "2\n"),))
    save_problems(tmp_path / "problems.jsonl", [Problem(f"p{n}", f"Add {n}.", tests) for n in range(6)])
    examples = [{"prompt": f"Add {n}.", "completion": f"print({n})"} for n in range(6)]
    (tmp_path / "examples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in examples))
    names = {
        "root": ".",
        "policy": "model",
        "problems": "problems.jsonl",
        "examples": "examples.jsonl",
        "tuned": "tuned",
    }
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(**{key: tmp_path / name for key, name in names.items()}))
    return file


def refused(text: str, kind: str) -> str:
    """The sentence that refuses a type. Fails when there is a traceback, or no sentence."""
    assert "Traceback" not in text, text
    lines = [line for line in text.splitlines() if f"type {kind}" in line]
    assert lines, text
    return lines[-1]


def assert_whole(folder: Path) -> None:
    auto: Any = AutoModelForCausalLM
    _, found = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found


@pytest.mark.parametrize("kind", TYPES)
def test_a_type_is_tuned_trained_and_evaluated_or_refused(kind: str, config: Path, tmp_path: Path) -> None:
    write_policy_folder(tmp_path / "model", tiny_model(kind))
    code, text = nouscoder("sft", str(config))
    tuned = not code
    if not tuned:
        print(f"\n{kind}: sft: {refused(text, kind)}")
        assert not (tmp_path / "tuned").exists()
    else:
        assert_whole(tmp_path / "tuned")
    code, text = nouscoder("train", str(config))
    if kind not in TORCH_ENGINE:
        assert code, "a type that no test compares"
        sentence = refused(text, kind)
        print(f"\n{kind}: train: {sentence}")
        assert ('set generation.engine to "vllm"' in sentence) == (kind in VLLM)
        assert not (tmp_path / "run").exists()
        return
    assert code == 0, text
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    mismatch = [step["mismatch_fresh_abs_mean"] for step in steps if step.get("mismatch_fresh_abs_mean") is not None]
    assert max(mismatch) <= MOST_MISMATCH
    exported = tmp_path / "exported"
    code, text = nouscoder("export", str(tmp_path / "run"), "--to", str(exported))
    assert code == 0, text
    code, text = nouscoder(
        *("eval", str(tmp_path / "problems.jsonl"), "--policy", str(exported), "--out", str(tmp_path / "evaluation")),
        *("--n", "2", "--max-tokens", "16", "--json"),
    )
    assert code == 0, text
    assert tuned, "the learner trains the type, so sft does"
    assert_whole(exported)
    print(f"\n{kind}: tuned, trained, evaluated; no tensor missing or unexpected; mean mismatch <= {max(mismatch):.1e}")
