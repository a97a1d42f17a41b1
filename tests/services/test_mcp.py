"""The Model Context Protocol on the grading service, written by hand: JSON in, JSON out.

tests/e2e/test_mcp_clients.py has the real clients.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from nouscoder.http_server.api_keys import ApiKeys
from nouscoder.http_server.memory_budget import MemoryBudget
from nouscoder.store.tests_cache import TestsCache
from nouscoder.verifier.access.quotas import Quotas
from nouscoder.verifier.api.compat.mcp import VERSION, add_mcp
from nouscoder.verifier.api.compat.problem_set import NO_PROBLEMS, open_problem_set
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.api.run_code import CodeRunner
from nouscoder.verifier.grading.grader import Grader, QueueFull
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.base import Exit, RunResult, SandboxError
from nouscoder.verifier.sandbox.fake import FakeSandbox, ended

MAX_BODY = 1_000_000
SECRET = "only-the-hidden-tests-know-this"
OLD = "2025-11-25"
PROBLEMS = [
    {
        "problem_id": f"echo-{number}",
        "prompt": "Print the input." * (1 if number else 10_000),
        "tests": {"type": "stdin", "cases": [{"input": SECRET, "output": SECRET}]},
        **({"public_tests": {"type": "stdin", "cases": [{"input": "shown", "output": "shown"}]}} if number else {}),
    }
    for number in range(25)
]


def _lost(_: bytes) -> RunResult:
    raise SandboxError("the machine is gone")


PROGRAMS = {
    "print('much')": lambda _: ended(b"x" * 100_000, stderr=b"e"),
    "print('late')": lambda _: ended(exit=Exit.TIME_LIMIT),
    "print('no')": lambda _: ended(b"no"),
    "print('lost')": _lost,
}


class Mcp:
    """Posts messages of one generation."""

    def __init__(self, client: httpx.AsyncClient, version: str) -> None:
        self.client = client
        self.version = version

    async def post(self, message: dict[str, Any], **headers: str) -> httpx.Response:
        """The answer to a message, with the headers of the generation."""
        params = dict(message.get("params", {}))
        wanted = {"mcp-protocol-version": self.version}
        if self.version == VERSION:
            names = ("protocolVersion", "clientCapabilities")
            about = dict(zip((f"io.modelcontextprotocol/{name}" for name in names), (VERSION, {}), strict=True))
            params["_meta"] = about
            wanted |= {"mcp-method": message["method"]} | ({"mcp-name": params["name"]} if "name" in params else {})
        body = {"jsonrpc": "2.0", "id": 7, **message, "params": params}
        return await self.client.post("/mcp", json=body, headers=wanted | headers)

    async def result(self, method: str, **params: Any) -> Any:
        """The result of a request that is answered."""
        answer = await self.post({"method": method, "params": params})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/json"
        record = answer.json()
        assert (record["jsonrpc"], record["id"]) == ("2.0", 7)
        return record["result"]

    async def called(self, name: str, **arguments: Any) -> Any:
        """What a tool answers; of a failed call its message."""
        result = await self.result("tools/call", name=name, arguments=arguments)
        (content,) = result["content"]
        if result["isError"]:
            assert "structuredContent" not in result
            return content["text"]
        assert json.loads(content["text"]) == result["structuredContent"]
        return result["structuredContent"]


@asynccontextmanager
async def serving(
    folder: Path, *, version: str = VERSION, keys: str | None = None, offers: bool = True, draining: bool = False
) -> AsyncIterator[Mcp]:
    """A service over a fake sandbox, in which other programs than PROGRAMS print their input."""
    sandbox, registry, drain_state = FakeSandbox(PROGRAMS), CollectorRegistry(), DrainState(draining)
    await sandbox.start()
    grader, budget = Grader(sandbox, VerifierMetrics(registry)), MemoryBudget(1 << 24)
    file = folder / "problems.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in PROBLEMS))
    cache = TestsCache(folder / "cache", 2**20)
    async with open_problem_set(str(file) if offers else "", grader, cache) as problems:
        app = make_app(grader, registry, drain_state, MAX_BODY, ApiKeys(environment=keys), budget=budget)
        add_mcp(app, CodeRunner(grader, Quotas()), problems, drain_state.enter, MAX_BODY)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            yield Mcp(client, version)
    cache.close()
    await grader.close()


@pytest.mark.parametrize("version", [OLD, VERSION])
async def test_a_client_of_each_generation_finds_the_tools_and_runs_a_program(tmp_path: Path, version: str) -> None:
    async with serving(tmp_path, version=version) as mcp:
        if version == OLD:
            begun = await mcp.result("initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo={})
            assert begun["protocolVersion"] == "2025-06-18"
            assert begun["serverInfo"]["name"] == "nouscoder"
            noted = await mcp.client.post("/mcp/", json={"jsonrpc": "2.0", "method": "notifications/initialized"})
            assert (noted.status_code, noted.content) == (202, b"")
            assert await mcp.result("ping") == {}
        else:
            found = await mcp.result("server/discover")
            assert VERSION in found["supportedVersions"]
            assert found.keys() >= {"resultType", "ttlMs", "cacheScope", "capabilities", "_meta"}
        listed = await mcp.result("tools/list")
        assert [tool["name"] for tool in listed["tools"]] == ["run_code", "list_problems", "grade_on_public_tests"]
        assert ("resultType" in listed) is (version == VERSION)
        for tool in listed["tools"]:
            assert tool["inputSchema"]["type"] == tool["outputSchema"]["type"] == "object"
        ran = await mcp.called("run_code", code="print(1)", stdin="given")
        assert ran == {"status": "finished", "return_code": 0, "stdout": "given", "stderr": ""}


async def test_what_a_program_does_is_told_and_long_texts_are_cut(tmp_path: Path) -> None:
    async with serving(tmp_path) as mcp:
        much = await mcp.called("run_code", code="print('much')")
        assert len(much["stdout"]) < 21_000
        assert "[80000 characters]" in much["stdout"]
        late = await mcp.called("run_code", code="print('late')", timeout_s=1)
        assert (late["status"], late["return_code"]) == ("time_limit_exceeded", None)
        broken = await mcp.called("run_code", code="print(")
        assert broken["return_code"] == 1
        assert "SyntaxError" in broken["stderr"]


async def test_problems_are_listed_in_parts_and_graded_on_their_public_tests(tmp_path: Path) -> None:
    async with serving(tmp_path) as mcp:
        ids: list[str] = []
        after: int | None = 0
        while after is not None:
            part = await mcp.called("list_problems", first=after)
            assert SECRET not in json.dumps(part)
            assert sum(len(one["prompt"]) for one in part["problems"]) < 130_000
            ids += [one["problem_id"] for one in part["problems"]]
            after = part["next"]
        assert ids == [one["problem_id"] for one in PROBLEMS]
        right = await mcp.called("grade_on_public_tests", problem_id="echo-1", answer="```python\nprint(1)\n```")
        assert right == {"verdict": "accepted", "passed": 1, "total": 1, "feedback": ""}
        wrong = await mcp.called("grade_on_public_tests", problem_id="echo-1", answer="print('no')")
        assert (wrong["verdict"], wrong["passed"]) == ("wrong_answer", 0)
        assert "Expected output:\nshown" in wrong["feedback"]


CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("run_code", {}, "code: Field required"),
    ("run_code", {"code": 1}, "code: must be a text"),
    ("run_code", {"code": "", "lang": "c"}, "lang: unknown field"),
    ("run_code", {"code": "", "language": "cobol"}, "'cobol' is not installed"),
    ("run_code", {"code": "print('lost')"}, "the sandbox failed, not the program"),
    ("list_problems", {"most": 1000}, "most: must be less than or equal to 100"),
    ("grade_on_public_tests", {"problem_id": "no", "answer": ""}, "there is no problem 'no'"),
    ("grade_on_public_tests", {"problem_id": "echo-0", "answer": ""}, "echo-0 has no public tests"),
    ("grade_on_public_tests", {"problem_id": "echo-1", "answer": "print('lost')"}, "the service failed"),
    ("grade_on_public_tests", {"problem_id": "echo-1", "answer": "1", "language": "c"}, "none of this problem's"),
]


async def test_a_failed_call_is_an_error_of_the_tool_in_one_sentence(tmp_path: Path) -> None:
    """The caller's fault and ours: never a verdict."""
    async with serving(tmp_path) as mcp:
        for name, arguments, message in CALLS:
            said = await mcp.called(name, **arguments)
            assert isinstance(said, str), (name, arguments)
            assert message in said, (name, arguments, said)
    async with serving(tmp_path, offers=False) as mcp:
        assert await mcp.called("list_problems") == NO_PROBLEMS
        assert await mcp.called("grade_on_public_tests", problem_id="a", answer="b") == NO_PROBLEMS
    async with serving(tmp_path, draining=True) as mcp:
        assert "draining" in await mcp.called("run_code", code="print(1)")


