"""`nouscoder grade FILE`: order kept, every line answered once, a bad line does not stop the others."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from nouscoder.client import AsyncClient, Client, GradingFailed, Patience, Unreachable
from nouscoder.client.retries import Attempts
from nouscoder.config import Config, load_config
from nouscoder.data.json_records import UnreadableFile
from nouscoder.data.problem_index import open_index_of
from nouscoder.data.problems import save_problems
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import CallCase, CallTests, StdinCase, StdinTests
from nouscoder.errors import WrongUse
from nouscoder.grade_files.answers import _require_service
from nouscoder.grade_files.grade_file import FileRequest, NothingToGrade
from nouscoder.grade_files.grade_file import grade_file as grade
from nouscoder.grade_files.output import OutputFault
from nouscoder.grade_files.summary import GradeSummary


@pytest.fixture
def config() -> Config:
    """The configuration of the fake sandbox, in which every program prints its input."""
    return load_config(None, ["verifier.sandbox.backend=fake"])


def grade_file(path: Path, config: Config, out: Path | None = None, server: str | None = None) -> int:
    """The exit code of grading one file."""
    return grade(FileRequest(path, out, server=server), config)[1]


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


def lines_of(out: Path) -> list[dict[str, object]]:
    """The lines of an output."""
    return [json.loads(text) for text in out.read_text().splitlines()]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "a list of programs"),
        ("[" * 100_000, "not JSON"),
        (line("a", "a", colour="red"), "colour: unknown field"),
        (line("a", "a", completion="x"), "give exactly one of code and completion"),
        ('{"code": "pass"}', "tests is missing; for a file of samples give --problems FILE"),
    ],
)
def test_a_bad_line_is_named_and_the_others_are_graded(tmp_path: Path, config: Config, bad: str, message: str) -> None:
    path, out = write(tmp_path / "in.jsonl", line("a", "a"), bad, line("b", "b")), tmp_path / "out.jsonl"
    summary, code = grade(FileRequest(path, out), config)
    assert code == 1
    assert [one.get("verdict") for one in lines_of(out)] == ["accepted", None, "accepted"]
    assert message in str(lines_of(out)[1]["error"])
    (told,) = summary.bad_lines
    assert told.startswith("line 2: ")
    assert message in told
    assert grade(FileRequest(path, out, skip_bad=True), config)[1] == 0


def test_a_file_without_submissions_or_no_file_is_a_fault(tmp_path: Path, config: Config) -> None:
    with pytest.raises(NothingToGrade, match="holds no submission"):
        grade_file(write(tmp_path / "in.jsonl", ""), config)
    with pytest.raises(UnreadableFile, match="cannot be read"):
        grade_file(tmp_path / "absent", config)


def test_the_input_is_never_overwritten(tmp_path: Path, config: Config) -> None:
    path = write(tmp_path / "in.jsonl", line("a", "a"))
    (tmp_path / "link").symlink_to(path)
    before = path.read_bytes()
    for out in (path, tmp_path / "link"):
        with pytest.raises(OutputFault, match="is the input itself"):
            grade_file(path, config, out)
    assert path.read_bytes() == before


def test_compressed_files_and_standard_input_are_read(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = (line("a", "a") + "\n" + line("b", "c") + "\n").encode()
    out = tmp_path / "out.jsonl"
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(data))
    grade_file(tmp_path / "in.jsonl.gz", config, out)
    unpacked = [(one["id"], one["verdict"]) for one in lines_of(out)]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))
    grade_file(Path("-"), config, out)
    assert [(one["id"], one["verdict"]) for one in lines_of(out)] == unpacked
    assert unpacked == [(1, "accepted"), (2, "wrong_answer")]


def problems_file(path: Path, *answers: str) -> Path:
    """Problem pN wants that the program, which prints its input, prints answer N."""
    problems = [
        Problem(f"p{number}", "Echo.", StdinTests((StdinCase("right", answer),)))
        for number, answer in enumerate(answers)
    ]
    save_problems(path, problems)
    return path


FENCED = "Here:\n```python\nprint(1)\n```\n"
SAMPLE_FILES = {
    "completions": "\n".join(json.dumps({"task_id": f"p{n % 2}", "completion": FENCED}) for n in range(6)),
    "EvalPlus": "\n".join(json.dumps({"task_id": f"p{n % 2}", "solution": "print(1)"}) for n in range(6)),
    "LiveCodeBench": json.dumps(
        [{"question_id": f"p{n}", "code_list": ["print(1)"] * 3, "output_list": ["?"] * 3} for n in range(2)], indent=4
    ),
    "bigcode": json.dumps([["print(1)"] * 3] * 2),
}


@pytest.mark.parametrize("kind", SAMPLE_FILES)
def test_sample_files_of_the_public_tools_are_read_as_they_are(tmp_path: Path, config: Config, kind: str) -> None:
    """Of two problems with three samples each, every sample of p0 is right and none of p1."""
    problems = problems_file(tmp_path / "problems.jsonl", "right", "other")
    out = tmp_path / "out.jsonl"
    summary, code = grade(FileRequest(write(tmp_path / "samples", SAMPLE_FILES[kind]), out, problems), config)
    assert code == 0
    assert summary.by_problem == {"p0": [3, 3], "p1": [3, 0]}
    assert summary.pass_at_k == {1: 0.5, 2: 0.5}
    assert {one["task_id"] for one in lines_of(out)} == {"p0", "p1"}


BODY = "    return 2 * x\n"


@pytest.mark.parametrize(
    ("completion", "verdict"),
    [
        (BODY, "accepted"),
        ("\n" + BODY + "\n\nprint('more')\n", "accepted"),
        ("    return x\n", "wrong_answer"),
        ("    retrun x\n", "compile_error"),
        (f"```python\ndef double(x):\n{BODY}```", "accepted"),
        (f"  So:\n```python\ndef double(x):\n{BODY}```", "accepted"),
        (f"def double(x):\n{BODY}", "accepted"),
        (f"\nimport math\ndef double(x):\n{BODY}", "accepted"),
        (f"@str\ndef g(): ...\ndef double(x):\n{BODY}", "accepted"),
        ("    # as in ```double(3)```\n    return 2 * x  # ```", "accepted"),
        ("    '''\n    ```\n    double(3)\n    ```\n    '''\n    return 2 * x", "accepted"),
        ("definitely two times x", "no_code"),
        ("return 2 * x", "no_code"),
        ("It is two times x.", "no_code"),
    ],
)
def test_a_completion_may_be_the_body_of_the_function_in_the_prompt(
    tmp_path: Path, completion: str, verdict: str
) -> None:
    """HumanEval's sample files have bodies. An answer in words is no program, whatever the prompt is."""
    prompt = 'def double(x: int) -> int:\n    """Return two times x."""\n'
    tests = CallTests("double", (CallCase((3,), {}, 6),))
    save_problems(
        tmp_path / "problems.jsonl", [Problem("HumanEval/0", prompt, tests), Problem("words", "Do it.", tests)]
    )
    lines = [{"task_id": name, "completion": completion} for name in ("HumanEval/0", "words")]
    file = write(tmp_path / "samples.jsonl", "\n".join(map(json.dumps, lines)))
    grade(FileRequest(file, tmp_path / "out.jsonl", tmp_path / "problems.jsonl"), load_config(None, []))
    found = [one["verdict"] for one in lines_of(tmp_path / "out.jsonl")]
    is_answer = "```python" in completion or verdict == "no_code"
    assert (found[0], found[1] == verdict) == (verdict, is_answer)


