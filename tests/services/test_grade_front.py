"""POST /v1/grade passes the web framework by, and answers as the documented route does."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

from nouscoder.http_server.api_keys import ApiKeys
from nouscoder.http_server.memory_budget import MemoryBudget
from nouscoder.verifier.access.quotas import QuotaGrader, Quotas
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.fake import FakeSandbox

KEY = "secret"
ONE_A_MINUTE = "team:2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # of KEY
REQUEST = {"code": "print(input())", "tests": {"type": "stdin", "cases": [{"input": "1\n", "output": "1\n"}]}}
GOOD = json.dumps(REQUEST).encode()
VARYING = {"duration_s", "wall_time_s"}


@asynccontextmanager
async def both(keys: ApiKeys | None = None, *, draining: bool = False) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Clients of two equal services: one as it is served, and one whose requests all go through the framework."""
    clients = []
    for passes_by in (True, False):
        sandbox, registry = FakeSandbox(), CollectorRegistry()
        await sandbox.start()
        grader = QuotaGrader(Grader(sandbox, VerifierMetrics(registry)), Quotas())
        app = make_app(grader, registry, DrainState(draining), 10_000, keys, budget=MemoryBudget(20_000))

        async def framework(scope: Scope, receive: Receive, send: Send, app: FastAPI = app) -> None:
            await FastAPI.__call__(app, scope, receive, send)

        transport = httpx.ASGITransport(app if passes_by else framework)
        clients.append(httpx.AsyncClient(transport=transport, base_url="http://localhost"))
    yield clients
    for client in clients:
        await client.aclose()


async def answer(client: httpx.AsyncClient, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
    """Everything of an answer that does not vary."""
    got = await client.post("/v1/grade", content=body, headers=headers)
    record = json.loads(got.content, object_hook=lambda o: {k: v for k, v in o.items() if k not in VARYING})
    kept = {name: got.headers.get(name) for name in ("content-type", "retry-after", "www-authenticate")}
    return {"status": got.status_code, "body": record, "has_id": "x-request-id" in got.headers, **kept}


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (GOOD, {}, 200),
        (json.dumps({**REQUEST, "code": "print("}).encode(), {}, 200),
        (b"{", {}, 422),
        (json.dumps({**REQUEST, "languag": "c"}).encode(), {}, 422),
        (json.dumps({**REQUEST, "tests": {"digest": "sha256:" + "0" * 64}}).encode(), {}, 422),
        (b"x" * 10_001, {}, 413),
        (GOOD, {"x-deadline-s": "never"}, 422),
        (GOOD, {"origin": "https://evil.example"}, 403),
    ],
    ids=["good", "no program", "no JSON", "unknown field", "unknown digest", "too large", "bad deadline", "foreign"],
)
async def test_answers_and_faults_are_those_of_the_documented_route(
    body: bytes, headers: dict[str, str], status: int
) -> None:
    async with both() as clients:
        first, second = [await answer(client, body, headers) for client in clients]
    assert first == second
    assert (first["status"], first["has_id"]) == (status, True)


async def test_keys_quotas_and_the_drain_are_those_of_the_documented_route() -> None:
    keys = ApiKeys(environment=f"{ONE_A_MINUTE}:1:1")
    async with both(keys) as clients:
        for headers, status in (({}, 401), ({"authorization": f"Bearer {KEY}"}, 200)):
            first, second = [await answer(client, GOOD, headers) for client in clients]
            assert first == second
            assert first["status"] == status
        again = [await answer(client, GOOD, {"authorization": f"Bearer {KEY}"}) for client in clients]
        assert again[0] == again[1]
        assert (again[0]["status"], again[0]["retry-after"]) == (429, "60")
    async with both(draining=True) as clients:
        first, second = [await answer(client, GOOD, {}) for client in clients]
        assert first == second
        assert first["status"] == 503


async def test_other_methods_and_paths_go_to_the_routes() -> None:
    async with both() as (client, _):
        assert (await client.get("/v1/grade")).status_code == 405
        assert (await client.post("/v1/grade/", content=GOOD)).status_code == 404
        assert (await client.get("/healthz")).json() == {"status": "ok"}