async def test_a_full_queue_is_an_error_of_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object) -> None:
        raise QueueFull(3)

    monkeypatch.setattr(CodeRunner, "run", full)
    async with serving(tmp_path) as mcp:
        assert "try again in 3 s" in await mcp.called("run_code", code="print(1)")


REFUSALS: list[tuple[str, dict[str, Any], dict[str, str], int, int]] = [
    (VERSION, {"method": "tools/call", "params": {"name": "run_cod"}}, {}, -32602, 400),
    (VERSION, {"method": "resources/list"}, {}, -32601, 404),
    (VERSION, {"method": "initialize"}, {}, -32601, 404),
    (VERSION, {"method": "tools/list"}, {"mcp-method": "tools/call"}, -32020, 400),
    (VERSION, {"method": "tools/call", "params": {"name": "run_code"}}, {"mcp-name": "other"}, -32020, 400),
    (VERSION, {"method": "tools/list"}, {"mcp-protocol-version": OLD}, -32020, 400),
    (VERSION, {"method": "tools/list"}, {"mcp-protocol-version": "2027-01-01"}, -32022, 400),
    (OLD, {"method": "tools/list"}, {"mcp-protocol-version": "2027-01-01"}, -32022, 400),
    (OLD, {"method": "tools/list"}, {"mcp-protocol-version": VERSION}, -32602, 400),
    (OLD, {"method": "server/discover"}, {}, -32601, 200),
    (OLD, {"method": "tools/call", "params": {}}, {}, -32602, 200),
    (OLD, {"method": "tools/list", "id": True}, {}, -32600, 400),
    (OLD, {"method": 1}, {}, -32600, 400),
    (OLD, {"method": "ping", "jsonrpc": "1.0"}, {}, -32600, 400),
]


