"""Bodies that are invalid JSON, invalid requests, too large, or invalid HTTP: each is refused with one sentence, and
the service keeps grading.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any, Protocol

import httpx
import pytest

GRADE, STREAM, BATCH, RUN_CODE = "/v1/grade", "/v1/grade/stream", "/v1/grade/batch", "/run_code"
ONE_BODY = (GRADE, STREAM, RUN_CODE)
LARGE = 100 * 1000 * 1000
ANSWER_S = 20.0
DEEP = 100_000


class Verifier(Protocol):
    """See conftest.py."""

    http: str

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response: ...

    def refuses(self, path: str, body: Any, status: int, field: str | None = None) -> str: ...


def grade_body(**fields: Any) -> dict[str, Any]:
    """A request that is graded."""
    case = {"input": "1", "output": "1"}
    return {"code": "print(input())", "tests": {"type": "stdin", "cases": [case]}, **fields}


def call_body(**case: Any) -> dict[str, Any]:
    """A request with one call test."""
    tests = {"type": "call", "entry_point": "f", "cases": [{"args": [1], "expected": 1, **case}]}
    return {"code": "def f(x): return x", "tests": tests}


NOT_JSON: dict[str, bytes] = {
    "empty": b"",
    "blank": b" \r\n\t",
    "NUL": b"\0",
    "NUL in a string": b'{"code": "a\0b"}',
    "bad UTF-8": b'{"code": "\xff\xfe"}',
    "overlong UTF-8": b'{"code": "\xc0\x80"}',
    "UTF-16": json.dumps(grade_body()).encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf" + json.dumps(grade_body()).encode(),
    "encoded surrogate": b'{"code": "\xed\xa0\x80"}',
    "deep arrays": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * (DEEP // 4) + b"1" + b"}" * (DEEP // 4),
    "deep arguments": json.dumps(call_body(args=["DEEP"])).replace('"DEEP"', "[" * DEEP + "]" * DEEP).encode(),
    "cut off": b'{"code": "pri',
    "two documents": b"{} {}",
    "single quotes": b"{'code': 'x'}",
    "comment": b"/* */ {}",
    "trailing comma": b'{"code": "x",}',
    "form": b"code=print(1)&language=python",
    "compressed": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03",
}


@pytest.mark.parametrize("name", NOT_JSON)
def test_invalid_json_is_422_body(verifier: Verifier, name: str) -> None:
    for path in ONE_BODY:
        verifier.refuses(path, NOT_JSON[name], 422, "body")


@pytest.mark.parametrize("path", ONE_BODY)
def test_json_other_than_an_object_is_422_body(verifier: Verifier, path: str) -> None:
    for body in (b"[]", b"1", b"null", b"true", b'"text"', b"NaN", b"[{}]"):
        verifier.refuses(path, body, 422, "body")


# unusual bodies that are accepted


def test_nul_is_an_ordinary_character_in_free_texts(verifier: Verifier) -> None:
    echo = "import sys\nsys.stdout.write(sys.stdin.read())"
    tests = {"type": "stdin", "cases": [{"input": "a\0b\0", "output": "a\0b\0"}]}
    exact = grade_body(code=echo, tests=tests, comparator={"type": "exact"})
    assert verifier.post(GRADE, exact).json()["verdict"] == "accepted"
    assert verifier.post(GRADE, grade_body(code="print(1)\0")).json()["verdict"] == "compile_error"
    assert verifier.post(GRADE, call_body(args=["\0"], expected="\0")).json()["verdict"] == "accepted"
    assert verifier.post(GRADE, {**grade_body(), "code": None, "completion": "\0"}).json()["verdict"] == "no_code"


def test_of_two_equal_keys_none_counts_in_a_body_and_in_a_line(verifier: Verifier) -> None:
    body = json.dumps(grade_body()).encode()[:-1] + b', "code": "print(2)", "code": "print(1)"}'
    refused = verifier.post(GRADE, body)
    assert refused.status_code == 422
    assert refused.json()["detail"] == "code: is given twice in one JSON object"
    assert "code: is given twice" in verifier.post(BATCH, body).text


@pytest.mark.parametrize("kind", ["text/plain", "application/xml", "application/x-www-form-urlencoded", "nonsense", ""])
def test_the_content_type_is_ignored(verifier: Verifier, kind: str) -> None:
    answer = verifier.post(GRADE, grade_body(), **{"Content-Type": kind})
    assert (answer.status_code, answer.json()["verdict"]) == (200, "accepted")


def test_limits_that_are_too_small_are_the_candidates_failure(verifier: Verifier) -> None:
    found = {}
    for limit, value in (
        ("wall_time_s", 1e-9),
        ("wall_time_s", 5e-324),
        ("cpu_time_s", 1e-9),
        ("memory_bytes", 1),
        ("memory_bytes", 100_000),
        ("output_bytes", 1),
        ("processes", 1),
    ):
        body = grade_body(limits={limit: value}, code="print(input() * 9)")
        found[limit, value] = verifier.post(GRADE, body).json()["verdict"]
    assert found == {
        ("wall_time_s", 1e-9): "time_limit_exceeded",
        ("wall_time_s", 5e-324): "time_limit_exceeded",
        ("cpu_time_s", 1e-9): "time_limit_exceeded",
        ("memory_bytes", 1): "memory_limit_exceeded",
        ("memory_bytes", 100_000): "memory_limit_exceeded",
        ("output_bytes", 1): "output_limit_exceeded",
        ("processes", 1): "wrong_answer",
    }


# batches


def test_every_line_of_a_batch_has_its_own_answer(verifier: Verifier) -> None:
    good = json.dumps({"id": "good", **grade_body()}).encode()
    bad = [body for name, body in NOT_JSON.items() if body.strip() and b"\n" not in body and name != "byte order mark"]
    deep_id = b'{"id": ' + b"[" * 900 + b"]" * 900 + b"," + json.dumps(grade_body()).encode()[1:]
    odd_id = b'{"id": NaN,' + json.dumps(grade_body()).encode()[1:]
    long_id = json.dumps({"id": "i" * 100_000, **grade_body()}).encode()
    lines = [good, *bad, deep_id, odd_id, long_id, b"[]", b"1", good]
    answer = verifier.post(BATCH, b"\n".join(lines))
    assert answer.status_code == 200
    answers = [json.loads(line, parse_constant=pytest.fail) for line in answer.text.splitlines()]
    assert len(answers) == len(lines)
    assert [line["verdict"] for line in answers if line["id"] == "good"] == ["accepted"] * 2
    faults = {line["id"]: line for line in answers if line["id"] != "good"}
    assert sorted(faults) == list(range(1, len(lines) - 1))
    for number, fault in faults.items():
        wanted = "id" if lines[number] in (deep_id, odd_id, long_id) else "body"
        assert fault["field"] == wanted, (lines[number][:80], fault)
        assert fault["error"].startswith(f"{wanted}: ")
        assert len(fault["error"]) < 500


def test_an_id_is_returned_unchanged(verifier: Verifier) -> None:
    for id_ in ("x", "", 0, -1, 10**30, 1.5, None, "\ud800", "\0", "é", True):
        answer = json.loads(verifier.post(BATCH, {"id": id_, **grade_body()}).text)
        assert (answer["id"], answer["verdict"]) == (id_, "accepted")


# too large


def chunks() -> Iterator[bytes]:
    """100 MB in pieces."""
    for _ in range(100):
        yield b"x" * (LARGE // 100)


@pytest.mark.parametrize("path", [*ONE_BODY, BATCH])
def test_100_mb_are_413_with_content_length_and_in_chunks(verifier: Verifier, path: str) -> None:
    verifier.refuses(path, b"x" * LARGE, 413, "body")
    verifier.refuses(path, chunks(), 413, "body")


def test_a_body_with_a_too_large_content_length_is_refused_before_it_is_sent(verifier: Verifier) -> None:
    host, _, port = verifier.http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=ANSWER_S) as connection:
        connection.sendall(b"POST /v1/grade HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000000\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/grade HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/grade HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/grade HTTP/1.1\r\nHost: x\r\nContent-Length: \xb2\r\n\r\n",
        b"POST /v1/grade HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"POST /v1/grade HTTP/1.1\r\nHost: x\r\n" + b"A: " + b"x" * 200_000,
        b"\0" * 1000 + b"\r\n\r\n",
    ],
    ids=["negative", "twice", "superscript", "chunk", "long header", "noise"],
)
def test_invalid_http_is_400(verifier: Verifier, head: bytes) -> None:
    host, _, port = verifier.http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=ANSWER_S) as connection:
        connection.sendall(head)
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")


def test_a_client_that_disconnects_during_its_body_causes_no_error(verifier: Verifier) -> None:
    host, _, port = verifier.http.rpartition(":")
    for path in (*ONE_BODY, BATCH):
        with socket.create_connection((host, int(port)), timeout=ANSWER_S) as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n".encode() + b"{")
    assert verifier.post("/v1/grade", grade_body()).json()["verdict"] == "accepted"
