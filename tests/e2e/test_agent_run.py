"""Runs with the environment agent and real services: agents of another process make every rollout.

The problems are products of two numbers of four digits, and the answer is graded as text. The policy was taught to call
the calculator of examples/agent_with_tools, with mistakes in most of its calls. It has no tool but the agent's.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tests.e2e.small_runs import trained
from tests.e2e.test_interpreter_run import CLEAN_STEPS, MISTAKES, NOISY_STEPS, NUM_BATCHES, save_products, taught
from tests.redis_process import free_port

from nouscoder.demo.policy import CharTokenizer, build_policy, save_policy
from nouscoder.demo.warmstart import WarmStartBudget, teach_batches
from nouscoder.learner.state.saved_batches import SavedBatches

pytestmark = pytest.mark.alone

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent_with_tools"
NUM_AGENTS = 16
AGENT = """
[problems]
train = "train.jsonl"
held_out = "held_out.jsonl"
[policy]
path = "policy"
[broker]
group_size = 8
batch_size = 32
drop_zero_variance = false
[generation]
max_running = 32
max_tokens_total = 160
[generation.sampling]
max_new_tokens = 72
[generation.environment]
kind = "agent"
[learner]
steps_per_batch = 2
learning_rate = 3e-4
adam_betas = [0.9, 0.95]
keep_batches = 100
"""


def prepared(folder: Path, seed: int) -> None:
    """Problems, and a policy that was taught to call the calculator."""
    torch.set_num_threads(1)
    work, random = folder / "teaching", Random(seed)
    save_policy(build_policy(seed=seed), work / "first")
    batches = [
        [
            example
            for _ in range(16)
            for example in taught(
                random,
                mistakes=MISTAKES if step >= CLEAN_STEPS else 0.0,
                call_form="<calc>{}</calc>",
                reply_form="\n= {}\n",
            )
        ]
        for step in range(CLEAN_STEPS + NOISY_STEPS)
    ]
    teach_batches(work / "first", folder / "policy", batches, WarmStartBudget(), work=work)
    save_products(folder, seed)


def with_agents(folder: Path, seed: int, make_rollout: Callable[[Any, str], None], *values: str) -> tuple[float, float]:
    """pass@1 before and after a run whose rollouts the example's agent makes, each by `make_rollout`."""
    spec = importlib.util.spec_from_file_location("example_agent", EXAMPLE / "agent.py")
    assert spec is not None
    assert spec.loader is not None
    agent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agent)
    address, is_over = f"127.0.0.1:{free_port()}", threading.Event()

    def work() -> None:
        while not is_over.is_set():
            try:
                make_rollout(agent, f"http://{address}")
            except urllib.error.HTTPError as error:
                error.close()
            except OSError:
                is_over.wait(1.0)

    agents = [threading.Thread(target=work) for _ in range(NUM_AGENTS)]
    for thread in agents:
        thread.start()
    try:
        settings = (f"run.seed={seed}", f"run.total_batches={NUM_BATCHES}", f'generation.openai.http="{address}"')
        return trained(folder, "agents", AGENT, *settings, *values)
    finally:
        is_over.set()
        for thread in agents:
            thread.join()


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_policy_learns_from_the_rollouts_of_an_agent_with_a_tool(tmp_path: Path, seed: int) -> None:
    prepared(tmp_path, seed)
    before, after = with_agents(tmp_path, seed, lambda agent, url: agent.make_rollout(url))
    assert after >= before + 0.1
    saved = SavedBatches(tmp_path / "runs" / "agents" / "batches", keep=100)
    rollouts = [one.rollout for number in range(NUM_BATCHES) for one in saved.load(number).rollouts]
    assert {tuple(segment.is_sampled for segment in rollout.segments) for rollout in rollouts} >= {
        (False, True),
        (False, True, False, True),
    }


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns_from_the_rollouts_of_agents_in_another_process(tmp_path: Path, seed: int) -> None:
    """The two commands of examples/README.md."""
    lines = (EXAMPLE.parent / "README.md").read_text().replace("127.0.0.1:8010", f"127.0.0.1:{free_port()}")
    demo, agents = (
        shlex.split(line) for line in lines.splitlines() if 'kind="agent"' in line or "agent.py http" in line
    )
    demo = [sys.executable, "-m", "nouscoder", *demo[1:], "--seed", str(seed), "--set", f'run.root="{tmp_path}"']
    with subprocess.Popen([sys.executable, *agents[1:]], cwd=EXAMPLE.parents[1]) as agent:
        try:
            run = subprocess.run(demo, capture_output=True, text=True, timeout=3500)
        finally:
            agent.kill()
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    summary = json.loads((tmp_path / f"demo-{seed}" / "summary.json").read_text())
    print(json.dumps(summary), flush=True)
    assert "agents make the rollouts" in run.stdout
    assert summary["pass_at_1_after"] - summary["pass_at_1_before"] >= 0.3
    assert summary["balanced"] is True


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_the_ledger_balances_when_agents_leave_a_third_of_their_sessions(tmp_path: Path) -> None:
    fates = Random(0)
    left: list[bool] = []

    def make_rollout_or_leave(agent: Any, url: str) -> None:
        if fates.random() >= 1 / 3:
            agent.make_rollout(url)
            left.append(False)
            return
        session = agent.post(f"{url}/v1/sessions", {"wait_s": 60})
        left.append(True)
        if fates.random() < 0.5:
            asked = {"model": "any", "messages": session["messages"]}
            agent.post(f"{url}/v1/chat/completions", asked, session["key"])

    prepared(tmp_path, 0)
    with_agents(tmp_path, 0, make_rollout_or_leave, "generation.environment.agent_session_s=8")
    ledger = json.loads((tmp_path / "runs" / "agents" / "summary.json").read_text())["ledger"]
    print(f"{sum(left)} of {len(left)} sessions left; {ledger}", flush=True)
    assert ledger["trained"] + ledger["abandoned"] >= NUM_BATCHES * 20
    assert 0.15 <= ledger["abandoned"] / ledger["admitted"] <= 0.6


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_sessions_of_curl_become_trained_rollouts_of_two_turns(tmp_path: Path) -> None:
    """Before and after the training, curl makes the rollout of the one held-out problem, too."""
    save_policy(build_policy(seed=0), tmp_path / "policy")
    save_products(tmp_path, 0)
    for name in ("train", "held_out"):
        file = tmp_path / f"{name}.jsonl"
        file.write_text(file.read_text().partition("\n")[0] + "\n")
    address, printed = f"127.0.0.1:{free_port()}", []
    is_over = threading.Event()

    def make_rollouts() -> None:
        while not is_over.is_set():
            command = [str(EXAMPLE / "rollout.sh"), f"http://{address}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            if done.returncode == 0:
                printed.append(done.stdout)
            else:
                print(done.stdout, done.stderr, flush=True)
                time.sleep(0.2)

    curls = threading.Thread(target=make_rollouts)
    curls.start()
    try:
        small = ("broker.group_size=2", "broker.batch_size=2", "run.total_batches=1", "learner.steps_per_batch=1")
        settings = (f'generation.openai.http="{address}"', "generation.sampling.max_new_tokens=48")
        trained(tmp_path, "curl", AGENT, "run.seed=0", *small, *settings, "generation.environment.agent_session_s=60")
    finally:
        is_over.set()
        curls.join()
    assert len(printed) >= 4
    assert all("the policy: " in each and "again: " in each and '"turns":2' in each for each in printed)
    batch = SavedBatches(tmp_path / "runs" / "curl" / "batches", keep=100).load(0)
    assert [one.reward for one in batch.rollouts] == [1.0, 1.0]
    for one in batch.rollouts:
        assert [segment.is_sampled for segment in one.rollout.segments] == [False, True, False, True]
        again = CharTokenizer().decode(one.rollout.token_ids.tolist())
        assert "\nWrite the whole program again.\n" in again
