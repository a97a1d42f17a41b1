"""Self-play of the demo with real services, killed once, against the same number of steps without proposals.

The commands are those of docs/self-play.md.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BATCHES = 24  # of all rounds, with two steps each


def commands() -> list[list[str]]:
    """The commands of the document: prepare, begin, go on."""
    block = re.search(r"```sh\n(.*?)```", (ROOT / "docs/self-play.md").read_text(encoding="utf8"), re.DOTALL)
    assert block is not None
    found = [shlex.split(line, comments=True) for line in block[1].splitlines()]
    assert [words[0] for words in found] == ["nouscoder"] * 3
    return [[sys.executable, "-m", "nouscoder", *words[1:]] for words in found]


def options(*values: str) -> list[str]:
    return [part for value in values for part in ("--set", value)]


def begun(command: list[str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("ab") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)


def finished(command: list[str]) -> dict[str, Any]:
    """The result of a self-play."""
    done = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=5000)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def lines(file: Path) -> int:
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def killed_when(process: subprocess.Popen[bytes], output: Path, file: Path, num_lines: int) -> None:
    until = time.monotonic() + 2400
    while lines(file) < num_lines:
        assert process.poll() is None, output.read_text()[-3000:]
        assert time.monotonic() < until, output.read_text()[-3000:]
        time.sleep(0.2)
    process.kill()
    process.wait(60)


def shown(record: dict[str, Any]) -> str:
    return f"{record['pass_at_1']:.4f} +- {record['standard_error']:.4f}"


@pytest.mark.soak
@pytest.mark.timeout(10_000)
def test_a_small_policy_proposes_problems_and_is_trained_on_those_accepted(tmp_path: Path) -> None:
    """What it prints is the measurement. No gain is asserted of self-play over training without it."""
    prepare, begin, resume = commands()
    own = options(f'run.root="{tmp_path}"', "run.name=with", f"run.total_batches={BATCHES}")
    subprocess.run([*prepare, *own], cwd=ROOT, check=True, timeout=2400, capture_output=True)
    folder, output = tmp_path / "with-self-play", tmp_path / "output"
    killed_when(begun([*begin, *own], output), output, folder / "01-propose/proposals.jsonl", 40)
    before = (folder / "01-propose/proposals.jsonl").read_bytes()
    result = finished([*resume, *own])
    assert (folder / "01-propose/proposals.jsonl").read_bytes().startswith(before.rpartition(b"\n")[0])

    # The same steps without proposals: those of the proposer are added to the training's.
    rounds, extra = len(result["rounds"]), result["proposer_steps"] // 2
    assert (BATCHES + extra) % rounds == 0
    inputs = [f'{key}="{tmp_path}/with/{place}"' for key, place in (
        ("problems.train", "problems/train.jsonl"),
        ("problems.held_out", "problems/held_out.jsonl"),
        ("policy.path", "policy"),
    )]  # fmt: skip
    alone = finished(
        [
            *begin,
            *options(f'run.root="{tmp_path}"', "run.name=alone", "self_play.proposals=0", *inputs),
            *options(f"run.total_batches={BATCHES + extra}"),
        ]
    )
    assert alone["steps"] == result["steps"] + result["proposer_steps"]

    print(f"\naccepted {result['accepted']} of {result['proposals']} = {result['accepted_share']:.3f}")
    print(json.dumps(result["rejected"], indent=1))
    for one in result["rounds"]:
        print(json.dumps(one))
    for name, arm in (("with self-play", result), ("without", alone)):
        steps = f"{arm['steps']} + {arm['proposer_steps']} steps"
        first = alone["first_training_before"]  # of the first policy, which both begin with
        print(f"{name}, {steps}: held-out pass@1 {shown(first)} before, {shown(arm['after'])} after", flush=True)

    assert 0 < result["accepted"] < result["proposals"]
    assert result["accepted"] + sum(result["rejected"].values()) == result["proposals"]
    held_out = {json.loads(line)["prompt"] for line in (tmp_path / "with/problems/held_out.jsonl").open()}
    accepted = [json.loads(line) for file in folder.glob("*-propose/accepted.jsonl") for line in file.open()]
    prompts = [problem["prompt"] for problem in accepted]
    assert len(set(prompts)) == len(prompts) == result["accepted"]
    assert not held_out & set(prompts)
    trained = [json.loads(line) for file in folder.glob("*-train/rewards.jsonl") for line in file.open()]
    names = {problem["problem_id"] for problem in accepted}
    assert any(names & line["rewards"].keys() for line in trained), "accepted problems were trained on"
