"""`nouscoder serve verifier` as a process: tokens reloaded on SIGHUP, audit log, TLS and health port."""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nouscoder.client import Client
from nouscoder.http_server.api_keys import new_api_key

BODY = {"code": "print(3)", "tests": {"type": "stdin", "cases": [{"input": "", "output": "3"}]}}
LONG = "print(end='x' * 7_000_000)"


def until(condition: Callable[[], bool], what: str, limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


class Service:
    """The process and its log."""

    def __init__(self, folder: Path, *settings: str, options: tuple[str, ...] = ()) -> None:
        self.folder = folder
        addresses = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0")
        command = [sys.executable, "-m", "nouscoder", "serve", "verifier", *addresses, *options]
        for setting in ("verifier.sandbox.slots=1", 'verifier.health="127.0.0.1:0"', *settings):
            command += ["--set", setting]
        environment = {key: value for key, value in os.environ.items() if key != "NOUSCODER_VERIFIER_TOKENS"}
        self._log = (folder / "log").open("wb")
        self.process = subprocess.Popen(command, stderr=self._log, env=environment)

    def logged(self) -> list[dict[str, Any]]:
        """Every complete line of the log."""
        return [json.loads(line) for line in (self.folder / "log").read_text().splitlines() if line.endswith("}")]

    def address(self, name: str) -> str:
        """The address of http, health or grpc."""
        until(lambda: self.process.poll() is not None or any(name in line for line in self.logged()), f"{name} listens")
        return str(next(line[name] for line in self.logged() if name in line))

    def stop(self) -> int:
        """Send SIGTERM. Returns the exit code."""
        self.process.terminate()
        try:
            return self.process.wait(60)
        finally:
            self._log.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[Service, dict[str, str]]]:
    """A service with a token, an audit log and TLS."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing: install it to make the certificate of this test")
    certificate = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-x509", "-days", "2")
    names = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", "key.pem", "-out", "cert.pem")
    subprocess.run(
        ["openssl", "req", *certificate, *names, *files], cwd=tmp_path, check=True, capture_output=True, timeout=30
    )
    secrets = {}
    secrets["ann"], line = new_api_key("ann")
    (tmp_path / "tokens").write_text(line + "\n")
    running = Service(
        tmp_path,
        f'verifier.tokens_file="{tmp_path}/tokens"',
        f'verifier.audit_log="{tmp_path}/audit.jsonl"',
        f'verifier.tls.certificate="{tmp_path}/cert.pem"',
        f'verifier.tls.key="{tmp_path}/key.pem"',
    )
    yield running, secrets
    if running.process.poll() is None:
        running.stop()


def test_a_service_with_tokens_audit_log_and_tls(service: tuple[Service, dict[str, str]], tmp_path: Path) -> None:
    running, secrets = service
    url = f"https://{running.address('http')}"
    health = f"http://{running.address('health')}"
    trust = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    running.address("grpc")
    assert httpx.get(f"{health}/readyz").json() == {"status": "ready"}
    assert httpx.post(f"{url}/v1/grade", json=BODY, verify=trust).status_code == 401
    with Client(url, token=secrets["ann"], tls=trust) as client:
        assert client.grade_record(BODY)["verdict"] == "accepted"
    headers = {"Authorization": f"Bearer {secrets['ann']}", "X-Request-Id": "mine"}
    run = httpx.post(f"{url}/run_code", json={"code": LONG, "language": "python"}, headers=headers, verify=trust)
    assert run.json()["status"] == "Success"
    assert run.json()["run_result"]["stdout"] == "x" * 7_000_000  # in many pieces

    # A second client is added, the first one is removed, and the audit log is moved away.
    secret, line = new_api_key("bob")
    (tmp_path / "tokens").write_text(line + "\n")
    (tmp_path / "audit.jsonl").rename(tmp_path / "audit.old")
    running.process.send_signal(signal.SIGHUP)
    until(lambda: (tmp_path / "audit.jsonl").exists(), "the audit log is begun anew")
    assert httpx.post(f"{url}/v1/grade", json=BODY, headers=headers, verify=trust).status_code == 401
    with Client(url, token=secret, tls=trust) as client:
        assert [client.grade_record(BODY)["cached"] for _ in range(2)] == [False, True]  # a cache each
    assert running.stop() == 0
    assert [line for line in running.logged() if line["level"] not in ("info", "warning")] == []

    def audited(name: str) -> list[tuple[str, str, str]]:
        lines = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        return [(line["client"], line["language"], line["verdict"]) for line in lines]

    assert audited("audit.old") == [("ann", "python", "accepted"), ("ann", "python", "Success")]
    assert audited("audit.jsonl") == 2 * [("bob", "python", "accepted")]
    assert '"mine"' in (tmp_path / "audit.old").read_text()
    assert "print(3)" not in (tmp_path / "audit.old").read_text()
    for secret_text in (secrets["ann"], secret):
        assert secret_text not in (tmp_path / "log").read_text()


@pytest.mark.heavy
def test_after_sigterm_the_leases_go_back_first_and_the_apis_take_calls_for_a_while(tmp_path: Path) -> None:
    """A Service sends calls until it knows that the pod leaves. No broker answers here, so the leases run out."""
    settings = ('verifier.sandbox.backend="fake"', "verifier.leave_s=5", 'broker.grpc="127.0.0.1:1"')
    running = Service(tmp_path, *settings, options=("--broker",))
    url = f"http://{running.address('http')}"
    until(lambda: any(line["event"] == "serving" for line in running.logged()), "it serves")
    running.process.terminate()
    until(lambda: any("leases not released" in line["event"] for line in running.logged()), "the leases go back")
    assert not any(line["event"] == "draining" for line in running.logged())
    assert httpx.post(f"{url}/v1/grade", json=BODY).status_code == 200
    assert running.stop() == 0
    assert any(line["event"] == "draining" for line in running.logged())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ('verifier.tokens_file="none"', "none cannot be read: No such file or directory"),
        ('verifier.audit_log="no/where"', "no/where cannot be written"),
        ('verifier.tls={certificate="none.pem",key="none.pem"}', "none.pem: No such file or directory"),
    ],
)
def test_an_unusable_configuration_is_one_sentence_and_exit_78(tmp_path: Path, setting: str, message: str) -> None:
    running = Service(tmp_path, setting, 'verifier.sandbox.backend="fake"')
    code = running.process.wait(60)
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert last.startswith("nouscoder: ")
    assert message in last
    from nouscoder.errors import ExitCode

    assert code == ExitCode.UNUSABLE
