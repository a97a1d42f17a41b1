"""NeMo Gym's protocol with the real packages: its SimpleAgent, its server code_gen, the task set of verifiers.

make test-trainers runs it. The environment of NeMo Gym needs Python 3.12.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.e2e.test_real_problems import CODE_CONTESTS, LEETCODE, read_code_contests, read_leetcode

from nouscoder.domain.submission import CallTests, StdinTests
from nouscoder.http_server.api_keys import new_api_key

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "trainer_packages"
NUM_GRADINGS = 1000
AT_ONCE = 24  # more than slots and places in the queue
EACH = 20
LIMIT_S = 1500.0
OUTPUT = "OUTPUT "  # before the line that a script prints last
pytestmark = [
    pytest.mark.trainers,
    pytest.mark.timeout(LIMIT_S + 100),
    pytest.mark.skipif(
        bool(os.environ.get("NOUSCODER_WITHOUT_312")),
        reason="no Python 3.12 for NeMo Gym: make test-trainers PYTHON_312=...",
    ),
]


class Script:
    """A script in the environment of a package, which reads the lines. The test fails without the environment."""

    def __init__(self, venv: str, script: str, *arguments: str, lines: list[dict[str, Any]]) -> None:
        python = ROOT / venv / "bin" / "python"
        assert python.exists(), f"{python} is missing: run make test-trainers"
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (no pipe, which would fill while nobody reads)
        given = tempfile.TemporaryFile()  # noqa: SIM115
        given.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        given.seek(0)
        command = [str(python), str(SCRIPTS / script), *arguments]
        self.process = subprocess.Popen(command, stdin=given, stdout=self._said, stderr=self._said)

    def output(self) -> Any:
        """The last line that it printed, as JSON."""
        code = self.process.wait(LIMIT_S)
        self._said.seek(0)
        lines = self._said.read().decode().splitlines()
        assert code == 0, "\n".join(lines[-20:])
        return json.loads(next(line for line in reversed(lines) if line.startswith(OUTPUT)).removeprefix(OUTPUT))


@contextmanager
def serving(folder: Path, *settings: str, token: str = "") -> Iterator[tuple[psutil.Process, str, str]]:
    """`nouscoder serve verifier`, and HOST:PORT of its REST API and of its metrics."""
    command = [sys.executable, "-m", "nouscoder", "serve", "verifier", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    for setting in settings:
        command += ["--set", setting]
    others = {key: value for key, value in os.environ.items() if key != "NOUSCODER_VERIFIER_TOKENS"}
    log_file = folder / "log"
    with log_file.open("wb") as log:
        environment = others | ({"NOUSCODER_VERIFIER_TOKENS": token} if token else {})
        process = psutil.Popen(command, stderr=log, env=environment)
    try:
        end = time.monotonic() + 600
        while '"metrics"' not in log_file.read_text():
            assert process.poll() is None, log_file.read_text()[-2000:]
            assert time.monotonic() < end, log_file.read_text()[-2000:]
            time.sleep(0.05)
        said: dict[str, str] = {}
        for line in log_file.read_text().splitlines():
            said |= json.loads(line) if '"listening"' in line else {}
        yield process, said["http"], said["metrics"]
    finally:
        process.terminate()
        process.wait(120)


def row(answer: str, inputs: list[str], outputs: list[str], name: str | None = None) -> dict[str, Any]:
    tests = {"inputs": inputs, "outputs": outputs, "fn_name": name}
    return {"answer": answer, "verifier_metadata": {"unit_tests": tests}}


def fenced(code: str) -> str:
    return f"The program:\n```python\n{code}\n```\n"


def test_an_agent_of_nemo_gym_gets_rewards_with_a_token_and_keeps_the_token_ids(tmp_path: Path) -> None:
    """`GET /verify` of the service was a 404. Of the token ids nothing may be lost: NeMo RL trains on them."""
    secret, line = new_api_key("trainer")
    right, wrong = fenced("print(sum(map(int, input().split())))"), fenced("print(4)")
    rows = [row(right, ["1 2\n"], ["3\n"]), row(wrong, ["1 2\n"], ["3\n"]), row(right, ["1 2\n"], [])]
    with serving(tmp_path, token=line) as (_, address, _):
        host, port = address.split(":")
        agents = [
            Script(".venv-nemo-gym", "nemo_gym_agent.py", name, port, "4", lines=rows)
            for name in (f"any:{secret}@{host}", host)
        ]
        allowed, refused = (agent.output() for agent in agents)
    assert allowed["answers"] == [[200, 1.0], [200, 0.0], [500, None]], "a faulty row is no sample"
    assert {"prompt_token_ids", "generation_token_ids", "generation_log_probs"} <= set(allowed["kept"])
    assert allowed["statistics"]["key_metrics"]["mean/reward"] == 0.5
    assert refused["answers"] == [[500, None]] * 3


def test_a_task_of_verifiers_gets_rewards_and_an_error_without_a_verdict(tmp_path: Path) -> None:
    right, wrong = fenced("print(sum(map(int, input().split())))"), fenced("print(4)")
    rows = [row(right, ["1 2\n"], ["3\n"]), row(wrong, ["1 2\n"], ["3\n"]), row(right, ["1 2\n"], [])]
    with serving(tmp_path) as (_, address, _):
        found = Script(".venv-trainers", "nemo_gym_taskset.py", f"http://{address}", "4", lines=rows).output()
    assert [reward for reward, _ in found["answers"]] == [1.0, 0.0, None]
    assert "422" in found["answers"][2][1]
    assert found["metrics"] | {"unit_tests_time_taken": 0.0} == {
        "unit_tests_time_taken": 0.0,
        "reasoning_format_violation_rate": 0.0,
        "tests_passed": 1.0,
        "tests_total": 1.0,
    }


# The rewards under faults.


@dataclass(slots=True)
class Faults:
    """Kills three sandboxes, then a gateway process, and so on: one after each EACH gradings. `done` counts them."""

    service: psutil.Process
    metrics: str
    done: Counter[str] = field(default_factory=Counter)
    seen: float = 0.0

    def next(self) -> None:
        """Kill one process, unless too little was graded since, or an earlier one has not been replaced yet."""
        text = httpx.get(f"http://{self.metrics}/metrics", timeout=60).text
        graded = sum(float(one) for one in re.findall(r"^nouscoder_verifier_submissions_total{.*} (\S+)$", text, re.M))
        is_whole = re.search(r"^nouscoder_verifier_processes 2(\.0)?$", text, re.M)
        if not is_whole or abs(graded - self.seen) < EACH:  # a killed process takes its counts along
            return
        self.seen = graded
        gateways = [one for one in self.service.children(recursive=True) if _is_gateway(one)]
        kind = "sandboxes" if self.done["sandboxes"] <= 3 * self.done["gateways"] else "gateways"
        try:
            found = gateways if kind == "gateways" else [child for one in gateways for child in one.children()]
            if found:
                found[sum(self.done.values()) % len(found)].send_signal(signal.SIGKILL)
                self.done[kind] += 1
        except psutil.NoSuchProcess:
            return


def _is_gateway(process: psutil.Process) -> bool:
    try:
        return "nouscoder.verifier.processes.share" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def programs() -> list[dict[str, Any]]:
    """Right programs at even places, wrong ones at odd places. None is sent twice."""
    found = []
    for number in range(NUM_GRADINGS):
        code = f"print(int(input()) + {number + number % 2})"
        found.append(row(fenced(code), ["1\n", "20\n"], [f"{1 + number}\n", f"{20 + number}\n"]))
    return found


@pytest.mark.parametrize("client", ["agent", "taskset"])
def test_no_reward_is_false_while_gateways_and_sandboxes_are_killed_and_the_queue_is_full(
    client: str, tmp_path: Path
) -> None:
    """1,000 gradings over two processes with two slots and a queue of four, which never has room for all."""
    settings = ("processes=2", "sandbox.slots=2", "max_queue=4", "cache_entries=0")
    with serving(tmp_path, *(f"verifier.{one}" for one in settings)) as (service, address, metrics):
        if client == "agent":
            where = (".venv-nemo-gym", "nemo_gym_agent.py", *address.split(":"))
        else:
            where = (".venv-trainers", "nemo_gym_taskset.py", f"http://{address}")
        begun = time.monotonic()
        script, faults = Script(*where, str(AT_ONCE), lines=programs()), Faults(service, metrics)
        while script.process.poll() is None:
            faults.next()
            time.sleep(0.2)
        answers = script.output()["answers"]
    rewards = [answer[1 if client == "agent" else 0] for answer in answers]
    right, wrong = Counter(rewards[::2]), Counter(rewards[1::2])
    print(f"{client}: right programs {dict(right)}, wrong {dict(wrong)}, killed {dict(faults.done)},"
          f" {time.monotonic() - begun:.0f} s")  # fmt: skip
    assert len(rewards) == NUM_GRADINGS
    assert right[0.0] == 0, "a false zero"
    assert wrong[1.0] == 0, "a false one"
    assert right[1.0] + wrong[0.0] > NUM_GRADINGS // 2
    assert faults.done["gateways"] >= 2
    assert faults.done["sandboxes"] >= 6


# The rewards beside those of code_gen.


def real_answers() -> list[dict[str, Any]]:
    """Two answers to each of 200 problems: the reference, and a model's prose with blocks or a damaged reference.

    Then one to each of 40 problems of CodeContests, which have no references: a program that has learnt the outputs,
    and every second time has one wrong.
    """
    with gzip.open(LEETCODE, "rt") as file:
        rows = [json.loads(line) for line in file]
    found: list[list[dict[str, Any]]] = [[], []]
    for record, item in zip(rows, read_leetcode(LEETCODE), strict=True):
        tests = item.problem.tests
        assert isinstance(tests, CallTests)
        inputs = ["\n".join(map(json.dumps, [*case.args, *case.kwargs.values()])) for case in tests.cases]
        outputs = [json.dumps(case.expected) for case in tests.cases]
        old, new = ("<", "<=") if "<" in item.program else ("+ 1", "+ 2")
        damaged = item.program.replace(old, new, 1)
        second = record["response"] if len(found[0]) % 2 else fenced(damaged)
        for kind, answer in zip(found, (fenced(item.program), second), strict=True):
            kind.append(row(answer, inputs, outputs, tests.entry_point))
    for number, problem in enumerate(read_code_contests(CODE_CONTESTS)[:40]):
        assert isinstance(problem.tests, StdinTests)
        pairs = {case.input: case.output for case in problem.tests.cases}
        learnt = dict(pairs) | ({max(pairs): "wrong"} if number % 2 else {})
        code = f"import sys\nKNOWN = {learnt!r}\nprint(KNOWN[sys.stdin.read()])"
        found[1].append(row(fenced(code), list(pairs), list(pairs.values())))
    return [one for kind in found for one in kind]


# It looks for the expected output in the frames of its callers, as a model can learn to do.
PEEKING = """import sys
frame = sys._getframe()
while frame and 'gt_out' not in frame.f_locals:
    frame = frame.f_back
