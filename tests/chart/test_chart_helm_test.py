"""The script of `helm test` detects faults. It runs against a small fake of the services."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "helm" / "nouscoder" / "files" / "helm-test.py"
SERVICES = ("verifier", "broker", "generation", "learner")


class Installed:
    """The answers of the fake, which tests change."""

    def __init__(self) -> None:
        self.verdicts = {"sum(": "accepted", "print(3)": "wrong_answer", "while": "time_limit_exceeded"}
        self.ledger = {"admitted": 30, "queued": 4, "trained": 16, "filtered": 10}
        self.metrics = {
            "verifier": 'nouscoder_verifier_submissions_total{verdict="accepted"} 1\nnouscoder_verifier_sandboxes 2\n',
            "broker": "nouscoder_broker_policy_version 3\nnouscoder_broker_ledger_balanced 1\n",
            "generation": "nouscoder_generation_tokens_total 5\nnouscoder_generation_policy_version 3\n",
            "learner": 'nouscoder_learner_steps_total 0.0\nnouscoder_learner_wait_seconds_total{for="batch"} 1e-05\n',
        }
        self.address = ""

    def page(self, path: str) -> str:
        service = path.split("/")[1]
        ledger = {**self.ledger}
        lines = [f"nouscoder_broker_admitted_rollouts_total {float(ledger.pop('admitted', 0))}\n"]
        lines += [f'nouscoder_broker_ledger_rollouts{{state="{k}"}} {float(v)}\n' for k, v in ledger.items()]
        return "# HELP x y\n" + self.metrics[service] + ("".join(lines) if service == "broker" else "")

    def grade(self, body: dict[str, Any]) -> dict[str, Any]:
        verdict = next((name for part, name in self.verdicts.items() if part in body["code"]), "runtime_error")
        return {"verdict": verdict, "duration_s": 0.1, "backend": "gvisor"}

    def run(self, services: tuple[str, ...] = SERVICES, limit_s: float = 0.3) -> tuple[int, str]:
        """(exit code, output of the script)."""
        done = subprocess.run(
            [sys.executable, "-I", str(SCRIPT)],
            env={
                "PATH": os.environ["PATH"],
                "TEST_GRADING_URL": self.address,
                "TEST_METRICS": " ".join(f"{name}={self.address}/{name}/metrics" for name in services),
                "TEST_TIMEOUT_S": str(limit_s),
            },
            capture_output=True,
            text=True,
            timeout=30,
        )
        return done.returncode, done.stdout


@pytest.fixture
def installed() -> Iterator[Installed]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(known.page(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(json.dumps(known.grade(body)))

        def _send(self, text: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    known = Installed()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    known.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield known
    server.shutdown()
    server.server_close()
    thread.join(5)


def test_it_passes_for_a_working_release(installed: Installed) -> None:
    code, output = installed.run()
    assert code == 0, output
    assert "30 admitted = 4 queued + 16 trained + 10 filtered" in output
    assert output.count("ok: ") == 8


def test_it_checks_no_ledger_of_a_verifier_alone(installed: Installed) -> None:
    code, output = installed.run(("verifier",))
    assert code == 0, output
    assert "ledger" not in output


@pytest.mark.parametrize(("part", "verdict"), [("sum(", "wrong_answer"), ("while", "internal_error")])
def test_it_fails_on_a_wrong_verdict(installed: Installed, part: str, verdict: str) -> None:
    installed.verdicts[part] = verdict
    code, output = installed.run()
    assert code == 1
    assert f"got {verdict}, not" in output


def test_it_fails_on_an_unbalanced_ledger(installed: Installed) -> None:
    installed.ledger["trained"] += 1
    code, output = installed.run()
    assert code == 1
    assert "does not balance" in output


@pytest.mark.parametrize("service", SERVICES)
def test_it_fails_when_a_metric_is_missing(installed: Installed, service: str) -> None:
    installed.metrics[service] = "other 1\n"
    code, output = installed.run()
    assert code == 1
    assert f"/{service}/metrics has no nouscoder_" in output


def test_it_fails_when_nothing_was_admitted(installed: Installed) -> None:
    installed.ledger = {"admitted": 0, "queued": 0}
    code, output = installed.run()
    assert code == 1
    assert "admitted no rollout" in output


def test_it_fails_when_no_service_answers(installed: Installed) -> None:
    installed.address = "http://127.0.0.1:9"
    code, output = installed.run()
    assert code == 1
    assert "does not answer" in output
