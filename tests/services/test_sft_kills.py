"""A fine-tuning is killed with SIGKILL and resumed: it ends with the bytes of one that was never killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from nouscoder.learner.model.synthetic import random_policy, write_policy_folder

pytestmark = pytest.mark.timeout(1800)  # on a busy machine

Run = Callable[[Path, str, bool], int]
SCRIPT = Path(__file__).with_name("sft_process.py")
MOMENTS = (
    *("before the first step", "after step 5", "in the middle of a line", "before a checkpoint has its name"),
    *("before the model is written", "before the summary"),
)
TIMES = {"time", "tokens_per_second"}
CONFIG = """
[run]
name = "tiny"
root = "runs"
[policy]
path = "first"
[learner]
checkpoint_every_batches = 2
microbatch_tokens = 64
[sft]
train = ["examples.jsonl"]
validation_share = 0.2
validate_every_steps = 3
epochs = 2
batch_size = 4
learning_rate = 1e-3
"""


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Fine-tunes in a folder in a separate process and returns its exit code."""
    with subprocess.Popen([sys.executable, SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:

        def ask(folder: Path, moment: str, resume: bool) -> int:
            assert parent.stdin is not None
            assert parent.stdout is not None
            print(json.dumps([str(folder), moment, resume]), file=parent.stdin, flush=True)
            return int(parent.stdout.readline())

        yield ask


def prepared(folder: Path) -> Path:
    """Examples, a policy and a configuration."""
    folder.mkdir()
    write_policy_folder(folder / "first", random_policy(0))
    records = [
        {"problem_id": f"p{number}", "prompt": f"Print {number}.\n", "completion": f"print({number})"}
        for number in range(20)
    ]
    (folder / "examples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "sft.toml").write_text(CONFIG)
    return folder


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "runs" / "tiny-sft" / "metrics.jsonl").read_text()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in text.splitlines()]


def model(folder: Path) -> bytes:
    return (folder / "runs" / "tiny-sft" / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepared(tmp_path_factory.mktemp("undisturbed") / "here")
    assert run(folder, "", False) == 0
    return folder


@pytest.mark.soak
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_and_resumed_it_ends_as_if_it_had_never_been_killed(
    run: Run, undisturbed: Path, tmp_path: Path, moment: str
) -> None:
    folder = prepared(tmp_path / "killed")
    assert run(folder, moment, False) == -signal.SIGKILL
    assert run(folder, "", True) == 0
    assert model(folder) == model(undisturbed)
    assert lines(folder) == lines(undisturbed)
    num_steps = lines(folder)[-1]["step"]
    assert [line["step"] for line in lines(folder)] == list(range(num_steps + 1))
    assert num_steps >= 6, "the moments come before the end"
    summaries = [json.loads((one / "runs/tiny-sft/summary.json").read_text()) for one in (folder, undisturbed)]
    assert {**summaries[0], "model": ""} == {**summaries[1], "model": ""}


@pytest.mark.soak
def test_two_ranks_train_as_one(undisturbed: Path, tmp_path: Path) -> None:
    folder = prepared(tmp_path / "ranks")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command = [*torchrun, "-m", "nouscoder", "sft", str(folder / "sft.toml"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.strip().splitlines()[-1])["steps"] == lines(undisturbed)[-1]["step"]
    two, one = (load_file(place / "runs/tiny-sft/model/model.safetensors") for place in (folder, undisturbed))
    assert max(float((two[name] - one[name]).abs().max()) for name in one) < 1e-5
