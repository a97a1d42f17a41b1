"""A verifier process with the real sandbox, and checks of its state after any input.

With NOUSCODER_FUZZ_SECONDS (see `make fuzz`) the fuzzers share that time, use new inputs in each run and keep their
corpus in `.fuzz/`. Without it each has a few seconds and always the same inputs.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

ANSWER_S = 20.0
STALL_S = 0.25
MORE_BYTES = (256 + 128) << 20  # verifier.max_bodies_bytes, and what parsed requests take in addition
KEPT = Path(__file__).resolve().parents[2] / ".fuzz"
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds for one target, for the REST API by its document, and for mutated requests of every kind.

    With `thorough`, each run has new inputs and keeps its corpus.
    """

    target_s: int
    rest_s: int
    live_s: int
    thorough: bool
    kept: Path = KEPT


@pytest.fixture(scope="session")
def budget(request: pytest.FixtureRequest) -> Budget:
    """Three equal parts: all targets, the REST API by its document, mutated requests."""
    given = os.environ.get("NOUSCODER_FUZZ_SECONDS")
    if given is None:
        return Budget(1, 120, 3, False)
    num_targets = sum("fuzz_target" in getattr(item, "fixturenames", ()) for item in request.session.items)
    part_s = max(1, int(given) // 3)
    return Budget(max(1, part_s // max(1, num_targets)), part_s, part_s, True)


class VerifierProcess:
    """`nouscoder serve verifier` with the local backend, small limits and no token."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        command = [sys.executable, "-m", "nouscoder", "serve", "verifier"]
        command += ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
        jobs = f"verifier.jobs.folder={folder / 'jobs'}"
        tools = "verifier.tools.sessions=1"
        for setting in ("verifier.sandbox.slots=2", "verifier.max_submission_s=20.0", tools, jobs):
            command += ["--set", setting]
        environment = {key: value for key, value in os.environ.items() if key != "NOUSCODER_VERIFIER_TOKENS"}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, env=environment)
        self._checked = 0
        self.http = self._address("http")
        self.grpc = self._address("grpc")
        self.url = f"http://{self.http}"
        self._client = httpx.Client(base_url=self.url, timeout=ANSWER_S)

    def _lines(self) -> list[str]:
        return self._log.read_text("utf8").splitlines()

    def _address(self, name: str, limit_s: float = 60) -> str:
        end = time.monotonic() + limit_s
        while time.monotonic() < end and self.process.poll() is None:
            for line in self._lines():
                if line.endswith("}") and name in json.loads(line):
                    return str(json.loads(line)[name])
            time.sleep(0.05)
        pytest.fail(f"the verifier does not listen:\n{self._log.read_text()[-2000:]}")

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Send one request with a time limit. A body other than bytes or an iterator is sent as JSON."""
        content = body if isinstance(body, bytes | Iterator) else json.dumps(body).encode()
        return self._client.post(path, content=content, headers=headers)

    def refuses(self, path: str, body: Any, status: int, field: str | None = None) -> str:
        """Check that the answer has this status and one short sentence with the field. Returns the invalid field."""
        answer = self.post(path, body)
        assert answer.status_code == status, answer.text[:500]
        fault = answer.json()
        assert set(fault) == {"detail", "field"}
        assert field in (None, fault["field"]), fault
        assert fault["detail"].startswith(f"{fault['field']}: ")
        assert "\n" not in fault["detail"]
        assert 3 < len(fault["detail"]) < 500
        return str(fault["field"])

    def check_health(self) -> None:
        """Check that a canary submission is accepted and that the service has logged no error."""
        body = {
            "code": f"print(int(input()) + 1)  # {next(_numbers)}",
            "tests": {"type": "stdin", "cases": [{"input": "41", "output": "42"}]},
        }
        answer = self.post("/v1/grade", body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["verdict"] == "accepted", answer.text
        lines = self._lines()
        new, self._checked = lines[self._checked :], len(lines)
        bad = [line for line in new if not _is_harmless(line)]
        assert not bad, "\n".join(bad)[:4000]

    def stop(self) -> int:
        """Send SIGTERM. Returns the exit code."""
        self._client.close()
        self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(60)


def _is_harmless(line: str) -> bool:
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError:
        return False
    return record["level"] in ("info", "warning") and "exception" not in record


@pytest.fixture(scope="session")
def running_verifier(tmp_path_factory: pytest.TempPathFactory, budget: Budget) -> Iterator[VerifierProcess]:
    """The running process. With `thorough`, its health is watched, and a stall or much memory is a failure."""
    process = VerifierProcess(tmp_path_factory.mktemp("fuzzed"))
    watching = HealthWatch(process) if budget.thorough else None
    yield process
    found = watching.end() if watching else None
    assert process.stop() == 0
    if found:
        check_watched(found)


class HealthWatch:
    """health_watch.py beside the process."""

    def __init__(self, verifier: VerifierProcess) -> None:
        command = [sys.executable, str(Path(__file__).with_name("health_watch.py"))]
        arguments = [verifier.http, str(verifier.process.pid)]
        self._process = subprocess.Popen([*command, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def end(self) -> dict[str, float]:
        """Stop it. Returns what it measured."""
        said, _ = self._process.communicate(timeout=120)
        found: dict[str, float] = json.loads(said)
        return found


def check_watched(found: dict[str, float]) -> None:
    """Print the measurements and check them."""
    mib = {name: int(found[f"memory_{name}"]) >> 20 for name in ("first", "most", "last")}
    ms = {
        name: round(1000 * found[f"{name}_s"]) for name in ("service_most", "service_waited", "control_most", "excess")
    }
    print(
        f"\n/healthz: {found['num_requests']:.0f} requests, {found['num_failed']:.0f} failed, at most"
        f" {ms['service_most']} ms (the service waited for a CPU for up to {ms['service_waited']} ms), a bare server at"
        f" most {ms['control_most']} ms, excess at most {ms['excess']} ms (load {os.getloadavg()[0]:.1f});"
        f" memory of the gateway {mib} MiB"
    )
    assert found["num_failed"] == 0
    assert found["excess_s"] <= STALL_S
    assert found["memory_most"] <= found["memory_first"] + MORE_BYTES


@pytest.fixture
def verifier(running_verifier: VerifierProcess) -> Iterator[VerifierProcess]:
    """The process, whose health is checked after the test."""
    yield running_verifier
    running_verifier.check_health()
