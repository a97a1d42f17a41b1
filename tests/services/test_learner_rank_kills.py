"""One of two ranks is killed at each point of a step: the group resumes to the weights of an undisturbed run."""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nouscoder.learner.model.synthetic import random_policy, write_policy_folder

SCRIPT = Path(__file__).with_name("learner_rank_point.py")
NUM_BATCHES = 4  # of learner_rank.py
POINTS = (
    "before the batch is packed",
    "before the first step",
    "before the forward pass",
    "before the backward pass",
    "before the norm of the gradient",
    "before the optimizer",
    "after the optimizer",
    "between two steps",
)

Start = Callable[[str, Path], list[int]]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Runs two ranks; see learner_rank_point.py. Returns their exit codes."""
    with subprocess.Popen([sys.executable, SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        stdin, stdout = parent.stdin, parent.stdout

        def ask(what: str, root: Path) -> list[int]:
            stdin.write(json.dumps([what, str(root), 2]) + "\n")
            stdin.flush()
            codes: list[int] = json.loads(stdout.readline())
            return codes

        yield ask
        stdin.close()


def run_folder(root: Path) -> Path:
    root.mkdir()
    write_policy_folder(root / "run" / "policy", random_policy(0))
    return root


def logs(root: Path) -> str:
    return "".join((root / f"rank{rank}.log").read_text()[-1500:] for rank in (0, 1))


@pytest.fixture(scope="module")
def undisturbed(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = run_folder(tmp_path_factory.mktemp("ranks") / "plain")
    assert start("run", root) == [0, 0], logs(root)
    return root


def weights(root: Path, version: int) -> dict[str, torch.Tensor]:
    return load_file(root / "run" / "policies" / f"{version:08d}" / "model.safetensors")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", POINTS)
def test_a_group_resumes_bit_for_bit_after_a_kill_of_one_rank(
    point: str, rank: int, start: Start, undisturbed: Path, tmp_path: Path
) -> None:
    root = run_folder(tmp_path / "killed")
    codes = start(f"{rank}@{point}", root)
    assert codes[rank] == -signal.SIGKILL, logs(root)
    assert codes[1 - rank] == 1, "the other rank ends, and says that one is lost"
    lost = (root / f"rank{1 - rank}.log").read_text().splitlines()[-1]
    assert lost.startswith("RankLost: "), lost
    assert not (root / "run" / "policies" / "00000003").exists(), "the batch was not trained yet"
    assert start("run", root) == [0, 0], logs(root)
    expected, found = weights(undisturbed, NUM_BATCHES), weights(root, NUM_BATCHES)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    commits, policies, finished = pickle.loads((root / "run" / "broker").read_bytes())
    assert commits == [(batch, 2 * batch + 2) for batch in range(NUM_BATCHES)]
    assert [manifest.policy_version for manifest in policies] == list(range(NUM_BATCHES + 1))
    assert finished
    figures = [
        [(line["step"], line["loss"], line["gradient_norm"]) for line in map(json.loads, file.read_text().splitlines())]
        for file in (root / "run" / "metrics.jsonl", undisturbed / "run" / "metrics.jsonl")
    ]
    assert figures[0] == figures[1]
