"""A body that can be read in two ways is refused by every call: a key that is there twice, and a coded body."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.services.test_hostile_values import CASES, SENT, every_protocol

from nouscoder.formats.sent_tests import NotTests, sent_tests
from nouscoder.generation.openai.schema import ApiFault, ChatRequest, parsed_body
from nouscoder.rpc.convert import InvalidMessage
from nouscoder.v1 import verdict_pb2
from nouscoder.verifier.api.servicer import _submission as submission_of_message
from nouscoder.verifier.grading.validation import InvalidSubmission

CALLS = {("POST", path): body for path, body in SENT.items() if not path.startswith("/openenv")} | {
    ("PUT", "/v1/tests"): CASES,
    ("POST", "/openenv/mcp"): {"method": "tools/list", "id": 1},
    ("POST", "/openenv/nouscoder/task"): {"split": "train", "index": 0},
}
del CALLS["POST", "/v1/jobs"]  # it has no folder here; its lines are those of /v1/grade/batch


def with_each_key_twice(value: Any) -> Iterator[tuple[str, str]]:
    """(key, JSON text) for each key of the value, given twice in its object."""
    for key in value if isinstance(value, dict) else ():
        pairs = [f"{json.dumps(one)}:{json.dumps(part)}" for one, part in value.items()]
        yield key, "{" + ",".join([f"{json.dumps(key)}:null", *pairs]) + "}"
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for at, part in parts:
        for key, text in with_each_key_twice(part):
            others = {**value, at: "HERE"} if isinstance(value, dict) else [*value[:at], "HERE", *value[at + 1 :]]
            yield key, json.dumps(others).replace('"HERE"', text)


async def test_a_key_that_is_there_twice_is_named_by_every_call(tmp_path: Path) -> None:
    wrong, asked = [], 0
    async with every_protocol(tmp_path) as (_, http):
        for (method, path), body in CALLS.items():
            for key, text in with_each_key_twice(body):
                asked += 1
                answer = await http.request(method, path, content=text)
                said = answer.json()
                said = said.get("detail") or said.get("error")
                status = {"/v1/grade/batch": 200, "/mcp": 400}.get(path, 422)
                if path == "/mcp":  # an error of JSON-RPC
                    said = said["message"] if said["code"] == -32600 else said
                if answer.status_code != status or said != f"{key}: is given twice in one JSON object":
                    wrong.append((path, key, answer.status_code, answer.text[:200]))
    assert not wrong, wrong
    assert asked > 60


async def test_texts_inside_a_body_are_read_with_the_same_care(tmp_path: Path) -> None:
    twice = '{"inputs": ["1"], "outputs": ["2"], "outputs": ["3"]}'
    listed = '[{"input": {"stdin": ""}, "output": {"stdout": "1", "stdout": "2"}}]'
    config = {"language": "python", "provided_data": {"test": listed}, "dataset_type": "CommonOJDataset"}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/grade", {"code": "x", "tests": twice}),
        ("/get_reward", {"query": ["p```python\nx\n```"], "prompts": ["p"], "labels": [twice]}),
        ("/remote_rm", {"prompt": "p", "response": "x", "label": twice}),
        ("/submit", {"dataset": "d", "id": 1, "completion": "x", "config": config}),
        ("/v1/grade", {"code": "x", "tests": {"inputs": ['{"a": 1, "a": 2}'], "outputs": ["3"], "fn_name": "f"}}),
    ]
    async with every_protocol(tmp_path) as (_, http):
        for path, body in bodies:
            answer = await http.post(path, json=body)
            assert answer.status_code == 422, (path, answer.text)
            assert "is given twice in one JSON object" in answer.text, (path, answer.text)


@pytest.mark.parametrize(
    "text",
    [
        b'{"type": "stdin", "cases": [], "cases": [{"input": "", "output": "1"}]}',
        b'{"type": "stdin", "cases": [{"input": "", "output": "1", "output": "2"}]}',
        b'{"type": "call", "entry_point": "f", "cases": [{"args": [{"a": 1, "a": 2}], "expected": 1}]}',
        b'{"type": "checker", "checker": {"code": "a", "code": "b"}, "cases": [{"input": "", "output": ""}]}',
    ],
)
def test_tests_in_a_file_of_any_size_are_read_with_the_same_care(text: bytes) -> None:
    with pytest.raises(NotTests, match="is given twice in one JSON object"):
        sent_tests(text, 10)


async def test_grpc_reads_json_inside_its_messages_with_the_same_care() -> None:
    call = verdict_pb2.CallCase(args_json='[{"a": 1, "a": 2}]', expected_json="1")
    calls = verdict_pb2.CallTests(entry_point="f", cases=[call])
    twice = b'{"type": "stdin", "cases": [{"input": "", "output": "1", "output": "2"}]}'
    for tests in (verdict_pb2.Tests(json=twice), verdict_pb2.Tests(call=calls)):
        with pytest.raises((InvalidSubmission, InvalidMessage), match="is given twice in one JSON object"):
            await submission_of_message(verdict_pb2.Submission(code="x", tests=tests))


async def test_a_chat_request_is_read_with_the_same_care() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "a", "content": "b"}]}'
    with pytest.raises(ApiFault, match="content: is given twice in one JSON object"):
        await parsed_body(ChatRequest, body)


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "br", "identity, deflate", "x"])
async def test_a_body_with_a_coding_is_refused_by_every_call(tmp_path: Path, coding: str) -> None:
    wrong = []
    async with every_protocol(tmp_path) as (_, http):
        for (method, path), body in CALLS.items():
            plain = json.dumps(body).encode()
            for content in (plain, gzip.compress(plain)):
                answer = await http.request(method, path, content=content, headers={"Content-Encoding": coding})
                if answer.status_code != 415 or "is not undone here: send the body as it is" not in answer.text:
                    wrong.append((path, answer.status_code, answer.text[:200]))
        assert not wrong, wrong
        plain_too = await http.post("/v1/grade", content="{}", headers={"Content-Encoding": "identity"})
        assert plain_too.status_code == 422
        assert (await http.get("/readyz", headers={"Content-Encoding": coding})).status_code == 200