async def test_what_is_no_request_of_a_known_version_is_refused_with_its_code(tmp_path: Path) -> None:
    async with serving(tmp_path) as mcp:
        for version, message, headers, code, status in REFUSALS:
            mcp.version = version
            answer = await mcp.post(message, **headers)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (status, code), (message, headers, answer.text)
            if code == -32022:
                assert error["data"]["requested"] == "2027-01-01"
                assert error["data"]["supported"][-2:] == [OLD, VERSION]
            if message.get("params", {}).get("name") == "run_cod":
                assert "did you mean run_code?" in error["message"]
        twice = b'{"jsonrpc": "2.0", "id": 1, "method": "ping", "method": "tools/call"}'
        for body, code in ((b"{", -32700), (b"[]", -32600), (b"[" * 100_000, -32700), (twice, -32600)):
            answer = await mcp.client.post("/mcp", content=body)
            assert (answer.status_code, answer.json()["error"]["code"], answer.json()["id"]) == (400, code, None)
        for method in ("GET", "DELETE"):
            answer = await mcp.client.request(method, "/mcp")
            assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert (await mcp.client.post("/mcp", content=b" " * (MAX_BODY + 1))).status_code == 413


async def test_keys_and_hosts_are_those_of_every_other_call(tmp_path: Path) -> None:
    message = {"method": "tools/list"}
    async with serving(tmp_path, keys=f"alice:{hashlib.sha256(b'secret').hexdigest()}") as mcp:
        assert (await mcp.post(message)).status_code == 401
        assert (await mcp.post(message, authorization="Bearer secret")).status_code == 200
        assert (await mcp.post(message, authorization="Bearer secret", host="grader.svc")).status_code == 200
    async with serving(tmp_path) as mcp:
        assert (await mcp.post(message, host="rebound.example")).status_code == 403
        assert (await mcp.post(message, origin="https://evil.example")).status_code == 403
        assert (await mcp.post(message, host="localhost:8000")).status_code == 200