def test_a_sample_of_no_known_problem_or_without_text_is_a_bad_line(tmp_path: Path, config: Config) -> None:
    problems = problems_file(tmp_path / "problems.jsonl", "right")
    path = write(
        tmp_path / "samples.jsonl",
        '{"task_id": "p7", "completion": "x"}',
        '{"task_id": "p0"}',
        '{"completion": "x"}',
        '{"task_id": "p0", "code_list": [1]}',
    )
    summary, code = grade(FileRequest(path, tmp_path / "out", problems), config)
    assert code == 1
    assert [told.partition(": ")[2] for told in summary.bad_lines] == [
        "--problems has no problem 'p7'",
        "it has none of solution, code, code_list, completion, output_list",
        "none of task_id, question_id, problem_id names the problem",
        "code_list is not text",
    ]


def test_pass_at_k_is_the_unbiased_estimate_over_problems() -> None:
    summary = GradeSummary()
    for problem, right in (("a", 1), ("b", 4)):
        for sample in range(4):
            summary.add(sample, problem, {"verdict": "accepted" if sample < right else "wrong_answer"})
    summary.add(9, "b", {"verdict": "internal_error"})
    # Of 4 samples with 1 right: pass@2 = 1 - C(3, 2) / C(4, 2) = 1/2.
    assert summary.pass_at_k == {1: (0.25 + 1) / 2, 2: (0.5 + 1) / 2, 4: 1.0}
    assert summary.record()["without_verdict"] == 1
    assert "pass@2" in summary.text()


def test_each_verdict_and_the_summary_say_the_language(tmp_path: Path, config: Config) -> None:
    answer = "```cpp\nint main() {}\n```"
    path = write(
        tmp_path / "in.jsonl",
        line("a", "a"),
        line("a", "a", language="Python3"),
        line("a", "a", code=None, completion=answer, language="python", other_languages=["cpp"]),
        json.dumps({"code": "1", "tests": {"type": "math", "cases": [{"answer": "1"}]}}),
    )
    summary, _ = grade(FileRequest(path, tmp_path / "out"), config)
    assert [one.get("language") for one in lines_of(tmp_path / "out")] == ["python", "python", "cpp", None]
    assert "; graded as python 2, cpp 1" in summary.text()
    assert summary.record()["languages"] == {"python": 2, "cpp": 1}


