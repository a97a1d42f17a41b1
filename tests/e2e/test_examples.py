"""Runs each example, as its README says. Those that take minutes are heavy; GRPOTrainer itself is for test-trainers."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from tests.free_addresses import free_addresses

from nouscoder.client import Client
from nouscoder.config import load_config
from nouscoder.learner.model.synthetic import random_policy, write_policy_folder

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
OWN = EXAMPLES / "own_model_own_problems"
TESTED = re.compile(r"^```sh tested\n(.*?)^```\n<!-- gives: ([^\n]*) -->", re.DOTALL | re.MULTILINE)
RESULT = re.compile(r"pass@1 (\S+) before, (\S+) after; \S+ minutes, \S+ of them warm start")
MIN_GAIN = 0.2


def example(*words: str | Path, limit_s: float = 280, code: int = 0, python: Path = Path(sys.executable)) -> str:
    """What examples/WORDS prints."""
    command = [str(python), str(EXAMPLES / words[0]), *map(str, words[1:])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def nouscoder(*words: str, folder: Path, limit_s: float = 280) -> str:
    """What `nouscoder WORDS` prints in a folder."""
    command = [sys.executable, "-m", "nouscoder", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A copy of own_model_own_problems/ with a small random model."""
    folder = tmp_path / "own"
    shutil.copytree(OWN, folder, ignore=shutil.ignore_patterns("model", "runs", "*.index"))
    write_policy_folder(folder / "model", random_policy(0))
    return folder


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_the_loop_on_one_page_trains_two_small_batches_and_balances(tmp_path: Path) -> None:
    printed = example("one_file_rl.py", "--small", "--batches", "2", "--folder", tmp_path, limit_s=580)
    assert RESULT.search(printed), printed
    assert "batch 2: " in printed
    assert "trained=16" in printed
    assert "0.000 is right" in printed
    assert "balanced: True" in printed


