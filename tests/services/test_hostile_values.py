"""No header and no number makes an endpoint answer 500: every route, with values that parsers stumble over."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from nouscoder.config import TestsSection, VerifierSection
from nouscoder.http_server.memory_budget import MemoryBudget
from nouscoder.store.blobs import FolderBlobs
from nouscoder.store.tests_cache import TestsCache
from nouscoder.verifier.access.quotas import QuotaGrader, Quotas
from nouscoder.verifier.access.stored_tests import ClientTests
from nouscoder.verifier.api.compat.mcp import add_mcp
from nouscoder.verifier.api.compat.nemo_gym import add_nemo_gym
from nouscoder.verifier.api.compat.openenv import add_openenv
from nouscoder.verifier.api.compat.problem_set import open_problem_set
from nouscoder.verifier.api.remote_rewards import add_remote_rm
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.api.run_code import CodeRunner
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.fake import FakeSandbox

HUGE = "9" * 400
VALUES = [HUGE, f"-{HUGE}", "1e400", "NaN", "-Infinity", "9" * 5000, "-0.0", '"\\ud800"', "[]", "{}", "null", "true"]
HEADERS = ["http://[", "http://[::1", "http://a:99999999999", HUGE, "1e400", "NaN", "\xff", "%", "", "Basic !", "[]:x"]
NAMES = (
    *("Origin", "Host", "Authorization", "Content-Type", "Content-Encoding", "Accept", "Accept-Encoding", "Range"),
    *("X-Request-Id", "traceparent", "tracestate", "Idempotency-Key", "Mcp-Session-Id", "Mcp-Protocol-Version"),
    *("Last-Event-ID", "Cookie", "If-None-Match", "Forwarded", "Priority", "Referer"),
)
QUERIES = [f"offset={HUGE}", "wait_s=1e400", "wait_s=NaN", f"priority=-{HUGE}", f"limit={HUGE}", "a=%ff%00"]
CASES = {"type": "stdin", "cases": [{"input": "", "output": "3"}]}
LIMITS = {"wall_time_s": 1, "cpu_time_s": 1, "memory_bytes": 1000000000, "output_bytes": 1000, "processes": 3}
GRADE = {
    "code": "x",
    "tests": CASES,
    "limits": LIMITS,
    "priority": 1,
    "comparator": {"kind": "tokens", "float_tolerance": 1},
}
SENT: dict[str, Any] = {
    "/v1/grade": GRADE,
    "/v1/grade/stream": GRADE,
    "/v1/grade/batch": GRADE,
    "/v1/jobs": GRADE,
    "/run_code": {"code": "x", "language": "python", "run_timeout": 1, "compile_timeout": 1, "memory_limit_MB": 100},
    "/get_reward": {"query": ["p```python\nx\n```"], "prompts": ["p"], "labels": [{"tests": CASES, "n": 1}]},
    "/verify": {
        "response": {"output": [{"type": "message", "content": [{"type": "output_text", "text": "x"}]}]},
        "verifier_metadata": {"unit_tests": {"inputs": ["1"], "outputs": ["3"], "fn_name": None}},
    },
    "/aggregate_metrics": {"verify_responses": [{"_ng_task_index": 0, "reward": 1.0, "n": 1}, {"reward": 1}]},
    "/remote_rm": {"prompt": "p", "response": "```\nx\n```", "label": CASES, "index": 1},
    "/submit": {"dataset": "d", "id": 1, "completion": "x", "config": {"language": "python", "run_timeout": 1}},
    "/mcp": {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": "list_problems", "arguments": {"offset": 1, "limit": 2}},
    },
    "/openenv/reset": {"seed": 1, "episode_id": "x"},
    "/openenv/step": {"action": {"answer": "x"}, "timeout_s": 1.5},
}


def with_each_part_replaced(value: Any, by: str) -> Iterator[str]:
    """The JSON texts of the value in which one part is this text."""
    yield by
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in pairs:
        for text in with_each_part_replaced(part, by):
            others = {**value, key: "HERE"} if isinstance(value, dict) else [*value[:key], "HERE", *value[key + 1 :]]
            yield json.dumps(others).replace('"HERE"', text)


@asynccontextmanager
async def every_protocol(folder: Path) -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient]]:
    """The service with the calls of other projects, over a sandbox that runs nothing, and a client."""
    machine, registry, state = FakeSandbox({}), CollectorRegistry(), DrainState()
    await machine.start()
    problem = {"task_id": "p1", "prompt": "Print 3.", "tests": CASES}
    (folder / "problems.jsonl").write_text(json.dumps(problem) + "\n")
    async with AsyncExitStack() as stack:
        core = Grader(machine, VerifierMetrics(registry), VerifierSection(cache_entries=0))
        grader, cache, budget = QuotaGrader(core, Quotas()), TestsCache(folder / "cache", 2**20), MemoryBudget(10**6)
        stack.callback(cache.close)
        problems = await stack.enter_async_context(open_problem_set(str(folder / "problems.jsonl"), grader, cache))
        runner, stored = CodeRunner(core, Quotas()), ClientTests(FolderBlobs(folder / "store"), cache, TestsSection())
        app = make_app(grader, registry, state, 100_000, runner=runner, client_tests=stored, budget=budget)
        add_openenv(app, problems, budget, state.enter, 100_000, 8)
        add_nemo_gym(app, grader, state.enter, 100_000, 10**6)
        add_remote_rm(app, grader, state.enter, 100_000)
        add_mcp(app, runner, problems, state.enter, 100_000)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        yield (
            app,
            await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")),
        )


async def test_no_header_query_or_value_makes_an_internal_error(tmp_path: Path) -> None:
    async with every_protocol(tmp_path) as (app, http):
        wrong: list[object] = []

        async def send(method: str, path: str, **how: Any) -> None:
            answer = await http.request(method, path, **how)
            if answer.status_code not in (501, 503) and answer.status_code >= 500:
                wrong.append((method, path[:80], str(how)[:200], answer.status_code))

        for path, body in SENT.items():
            for number, value in enumerate(VALUES):
                for text in islice(with_each_part_replaced(body, value), number % 2, None, 2 if number > 1 else 1):
                    await send("POST", path, content=text)
        routes = {
            (each, getattr(one, "path", "")) for one in app.routes for each in getattr(one, "methods", None) or ()
        }
        for number, (method, path) in enumerate(sorted(routes)):
            if path == "/openapi.json":  # it is large, and made anew each time
                continue
            places = [re.sub(r"\{[^}]*\}", name, path) for name in ("p1", HUGE)]
            content = json.dumps(SENT.get(path, {})) if method == "POST" else None
            for query in QUERIES:
                await send(method, f"{places[1]}?{query}", content=content)
            for name in NAMES:
                for header in HEADERS[number % 4 :: 4]:  # each with each name, of some route
                    await send(method, places[0], content=content, headers={name: header.encode("latin-1")})
    assert not wrong, wrong[:20]
    assert len(routes) > 20