def test_a_resumed_grading_keeps_verdicts_and_repeats_failures(tmp_path: Path, config: Config) -> None:
    lines = [line("a", "a" if n % 3 else "b") for n in range(12)]
    path, whole, out = write(tmp_path / "in.jsonl", *lines), tmp_path / "whole", tmp_path / "out"
    expected, _ = grade(FileRequest(path, whole), config)
    kept = whole.read_text().splitlines(keepends=True)
    marked = [text.replace('"graded": 1', '"graded": 1, "kept": true') for text in kept[:5]]
    for rest in (
        "",
        kept[5][:20],
        '{"id": 6, "error": "no answer"}\n' + kept[6],
        '{"id": 6, "verdict": "internal_error"}\n',
    ):
        out.write_text("".join(marked) + rest)
        summary, code = grade(FileRequest(path, out, resume=True), config)
        found = lines_of(out)
        assert code == 0
        assert [one["id"] for one in found] == list(range(1, 13))
        assert [one.get("kept", False) for one in found] == [True] * 5 + [False] * 7
        assert summary.record() == expected.record()


def test_an_output_of_another_input_is_not_resumed(tmp_path: Path, config: Config) -> None:
    path, out = write(tmp_path / "in.jsonl", line("a", "a", id="x")), tmp_path / "out"
    out.write_text('{"id": "y", "verdict": "accepted"}\n')
    with pytest.raises(OutputFault, match="has id 'y' where the input has 'x'"):
        grade(FileRequest(path, out, resume=True), config)
    assert "y" in out.read_text()
    whole = '{"id": 1, "verdict": "accepted"}\n'
    others = (
        "my notes\n",
        "my notes",
        '{"note": 1}\n',
        '{"id": 1, "note": 1}\n',
        '{"id": 1, "completion": "a"}',
        "[1]",
    )
    for notes in (*others, *(whole + one for one in others), '{"id": 1, "error": "no answer"}\nmy notes\n'):
        out.write_text(notes)
        with pytest.raises(OutputFault, match=r"holds lines that are no verdicts|is no output of this input"):
            grade(FileRequest(path, out, resume=True), config)
        assert out.read_text() == notes
    with pytest.raises(WrongUse, match="--resume needs --out"):
        grade(FileRequest(path, resume=True), config)


def test_each_verdict_is_on_the_disk_before_the_next_line_is_read(tmp_path: Path, config: Config) -> None:
    """The input is a pipe whose second line is written only after the first verdict was seen."""
    out = tmp_path / "out"
    given, written = os.pipe()
    seen: list[int] = []

    def feed() -> None:
        with os.fdopen(written, "w") as file:
            for number in (1, 2):
                file.write(line("a", "a") + "\n")
                file.flush()
                while not out.exists() or out.read_text().count("\n") < number:
                    threading.Event().wait(0.01)
                seen.append(number)

    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()
    assert grade_file(Path(f"/dev/fd/{given}"), config, out) == 0  # as <(command) names it
    feeder.join(60)
    os.close(given)
    assert seen == [1, 2]


def test_a_reader_that_goes_away_ends_the_command_quietly(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", *[line("a", "a")] * 400)
    command = f"{sys.executable} -m nouscoder grade {path} --set verifier.sandbox.backend=fake | head -n 1"
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert json.loads(answer.stdout)["verdict"] == "accepted"
    assert "Traceback" not in answer.stderr
    assert "Error" not in answer.stderr


class Scripted(BaseHTTPRequestHandler):
    """Gives the scripted answers in turn, then repeats the last one."""

    script: list[tuple[int, dict[str, object]]] = []  # noqa: RUF012
    seen = 0
    request: dict[str, object] = {}  # noqa: RUF012
    authorization = ""

    def do_POST(self) -> None:
        """Answer one request."""
        type(self).request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        type(self).authorization = self.headers.get("authorization", "")
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
        assert handler.seen == 4  # before them it is asked whether something grades there


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((404, {"detail": "Not Found"}), "is no grading service: HTTP 404: Not Found"),
        ((405, {"detail": "Method Not Allowed"}), "is no grading service: HTTP 405"),
        ((401, {"detail": "the API key is not valid"}), "HTTP 401: the API key is not valid"),
    ],
)
def test_a_wrong_server_is_one_sentence_before_any_line_is_sent(
    tmp_path: Path, config: Config, answer: tuple[int, dict[str, object]], says: str
) -> None:
    """Each line got the same error, after a wait of its own."""
    lines = write(tmp_path / "in.jsonl", line("a", "a"), line("b", "b"))
    with server(answer) as (url, handler), pytest.raises(GradingFailed, match=says):
        grade_file(lines, config, tmp_path / "out", url)
    assert handler.seen == 1
    assert not (tmp_path / "out").exists()