print(frame.f_locals['gt_out'] if frame else 'nothing')"""


def verify_body(one: dict[str, Any]) -> dict[str, Any]:
    parts = [{"type": "output_text", "text": one["answer"], "annotations": []}]
    message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": parts}
    response = {
        "id": "r", "created_at": 0.0, "model": "m", "object": "response", "output": [message],
        "parallel_tool_calls": False, "tool_choice": "auto", "tools": [],
    }  # fmt: skip
    return {**one, "responses_create_params": {"input": "Write a program."}, "response": response}


def test_real_problems_get_the_rewards_of_nemo_gyms_own_server(tmp_path: Path) -> None:
    """There a program runs beside the expected outputs, as a user of the host; here in a sandbox that has neither."""
    answers = [*real_answers(), row(fenced(PEEKING), ["1 2\n"], ["3\n"])]
    bodies = [verify_body(one) for one in answers]
    with serving(tmp_path, "verifier.cache_entries=0") as (_, address, _):
        where = (".venv-nemo-gym", "nemo_gym_code_gen.py", f"http://{address}", "8", "200")
        found = Script(*where, lines=bodies).output()
    ours, theirs = found["ours"], found["theirs"]
    print(f"{len(bodies)} answers to 240 problems; the first 200 one after the other:"
          f" {ours['alone_s']:.1f} s, code_gen {theirs['alone_s']:.1f} s; all, 8 together:"
          f" {ours['together_s']:.1f} s, code_gen {theirs['together_s']:.1f} s")  # fmt: skip
    *both, peeking = zip(ours["answers"], theirs["answers"], strict=True)
    assert [one[0] for one in peeking] == [0.0, 1.0], "code_gen pays a program that reads the expected output"
    print(f"pairs of rewards: {Counter((mine[0], its[0]) for mine, its in both)}")
    assert [(at, mine, its) for at, (mine, its) in enumerate(both) if mine[0] != its[0]] == []
    assert {mine[0] for mine, _ in both} == {0.0, 1.0}