def test_the_learner_alone_has_at_most_100_lines_and_its_loss_is_that_of_the_page() -> None:
    text = (EXAMPLES / "learner_alone.py").read_text()
    assert len(text.splitlines()) <= 100
    program = """import sys, torch
import learner_alone, one_file_rl
groups, rewards = ["a", "b", "a", "b"], [1.0, 1.0, -1.0, 1.0]
ours = learner_alone.group_advantages(groups, torch.tensor(rewards))
assert torch.allclose(ours, torch.tensor(one_file_rl.group_advantages(groups, rewards))), ours
new, old = torch.log(torch.tensor([[2.0, 1.0], [0.5, 3.0]])), torch.zeros(2, 2)
gain, counts = torch.tensor([[1.0, 1.0], [-1.0, 1.0]]), torch.tensor([[True, True], [True, False]])
print(f"{learner_alone.clipped_loss(new, old, gain, counts):.4f}")
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLES, timeout=120, check=False)
    assert done.stdout == f"{-(1.28 + 1 - 0.8) / 3:.4f}\n", done.stderr[-2000:]


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_the_learner_alone_trains_a_small_batch_and_the_ledger_balances() -> None:
    printed = example("learner_alone.py", "--small", "--batches", "1", limit_s=580)
    assert "batch 1: reward " in printed
    assert "trained=8" in printed


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_loop_on_one_page_learns(tmp_path: Path) -> None:
    printed = example("one_file_rl.py", "--folder", tmp_path, limit_s=3500)
    print(printed)
    result = RESULT.search(printed)
    assert result is not None
    assert float(result[2]) - float(result[1]) >= MIN_GAIN
    assert "balanced: True" in printed


def test_a_folder_of_programs_is_graded(grading_url: str) -> None:
    printed = example("grade_a_folder.py", EXAMPLES / "sums", "--url", grading_url, code=1)
    verdicts = [line for line in printed.splitlines() if not line.startswith(" ")]
    assert verdicts == [
        "overflow.c: wrong_answer, 2 of 3 tests passed",
        "right.py: accepted, 3 of 3 tests passed",
        "wrong.py: wrong_answer, 2 of 3 tests passed",
    ]


@pytest.mark.heavy
def test_a_program_that_nobody_graded_is_not_a_wrong_one(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "sums", tmp_path / "sums")
    (tmp_path / "sums" / "tests.json").write_text('{"type": "unknown"}')
    assert "not graded" in example("grade_a_folder.py", tmp_path / "sums", "--url", "http://127.0.0.1:9", code=2)


CONSOLE = re.findall(r"^```sh tested\n(.*?)^```", (ROOT / "docs/console.md").read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("line", [line for block in CONSOLE for line in block.splitlines()])
def test_each_command_of_the_live_page_shows_it_until_ctrl_c(line: str, own: Path) -> None:
    """The run of the command has just begun then."""
    address = free_addresses(1)[0]
    small = ("generation.max_tokens_total=256", "generation.sampling.max_new_tokens=64")
    words = [
        *shlex.split(line.replace("127.0.0.1:8088", address))[1:],
        *(part for one in small for part in ("--set", one)),
    ]
    said, shown = own / "said", f"the run is shown at http://{address}/"
    with said.open("wb") as output:
        command = [sys.executable, "-m", "nouscoder", *words]
        process = subprocess.Popen(command, cwd=own, stdout=output, stderr=output, start_new_session=True)
    try:
        end = time.monotonic() + 120
        while process.poll() is None and shown not in said.read_text() and time.monotonic() < end:
            time.sleep(0.1)
        assert shown in said.read_text()
        assert "NousCoder run" in httpx.get(f"http://{address}/").text
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)


def test_the_live_page_has_tested_commands() -> None:
    assert any("train my.toml" in block for block in CONSOLE)
    assert any("demo" in block for block in CONSOLE)


def test_the_reward_for_trl_without_trl(grading_url: str) -> None:
    assert "rewards of a right and a wrong answer: [1.0, -1.0]" in example("trl_reward.py", "--url", grading_url)


@pytest.mark.trainers
@pytest.mark.timeout(900)
def test_trl_trains_with_the_reward(grading_url: str, tmp_path: Path) -> None:
    python = ROOT / ".venv-trainers" / "bin" / "python"
    model, out = tmp_path / "model", tmp_path / "out"
    save = f"from pathlib import Path; import tiny_policy; tiny_policy.save_policy(Path({str(model)!r}))"
    subprocess.run([str(python), "-c", save], cwd=ROOT / "tests" / "e2e" / "trainer_packages", check=True, timeout=120)
    printed = example(
        "trl_reward.py", model, "--url", grading_url, "--steps", "2", "--out", out, limit_s=800, python=python
    )
    steps = json.loads(printed.rsplit(": ", 1)[1])
    assert len(steps) == 2
    assert all(-1 <= reward <= 1 for reward in steps)
    assert (out / "config.json").exists()


def test_the_commands_for_an_own_model_give_what_their_readme_says(own: Path) -> None:
    script, gives = TESTED.findall((own / "README.md").read_text())[0]
    commands = [shlex.split(line) for line in script.splitlines()]
    printed = [nouscoder(*words[1:], folder=own) for words in commands]
    assert gives in printed[-1]
    written, published = load_config(own / "new.toml"), load_config(own / "my.toml")
    assert set(differing(written.model_dump(), published.model_dump())) == {
        *("run.name", "run.total_batches", "problems.held_out_share", "broker.batch_size"),
        *("generation.max_tokens_total", "generation.sampling.max_new_tokens"),
    }


def differing(first: object, second: object, key: str = "") -> list[str]:
    """The keys whose values differ."""
    if isinstance(first, dict) and isinstance(second, dict):
        return [name for part in first for name in differing(first[part], second[part], f"{key}.{part}".lstrip("."))]
    return [] if first == second else [key]


def test_the_reference_solutions_of_the_own_problems_are_accepted(grading_url: str) -> None:
    problems = [json.loads(line) for line in (OWN / "problems.jsonl").read_text().splitlines()]
    with Client(grading_url) as client:
        for problem in problems:
            answer = client.grade(code=problem["references"][0], tests=problem["tests"])
            assert answer["verdict"] == "accepted", problem["problem_id"]


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_an_own_model_is_trained(own: Path) -> None:
    """A random model solves nothing, so its groups are kept. It never stops, so its answers are short."""
    values = ("run.total_batches=1", "broker.drop_zero_variance=false", "generation.sampling.max_new_tokens=8")
    few = ("broker.group_size=4", "broker.batch_size=8", "learner.steps_per_batch=1", "generation.max_tokens_total=256")
    nouscoder(
        "train", "my.toml", *(word for value in values + few for word in ("--set", value)), folder=own, limit_s=800
    )
    assert json.loads((own / "runs" / "my" / "summary.json").read_text())["balanced"] is True