def test_a_refusal_leaves_no_index_of_the_problems_and_an_earlier_one_stays(tmp_path: Path, config: Config) -> None:
    problems = problems_file(tmp_path / "problems.jsonl", "right")
    path, empty = write(tmp_path / "in.jsonl", json.dumps({"task_id": "p0", "solution": ""})), tmp_path / "empty"
    empty.write_text("")
    before = sorted(tmp_path.iterdir())
    with server((404, {"detail": "Not Found"})) as (url, _), pytest.raises(GradingFailed):
        grade(FileRequest(path, tmp_path / "out", problems, server=url), config)
    with pytest.raises(NothingToGrade):
        grade(FileRequest(empty, tmp_path / "out", problems), config)
    assert sorted(tmp_path.iterdir()) == before
    open_index_of(problems).close()
    with pytest.raises(NothingToGrade):
        grade(FileRequest(empty, tmp_path / "out", problems), config)
    assert (tmp_path / "problems.jsonl.index").is_dir()


async def test_an_absent_server_is_named_with_what_to_do() -> None:
    async with AsyncClient("http://127.0.0.1:1", Patience(unreachable_s=0.0)) as client:
        with pytest.raises(Unreachable, match=r"http://127.0.0.1:1: .*; start it with nouscoder serve verifier, or"):
            await _require_service(client, "http://127.0.0.1:1")


def test_a_client_says_why_it_waits_and_for_how_long(caplog: pytest.LogCaptureFixture) -> None:
    """15 s of silence looked like a program that hangs."""
    attempts = Attempts(Patience(unreachable_s=15.0))
    for _ in range(6):
        attempts.next_delay_s(httpx.ConnectError("refused"))
    (said,) = (record.getMessage() for record in caplog.records)  # one in 5 s
    assert said.startswith("the grading service does not answer: ConnectError: refused; it is tried for 1")


def test_the_summary_says_why_lines_have_no_verdict() -> None:
    summary = GradeSummary()
    for number in range(3):
        summary.add(number, "", {"id": "a", "error": "the queue is full"})
    assert "without verdict: the queue is full (3)" in summary.text()


@pytest.mark.parametrize("answer", [(200, OURS), (422, {"detail": "limits.wall_time_s: too long"})])
def test_the_exit_code_is_1_when_any_submission_got_no_verdict(
    tmp_path: Path, config: Config, answer: tuple[int, dict[str, object]]
) -> None:
    path = write(tmp_path / "in.jsonl", line("a", "a"))
    with server(answer) as (url, _):
        assert grade_file(path, config, tmp_path / "out", url) == 1
    (record,) = lines_of(tmp_path / "out")
    assert record.get("verdict") == "internal_error" or "limits.wall_time_s" in str(record["error"])


def test_samples_are_sent_to_a_server_with_the_tests_of_their_problem_and_the_token(
    tmp_path: Path, config: Config
) -> None:
    problems = problems_file(tmp_path / "problems.jsonl", "right")
    path = write(tmp_path / "in.jsonl", json.dumps({"task_id": "p0", "solution": "print(1)"}))
    with server((200, GOOD)) as (url, handler):
        summary, code = grade(FileRequest(path, tmp_path / "out", problems, server=url, token="secret"), config)
    assert code == 0
    assert summary.pass_at_k == {1: 1.0}
    assert handler.authorization == "Bearer secret"
    assert handler.request["code"] == "print(1)"
    assert handler.request["tests"] == {"type": "stdin", "cases": [{"input": "right", "output": "right"}]}


def test_the_sync_client_retries_an_internal_error_a_bounded_number_of_times() -> None:
    with server((200, OURS), (200, GOOD)) as (url, handler), Client(url) as client:
        assert dict(client.grade_record({"code": "pass"})) == GOOD
        assert handler.seen == 2
    with server((200, OURS)) as (url, handler), Client(url) as client:
        assert dict(client.grade_record({"code": "pass"})) == OURS
        assert handler.seen == 3


def test_the_sync_client_retries_no_bad_request_and_an_unreachable_server_for_a_limited_time() -> None:
    with server((422, {"detail": "code: missing"})) as (url, handler), Client(url) as client:
        with pytest.raises(GradingFailed, match="code: missing"):
            client.grade_record({"code": "pass"})
        assert handler.seen == 1
    with Client("http://127.0.0.1:1", Patience(unreachable_s=0.1)) as client, pytest.raises(GradingFailed) as failure:
        client.grade_record({"code": "pass"})
    assert failure.value.status == 0
