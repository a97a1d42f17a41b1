"""The OpenAPI document has every route of the service, each status that it answers, tokens, and examples that work."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.routing import Mount, Route

from nouscoder.config import JobsSection, TestsSection
from nouscoder.http_server.api_keys import ApiKeys, new_api_key
from nouscoder.http_server.memory_budget import MemoryBudget
from nouscoder.store.blobs import FolderBlobs
from nouscoder.store.tests_cache import TestsCache
from nouscoder.verifier.access.gatekeeper import is_open_path
from nouscoder.verifier.access.quotas import Quotas
from nouscoder.verifier.access.stored_tests import ClientTests
from nouscoder.verifier.api.capabilities import Capabilities
from nouscoder.verifier.api.compat.mcp import add_mcp
from nouscoder.verifier.api.compat.nemo_gym import add_nemo_gym
from nouscoder.verifier.api.compat.openenv import add_openenv
from nouscoder.verifier.api.compat.problem_set import ProblemSet
from nouscoder.verifier.api.openapi import openapi_document
from nouscoder.verifier.api.pages import digest_source
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.api.run_code import CodeRunner
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.jobs.service import open_jobs
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.fake import FakeSandbox

# Routes that are not calls: the document itself, a part of the playground, and refusals of methods.
NOT_CALLS = re.compile(r"/openapi\.json|/(?:highlight|docs)-[-a-z0-9]+\.(?:js|css)")
MAX_BODY = 4000


class Service:
    """The app with everything that it can have, a client, and the switch of draining."""

    def __init__(self, app: FastAPI, http: httpx.AsyncClient, drain_state: DrainState) -> None:
        self.app = app
        self.http = http
        self.drain_state = drain_state
        self.document: dict[str, Any] = app.openapi()

    def operations(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(method, path, operation)."""
        for path, item in self.document["paths"].items():
            for method, operation in item.items():
                yield method.upper(), path, operation

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Request a path of the document."""
        return await self.http.request(method, path.replace("{job_id}", "no-such-job"), **options)


@asynccontextmanager
async def serving(folder: Path, keys: str | None = None) -> AsyncIterator[Service]:
    """A service with all calls. `keys` are the lines of its tokens."""
    sandbox, registry, drain_state = FakeSandbox(), CollectorRegistry(), DrainState()
    await sandbox.start()
    grader, budget = Grader(sandbox, VerifierMetrics(registry)), MemoryBudget(1 << 20)
    async with AsyncExitStack() as stack:
        cache = TestsCache(folder / "cache", 1_000_000)
        stack.callback(cache.close)
        jobs = await stack.enter_async_context(
            open_jobs(JobsSection(folder=str(folder / "jobs")), grader, budget, MAX_BODY)
        )
        app = make_app(
            grader,
            registry,
            drain_state,
            MAX_BODY,
            ApiKeys(environment=keys),
            CodeRunner(grader, Quotas()),
            ClientTests(FolderBlobs(folder / "store"), cache, TestsSection()),
            budget,
            capabilities=Capabilities(grader, []),
            jobs=jobs,
        )
        transport = httpx.ASGITransport(app)
        http = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://verifier"))
        yield Service(app, http, drain_state)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with serving(tmp_path) as made:
        yield made


async def test_every_route_is_in_the_document(service: Service) -> None:
    documented = {(method, path) for method, path, _ in service.operations()}
    routes = {
        (method, route.path)
        for route in service.app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if not NOT_CALLS.fullmatch(route.path) and route.name != "refuse"  # a 405 of jobs
    }
    assert documented == routes
    assert len(documented) > 15


async def test_every_operation_says_what_it_does_and_what_it_answers(service: Service) -> None:
    for method, path, operation in service.operations():
        where = (method, path)
        assert operation["description"], where
        statuses = set(operation["responses"])
        assert statuses >= {"422", "504"} | (set() if is_open_path(path) else {"401", "403"}), where
        assert any(status in statuses for status in ("200", "202", "501")), where
        if "requestBody" in operation:
            assert statuses >= {"408", "413", "503"} - ({"413"} if path == "/v1/jobs" else {"503"} & {path}) - (
                {"503"} if path == "/run_code" else set()
            ), where
        assert all(answer["description"] for answer in operation["responses"].values()), where
        names = [parameter["name"] for parameter in operation["parameters"]]
        assert names.count("X-Deadline-S") == names.count("X-Request-Id") == 1, where


FAULT = {"$ref": "#/components/schemas/Fault"}
BAD_BODIES = (b"", b"{", b"[]", b'{"unknown": 1}', b"x" * (MAX_BODY + 1), b'{"tests": {"digest": "sha256:' + b"0" * 64)
# Headers with which the gatekeeper or a handler refuses.
BAD_HEADERS: tuple[dict[str, str], ...] = (
    {},
    {"origin": "https://elsewhere.example"},
    {"host": "elsewhere.example"},
    {"x-deadline-s": "soon"},
    {"x-deadline-s": "1e-9"},
    {"content-type": "image/png"},
    {"idempotency-key": "x" * 500},
)


async def test_each_refusal_has_a_documented_status(service: Service) -> None:
    """Everything that a client can do wrong, on every operation, also while the service drains."""
    seen = set()
    for draining in (False, True):
        service.drain_state.draining = draining
        for method, path, operation in service.operations():
            wrong = [("", b"", headers) for headers in BAD_HEADERS] + [("?offset=-1&priority=99", b"", {})]
            if "requestBody" in operation and not draining:
                wrong += [("", body, {}) for body in BAD_BODIES]
            for query, body, headers in wrong:
                answer = await service.ask(method, path + query, content=body, headers=headers)
                status = str(answer.status_code)
                assert status in operation["responses"], (method, path, status, headers, answer.text[:300])
                assert "x-request-id" in answer.headers
                documented = operation["responses"][status].get("content", {})
                if answer.status_code >= 400:
                    assert set(answer.json()) == {"detail", "field"}, (method, path, answer.text[:300])
                    assert documented["application/json"]["schema"] == FAULT, (method, path, status)
                seen.add(status)
    assert seen >= {"200", "403", "404", "413", "415", "422", "501", "503", "504"}, seen


def validator_of(document: dict[str, Any], schema: dict[str, Any]) -> Any:
    """A validator of a schema of the document."""
    return jsonschema_rs.validator_for({**schema, "components": document["components"]})


async def test_each_body_has_an_example_that_is_valid_and_is_answered_as_documented(service: Service) -> None:
    for method, path, operation in service.operations():
        for kind, content in operation.get("requestBody", {}).get("content", {}).items():
            if content["schema"].get("format") == "binary":
                continue
            assert content["examples"], (method, path)
            for name, example in content["examples"].items():
                value, lines = example["value"], kind == "application/x-ndjson"
                plain = [{k: v for k, v in one.items() if k != "id"} for one in value] if lines else value
                validator_of(service.document, content["schema"]).validate(plain)
                body = "\n".join(map(json.dumps, value)) if lines else json.dumps(value)
                answer = await service.ask(method, path, content=body, headers={"content-type": kind})
                assert answer.status_code in (200, 202), (path, name, answer.text)
                answered = operation["responses"][str(answer.status_code)]["content"]
                got = answer.headers["content-type"].split(";")[0]
                if got == "application/json":
                    validator_of(service.document, answered[got]["schema"]).validate(answer.json())
                else:
                    assert got in answered


async def test_the_answers_of_calls_without_a_body_have_their_schema(service: Service) -> None:
    checked = set()
    for method, path, operation in service.operations():
        if "requestBody" in operation or "{" in path:
            continue
        answer = await service.ask(method, path)
        answered = operation["responses"][str(answer.status_code)].get("content", {})
        if answer.headers["content-type"].startswith("application/json"):
            validator_of(service.document, answered["application/json"]["schema"]).validate(answer.json())
            checked.add(path)
    assert checked >= {"/healthz", "/readyz", "/v1/capabilities", "/v1/jobs"}


async def test_the_document_has_security_schemes_when_tokens_are_set(tmp_path: Path, service: Service) -> None:
    assert "securitySchemes" not in service.document["components"]
    assert not any("security" in operation for _, _, operation in service.operations())
    secret, line = new_api_key("one")
    async with serving(tmp_path / "closed", line) as closed:
        assert set(closed.document["components"]["securitySchemes"]) == {"bearer", "basic"}
        for method, path, operation in closed.operations():
            refused = (await closed.ask(method, path)).status_code == 401
            assert refused is ("security" in operation) is not is_open_path(path), path
            for given in ({"headers": {"authorization": f"Bearer {secret}"}}, {"auth": ("any", secret)}):
                assert (await closed.ask(method, path, **given)).status_code != 401, path


async def test_the_page_and_its_parts_come_from_this_service_alone(tmp_path: Path) -> None:
    """Also without an API key, as the page itself."""
    _, line = new_api_key("one")
    async with serving(tmp_path, line) as service:
        answer = await service.http.get("/docs")
        policy, page = answer.headers["content-security-policy"], answer.text
        assert "unsafe" not in policy
        assert re.findall(r"<script(?! src=)|<style", page) == []
        found = re.findall(r'(?:src|href)="([^"]*)"(?: integrity="([^"]*)")?', page)
        named = {path: digest for path, digest in found if digest}
        assert [path for path, digest in found if not digest] == ["data:,", "/", "/openapi.json"]
        assert len(named) == 3
        for path, digest in named.items():
            part = await service.http.get(path)
            assert part.status_code == 200
            assert "immutable" in part.headers["cache-control"]
            assert digest == digest_source(part.content)
            assert f"'{digest}'" in policy or path.endswith(".css")


# Calls of other projects that the document of the service does not have, with the reason.
ELSEWHERE = {
    ("POST", "/mcp/"): "/mcp under another name",
    ("GET", "/mcp"): "answers 405: no stream of the server's own",
    ("DELETE", "/mcp"): "answers 405: no session to end",
}


async def test_the_calls_of_other_projects_are_in_the_document(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        app, enter = service.app, service.drain_state.enter
        own = {route.path for route in app.routes if isinstance(route, Route)}
        grader = Grader(FakeSandbox(), VerifierMetrics(CollectorRegistry()))
        problems = ProblemSet(None, grader, TestsCache(tmp_path / "tests", 1_000_000))
        add_nemo_gym(app, grader, enter, MAX_BODY, MAX_BODY)
        add_mcp(app, CodeRunner(grader, Quotas()), problems, enter, MAX_BODY)
        add_openenv(app, problems, MemoryBudget(1 << 20), enter, MAX_BODY)
        document = openapi_document(app, ("python",), needs_token=False)
        added = {
            (method, route.path)
            for route in app.routes
            if isinstance(route, Route) and route.path not in own
            for method in route.methods or ()
        }
        documented = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
        assert added - documented == set(ELSEWHERE)
        assert {"/verify", "/seed_session", "/aggregate_metrics", "/reverify_mode", "/mcp"} <= document["paths"].keys()
        mounted = {route.path for route in app.routes if isinstance(route, Mount)}
        assert all(f"{path}/openapi.json" in document["info"]["description"] for path in mounted)
        assert (await service.http.get("/openenv/openapi.json")).status_code == 200
