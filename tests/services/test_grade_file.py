"""`nouscoder grade FILE`: the order is kept, every line has one answer, an invalid line is refused before grading."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from nouscoder.cli.grade_file import BadFile, grade_file
from nouscoder.client import Client, GradingFailed
from nouscoder.client.http import Patience
from nouscoder.config import Config, load_config


@pytest.fixture
def config() -> Config:
    """The configuration of the fake sandbox, in which every program prints its input."""
    return load_config(None, ["verifier.sandbox.backend=fake"])


def line(given: str, wanted: str, **fields: object) -> str:
    """The line of one submission."""
    tests = {"type": "stdin", "cases": [{"input": given, "output": wanted}]}
    return json.dumps({"code": "pass", "tests": tests, **fields})


def write(path: Path, *lines: str) -> Path:
    """Write a file with these lines."""
    path.write_text("\n".join(lines) + "\n", encoding="utf8")
    return path


def test_verdicts_are_in_order_with_the_id_or_the_number_of_the_line(tmp_path: Path, config: Config) -> None:
    lines = [line("a", "a", id=f"n{n}") if n % 2 else line("a", "b") for n in range(30)]
    out = tmp_path / "out.jsonl"
    assert grade_file(write(tmp_path / "in.jsonl", *lines), config, out) == 0
    answers = [json.loads(text) for text in out.read_text().splitlines()]
    assert [one["id"] for one in answers] == [f"n{n}" if n % 2 else n + 1 for n in range(30)]
    assert [one["verdict"] for one in answers] == ["accepted" if n % 2 else "wrong_answer" for n in range(30)]
    assert [one["reward"] for one in answers] == [1.0 if n % 2 else -1.0 for n in range(30)]


def test_without_an_output_file_the_answers_go_to_stdout(
    tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    assert grade_file(write(tmp_path / "in.jsonl", line("a", "a"), "", line("b", "b")), config) == 0
    assert [json.loads(text)["id"] for text in capsys.readouterr().out.splitlines()] == [1, 3]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "not one JSON object a line"),
        ("[1]", "not one JSON object a line"),
        ("[" * 100_000, "not one JSON object a line"),
        (line("a", "a", colour="red"), "colour: unknown field"),
        (line("a", "a", completion="x"), "give exactly one of code and completion"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_graded(tmp_path: Path, config: Config, bad: str, message: str) -> None:
    path, out = write(tmp_path / "in.jsonl", line("a", "a"), bad), tmp_path / "out.jsonl"
    with pytest.raises(BadFile, match=message) as fault:
        grade_file(path, config, out)
    assert str(fault.value).startswith(f"{path}:2: ")
    assert not out.exists()


def test_a_missing_file_or_one_without_submissions_is_a_fault(tmp_path: Path, config: Config) -> None:
    with pytest.raises(BadFile, match="holds no submission"):
        grade_file(write(tmp_path / "in.jsonl", ""), config)
    with pytest.raises(BadFile, match="cannot be read"):
        grade_file(tmp_path / "absent", config)


class Scripted(BaseHTTPRequestHandler):
    """Gives the scripted answers in turn, then repeats the last one."""

    script: list[tuple[int, dict[str, object]]] = []  # noqa: RUF012
    seen = 0

    def do_POST(self) -> None:
        """Answer one request."""
        self.rfile.read(int(self.headers["content-length"]))
        status, record = self.script[min(type(self).seen, len(self.script) - 1)]
        type(self).seen += 1
        body = json.dumps(record).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 429:
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def server(*script: tuple[int, dict[str, object]]) -> Iterator[tuple[str, type[Scripted]]]:
    """A grading service with scripted answers."""
    handler = type("Handler", (Scripted,), {"script": list(script), "seen": 0})
    http = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}", handler
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


GOOD: dict[str, object] = {"verdict": "accepted"}
OURS: dict[str, object] = {"verdict": "internal_error"}


def test_a_busy_or_draining_server_is_retried(tmp_path: Path, config: Config) -> None:
    with server((429, {"detail": "full"}), (503, {"detail": "draining"}), (200, GOOD)) as (url, handler):
        assert grade_file(write(tmp_path / "in.jsonl", line("a", "a")), config, tmp_path / "out", url) == 0
        assert handler.seen == 3


@pytest.mark.parametrize("answer", [(200, OURS), (422, {"detail": "limits.wall_time_s: too long"})])
def test_the_exit_code_is_1_when_any_submission_got_no_verdict(
    tmp_path: Path, config: Config, answer: tuple[int, dict[str, object]]
) -> None:
    path = write(tmp_path / "in.jsonl", line("a", "a"))
    with server(answer) as (url, _):
        assert grade_file(path, config, tmp_path / "out", url) == 1
    record = json.loads((tmp_path / "out").read_text())
    assert record.get("verdict") == "internal_error" or "limits.wall_time_s" in record["error"]


def test_the_sync_client_retries_an_internal_error_a_bounded_number_of_times() -> None:
    with server((200, OURS), (200, GOOD)) as (url, handler), Client(url) as client:
        assert client.grade(code="pass") == GOOD
        assert handler.seen == 2
    with server((200, OURS)) as (url, handler), Client(url) as client:
        assert client.grade(code="pass") == OURS
        assert handler.seen == 3


def test_the_sync_client_retries_no_bad_request_and_an_unreachable_server_for_a_limited_time() -> None:
    with server((422, {"detail": "code: missing"})) as (url, handler), Client(url) as client:
        with pytest.raises(GradingFailed, match="code: missing"):
            client.grade(code="pass")
        assert handler.seen == 1
    with Client("http://127.0.0.1:1", Patience(unreachable_s=0.1)) as client, pytest.raises(GradingFailed) as failure:
        client.grade(code="pass")
    assert failure.value.status == 0
