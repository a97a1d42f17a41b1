"""Runs of the real loop, controlled from outside by processes, signals and files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# The smallest complete loop. Its policy is untrained, so zero-variance groups are kept.
TINY = (
    "demo.train_problems=60",
    "demo.held_out_problems=6",
    "demo.warm_start_share=0.002",
    "demo.warm_start_threads=1",
    "evaluation.samples=1",
    "run.total_batches=4",
    "broker.group_size=4",
    "broker.batch_size=16",
    "broker.drop_zero_variance=false",
    "broker.lease_s=2.0",
    "broker.batch_lease_s=3.0",
    "generation.max_running=32",
    "generation.sampling.max_new_tokens=24",
    "learner.steps_per_batch=2",
)


class LoopRun:
    """One `nouscoder demo` in a folder of the test. `overrides` are settings."""

    def __init__(self, root: Path, name: str, overrides: tuple[str, ...]) -> None:
        self.root = root
        self.name = name
        self.folder = root / name
        self.output = root / f"{name}.out"
        self._overrides = (f'run.root="{root}"', *overrides)
        self.environment: dict[str, str] = {}  # extends that of the tests
        self.arguments: tuple[str, ...] = ()  # of the command, besides settings
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, resume: bool = False) -> None:
        """Start or resume the run."""
        command = [sys.executable, "-m", "nouscoder", "demo", "--name", self.name, *self.arguments]
        for override in self._overrides:
            command += ["--set", override]
        with self.output.open("ab") as output:
            arguments = [*command, *(["--resume"] if resume else [])]
            environment = {**os.environ, **self.environment}
            self.process = subprocess.Popen(arguments, stdout=output, stderr=output, env=environment)

    def wait(self, limit_s: float = 180) -> int:
        """Wait for the end. Returns the exit code."""
        assert self.process is not None
        return self.process.wait(limit_s)

    def until(self, condition: Callable[[], bool], what: str, limit_s: float = 200) -> None:
        """Wait for a condition. Fails with the output when the run ends first, or after `limit_s`."""
        assert self.process is not None
        end = time.monotonic() + limit_s
        while not condition():
            code = self.process.poll()
            if code is not None:
                pytest.fail(f"the run exited with {code} before {what}:\n{self.text()[-3000:]}")
            if time.monotonic() > end:
                pytest.fail(f"{what} did not happen within {limit_s} s:\n{self.text()[-3000:]}")
            time.sleep(0.05)

    def text(self) -> str:
        """All output of the run."""
        return self.output.read_text(encoding="utf8", errors="replace")

    def pids(self, marker: str = "") -> dict[int, str]:
        """The running processes of this run whose command line contains `marker`."""
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if str(self.folder) in command and marker in command and state != "Z":
                found[int(entry.name)] = command
        return found

    def pid(self, service: str) -> int:
        """The pid of a service. Waits until it runs."""
        found: dict[int, str] = {}

        def look() -> bool:  # one listing, because a second one could miss a process that restarts in between
            found.update(self.pids(f"serve {service} "))
            return bool(found)

        self.until(look, f"{service} runs")
        return min(found)

    def steps(self) -> list[dict[str, Any]]:
        """The current lines of metrics.jsonl."""
        file = self.folder / "metrics.jsonl"
        if not file.exists():
            return []
        lines = file.read_text(encoding="utf8").split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def summary(self) -> dict[str, Any]:
        """The contents of summary.json."""
        value: dict[str, Any] = json.loads((self.folder / "summary.json").read_text(encoding="utf8"))
        return value

    def broker(self) -> str:
        """The address of the broker."""
        import tomllib

        return str(tomllib.loads((self.folder / "config.toml").read_text())["broker"]["grpc"])

    def status(self) -> dict[str, Any]:
        """The output of the command `nouscoder status --json`."""
        command = [sys.executable, "-m", "nouscoder", "status", "--json", "--broker", self.broker()]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        value: dict[str, Any] = json.loads(answer.stdout)
        return value

    def kill_tree(self) -> None:
        """SIGKILL to every process of the run, the supervisor first so that it restarts nothing."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def wait_until_gone(self, limit_s: float = 60) -> None:
        """Wait until no process of the run is left."""
        end = time.monotonic() + limit_s
        while self.pids():
            assert time.monotonic() < end, f"still running: {self.pids()}"
            time.sleep(0.05)


@pytest.fixture
def loop_run(tmp_path: Path) -> Iterator[Callable[..., LoopRun]]:
    """Makes runs, tiny ones unless other `defaults` are given. Kills all of them after the test."""
    runs: list[LoopRun] = []

    def make(*overrides: str, name: str = "run", defaults: tuple[str, ...] = TINY) -> LoopRun:
        runs.append(LoopRun(tmp_path, name, (*defaults, *overrides)))
        return runs[-1]

    yield make
    for run in runs:
        if run.process is not None and run.process.poll() is None:
            run.kill_tree()


PROBLEM = {
    "problem_id": "sum",
    "prompt": "Read two integers and print their sum.",
    "tests": {"type": "stdin", "cases": [{"input": "100 200\n", "output": "300\n"}]},
    "public_tests": {"type": "stdin", "cases": [{"input": "1 2\n", "output": "3\n"}]},
}


@pytest.fixture(scope="session")
def grading_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the REST API of `nouscoder serve verifier` on a free port, with the real sandbox and no token."""
    folder = tmp_path_factory.mktemp("verifier")
    problems = folder / "problems.jsonl"
    problems.write_text(json.dumps(PROBLEM) + "\n")
    with serving(folder, f"verifier.jobs.folder={folder / 'jobs'}", f"verifier.problems={problems}") as url:
        yield url


@pytest.fixture
def small_queue_url(tmp_path: Path) -> Iterator[str]:
    """The same with two slots and a queue of two."""
    with serving(tmp_path, "verifier.max_queue=2", "verifier.sandbox.slots=2") as url:
        yield url


@contextmanager
def serving(folder: Path, *settings: str) -> Iterator[str]:
    """The URL of a REST API with these settings."""
    log_file = folder / "log"
    command = [sys.executable, "-m", "nouscoder", "serve", "verifier", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    for setting in settings:
        command += ["--set", setting]
    environment = {key: value for key, value in os.environ.items() if key != "NOUSCODER_VERIFIER_TOKENS"}
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, stderr=log, env=environment)
    try:
        yield f"http://{_http_address(process, log_file)}"
    finally:
        process.terminate()
        process.wait(60)


def _http_address(process: subprocess.Popen[bytes], log_file: Path, limit_s: float = 60) -> str:
    end = time.monotonic() + limit_s
    while time.monotonic() < end and process.poll() is None:
        lines = [json.loads(line) for line in log_file.read_text().splitlines() if line.endswith("}")]
        for line in lines:
            if "http" in line:
                return str(line["http"])
        time.sleep(0.05)
    pytest.fail(f"the verifier does not listen:\n{log_file.read_text()[-2000:]}")
