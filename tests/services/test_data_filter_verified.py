"""Filters that run programs: what they keep, and that a verdict is asked for once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from nouscoder.data.filters.run import Selection, read_recipe, select
from nouscoder.data.filters.step import CannotFilter
from nouscoder.data.json_records import BadRecord
from nouscoder.data.problem_parquet import read_parquet
from nouscoder.errors import Unusable
from nouscoder.grade_files.answers import GradingTarget

SUM = "print(sum(map(int, input().split())))"
DIFFERENCE = "a, b = map(int, input().split())\nprint(a - b)"


def problem(name: str, references: list[Any], cases: tuple[str, ...] = ("1 2", "5 5")) -> dict[str, Any]:
    tests = [{"input": case, "output": str(sum(map(int, case.split())))} for case in cases]
    given = {"problem_id": name, "prompt": f"Sum {name}.", "tests": {"type": "stdin", "cases": tests}}
    return given | {"references": references}


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def chosen(folder: Path, rows: list[dict[str, Any]], steps: str, grading: GradingTarget | None = None) -> Selection:
    lines(folder / "problems.jsonl", rows)
    (folder / "r.toml").write_text(f'name = "r"\ninputs = ["problems.jsonl"]\nsteps = [{steps}]')
    return select(read_recipe(folder / "r.toml"), folder / "out.parquet", grading=grading)


def left(folder: Path) -> list[str]:
    return [item.problem.problem_id for item in read_parquet(folder / "out.parquet")]


class Service(ThreadingHTTPServer):
    """A grading service that accepts the code `right` and has no verdict for codes in `failing`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.failing: set[str] = set()

    @property
    def grading(self) -> GradingTarget:
        return GradingTarget(server=f"http://127.0.0.1:{self.server_port}")


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        code = request["code"]
        self.server.asked.append(code)
        if code in self.server.failing:
            self.send_response(500)
        elif request["language"] == "klingon":
            self.send_response(422)
        else:
            self.send_response(200)
        body = json.dumps({"verdict": "accepted" if code.startswith("right") else "wrong_answer"}).encode()
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_references_are_run_by_the_verifier_of_this_machine(tmp_path: Path) -> None:
    rows = [problem("right", [SUM]), problem("wrong", [DIFFERENCE]), problem("none", [])]
    selection = chosen(tmp_path, rows, '{filter = "references_pass", without = "drop"}')
    assert left(tmp_path) == ["right"]
    assert selection.steps[0].dropped == {"references fail": 1, "no reference solution": 1}
    assert selection.steps[0].table == {"accepted": 1, "wrong_answer": 1}


def test_a_problem_whose_tests_accept_a_wrong_solution_is_dropped(tmp_path: Path) -> None:
    rows = [problem("weak", [], ("3 0",)), problem("strong", [], ("3 0", "3 1"))]
    lines(tmp_path / "wrong.jsonl", [{"problem_id": name, "code": DIFFERENCE} for name in ("weak", "strong", "other")])
    selection = chosen(tmp_path, rows, '{filter = "wrong_solutions_fail", file = "wrong.jsonl"}')
    assert left(tmp_path) == ["strong"]
    assert selection.steps[0].dropped == {"wrong solutions pass": 1}


def test_the_share_of_the_references_that_must_pass(tmp_path: Path, service: Service) -> None:
    rows = [problem("half", ["right 1", "bad"]), problem("third", ["right", "bad", "worse"])]
    rows.append(problem("refused", [{"code": "right", "language": "klingon"}]))
    chosen(tmp_path, rows, '{filter = "references_pass", most = 0, share = 0.5}', service.grading)
    assert left(tmp_path) == ["half"]


def test_a_failure_of_the_service_drops_no_problem_and_a_second_run_asks_only_for_the_rest(
    tmp_path: Path, service: Service
) -> None:
    rows = [problem(f"p{at}", [f"right {at}"]) for at in range(12)]
    service.failing = {"right 3", "right 7"}
    with pytest.raises(CannotFilter, match="2 programs got no verdict"):
        chosen(tmp_path, rows, '{filter = "references_pass"}', service.grading)
    assert not (tmp_path / "out.parquet").exists()
    asked, service.failing = sorted(service.asked), set()
    service.asked.clear()
    chosen(tmp_path, rows, '{filter = "references_pass"}', service.grading)
    assert asked == sorted(f"right {at}" for at in range(12))
    assert sorted(service.asked) == ["right 3", "right 7"]
    assert len(left(tmp_path)) == 12


def test_a_torn_verdict_is_asked_for_again_and_a_damaged_one_gets_one_clear_sentence(
    tmp_path: Path, service: Service
) -> None:
    rows = [problem("a", ["right a"]), problem("b", ["right b"])]
    chosen(tmp_path, rows, '{filter = "references_pass"}', service.grading)
    log = tmp_path / "out.parquet.evidence" / "references_pass.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole[:-3])
    (tmp_path / "out.parquet").unlink()
    service.asked.clear()
    chosen(tmp_path, rows, '{filter = "references_pass"}', service.grading)
    assert len(service.asked) == 1
    assert log.read_bytes() == whole
    (tmp_path / "out.parquet").unlink()
    first, second = whole.splitlines(keepends=True)
    for damaged in (b"\x00\x00\n", b'["a"]\n', b'{"key": "a"}\n'):
        log.write_bytes(first + damaged + second)
        with pytest.raises(Unusable, match=r"references_pass\.jsonl, line 2 is not a record with key, verdict"):
            chosen(tmp_path, rows, '{filter = "references_pass"}', service.grading)


def test_a_wrong_line_of_wrong_solutions_is_named(tmp_path: Path, service: Service) -> None:
    lines(tmp_path / "wrong.jsonl", [{"problem_id": "a", "cod": "x"}])
    with pytest.raises(BadRecord, match=r"wrong.jsonl, record 1: code: Field required"):
        chosen(tmp_path, [problem("a", [])], '{filter = "wrong_solutions_fail", file = "wrong.jsonl"}', service.grading)
