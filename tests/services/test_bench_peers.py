"""`nouscoder bench verifier --peer`: requests to a real service of SandboxFusion's form, and to a server of go-judge's.

A real go-judge is used where the environment variable NOUSCODER_GO_JUDGE names its program.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from nouscoder.bench.http_load import LeanClient
from nouscoder.bench.measuring import BenchError
from nouscoder.bench.peers import Peer, PeerBench, PeerKind, PeerLoad, as_lines, peer_of
from nouscoder.bench.verifier import running_service, submission
from nouscoder.cli import app
from nouscoder.errors import WrongUse


class GoJudgeForm(BaseHTTPRequestHandler):
    """Answers POST /run as go-judge documents it, for programs that add two numbers. `status` is every run's."""

    status = "Accepted"
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        results = []
        for command in request.get("cmd", ()):
            assert (self.path, set(command["copyIn"])) == ("/run", {"main.py"})
            numbers = map(int, command["files"][0]["content"].split())
            files = {"stdout": f"{sum(numbers)}\n", "stderr": ""}
            results.append({"status": self.status, "exitStatus": 0, "files": files})
        body = json.dumps(results).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def go_judge(program: str) -> Iterator[str]:
    """A real go-judge on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    process = subprocess.Popen([program, "-http-addr", address, "-silent"], stdout=subprocess.DEVNULL)
    try:
        host, port = address.split(":")
        end_s = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < end_s:
            try:
                socket.create_connection((host, int(port)), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(60)


def submissions(count: int, num_tests: int) -> list[Mapping[str, Any]]:
    return [submission(number, num_tests) for number in range(count)]


async def test_a_judge_gets_the_load_in_turn_with_ours() -> None:
    program = os.environ.get("NOUSCODER_GO_JUDGE", "")
    if not program:
        print("no NOUSCODER_GO_JUDGE: go-judge's API is served by a test server")
    ours: list[tuple[int, int]] = []

    async def load_ours(count: int, num_tests: int) -> float:
        ours.append((count, num_tests))
        return 2.0

    with go_judge(program) if program else served(GoJudgeForm) as url:
        async with LeanClient(url) as client:
            load = PeerLoad(Peer(PeerKind.GO_JUDGE, url), client, submissions, 4)
            await load.warm_up()
            found = await load.throughput(32, 3, load_ours)
    assert ours == [(2, 3)] * 4
    assert (found.submissions, found.tests_a_submission) == (8, 3)
    assert found.ours_per_second == 8 * 3 / 8.0
    assert found.ours_multiple == pytest.approx(found.ours_per_second / found.tests_per_second)
    text = "\n".join(as_lines(PeerBench("go-judge", url, found, found)))
    assert f"go-judge at {url}" in text
    assert f"{found.tests_per_second:.0f} tests/s; ours in turn 3, {found.ours_multiple:.1f}x" in text


async def test_a_service_with_the_api_of_sandbox_fusion_runs_the_programs() -> None:
    async with running_service(()) as (_, url), LeanClient(url) as client:
        await PeerLoad(Peer(PeerKind.SANDBOX_FUSION, url), client, submissions, 4).warm_up()


async def test_a_peer_that_fails_right_programs_or_is_away_is_one_sentence() -> None:
    class Failing(GoJudgeForm):
        status = "Time Limit Exceeded"

    with served(Failing) as url:
        for kind, where, message in (
            (PeerKind.GO_JUDGE, url, f"^go-judge at {url}: go-judge says Time Limit Exceeded"),
            (PeerKind.SANDBOX_FUSION, url, "not an answer of its kind"),
            (PeerKind.GO_JUDGE, "http://127.0.0.1:9", "cannot be reached"),
        ):
            async with LeanClient(where) as client:
                with pytest.raises(BenchError, match=message):
                    await PeerLoad(Peer(kind, where), client, submissions, 4).warm_up()


def test_a_peer_is_a_kind_and_a_url() -> None:
    assert peer_of("go-judge=http://127.0.0.1:5050/") == Peer(PeerKind.GO_JUDGE, "http://127.0.0.1:5050")
    for words in (["judge0", "http://a:1"], ["go-judge"]):
        done = CliRunner().invoke(app, ["bench", "verifier", "--peer", *words])
        assert done.exit_code != 0
    with pytest.raises(WrongUse, match="the kinds are go-judge, sandboxfusion"):
        peer_of("judge0=http://a:1")
    for url in ("ftp", "http://a", "http://a:99999", "http://a:1/path"):
        with pytest.raises(WrongUse, match="not of the form"):
            peer_of(f"go-judge={url}")
