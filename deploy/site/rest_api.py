"""The page of the grading service's REST API, made of its OpenAPI document."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from nouscoder.config import JobsSection, TestsSection
from nouscoder.http_server.memory_budget import MemoryBudget
from nouscoder.store.blobs import FolderBlobs
from nouscoder.store.tests_cache import TestsCache
from nouscoder.verifier.access.quotas import Quotas
from nouscoder.verifier.access.stored_tests import ClientTests
from nouscoder.verifier.api.capabilities import Capabilities
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.api.run_code import CodeRunner
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.jobs.service import open_jobs
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.fake import FakeSandbox

_BEGIN = """# REST API of the grading service
{about} [The grading service](../grading.md) shows each call with an example, and [Verdicts](../verdicts.md) says what
is right.

This page is made of the service's own [OpenAPI document](openapi.json), for a service with jobs and without tokens. A
running service answers its document at `/openapi.json`, and shows it at `/docs`, where each call can be tried out.
"""
_COMMON = ("X-Deadline-S", "X-Request-Id")


def grading_document() -> dict[str, Any]:
    """The OpenAPI document of a service that has every call."""
    return asyncio.run(_document())


async def _document() -> dict[str, Any]:
    registry, budget, max_body_bytes = CollectorRegistry(), MemoryBudget(1 << 20), 8 << 20
    with tempfile.TemporaryDirectory() as name, closing(TestsCache(Path(name) / "cache", 1_000_000)) as cache:
        grader = Grader(FakeSandbox(), VerifierMetrics(registry))
        section = JobsSection(folder=str(Path(name) / "jobs"))
        async with open_jobs(section, grader, budget, max_body_bytes) as jobs:
            app = make_app(
                grader,
                registry,
                DrainState(),
                max_body_bytes,
                runner=CodeRunner(grader, Quotas()),
                client_tests=ClientTests(FolderBlobs(Path(name) / "store"), cache, TestsSection()),
                budget=budget,
                capabilities=Capabilities(grader, []),
                jobs=jobs,
            )
            return app.openapi()


def rest_page(document: Mapping[str, Any]) -> str:
    """The document as Markdown: the calls, then the records that they take and return."""
    schemas = document["components"]["schemas"]
    calls = [
        (f"{method.upper()} {path}", call) for path, item in document["paths"].items() for method, call in item.items()
    ]
    lines = [_BEGIN.format(about=document["info"]["description"].split(" docs/")[0]), *_common(calls), "## Calls"]
    for name, call in calls:
        lines += ["", f"### {name}", call.get("description", "").strip(), "", *_call(call)]
    lines += ["", "## Records"]
    for name, schema in sorted(schemas.items()):
        if schema.get("properties") or schema.get("enum"):
            lines += ["", f"### {name}", schema.get("description", "").strip(), "", *_record(schema)]
    return "\n".join(lines) + "\n"


def _common(calls: list[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """What every call takes and may answer, said once."""
    shared = {one["name"]: one for _, call in calls for one in call["parameters"] if one["name"] in _COMMON}
    yield "Every call takes these headers:"
    yield ""
    yield from _table(("header", "meaning"), [(f"`{one['name']}`", one["description"]) for one in shared.values()])
    yield ""
    yield "A status of 400 or more comes with a [Fault](#fault)."
    yield ""


def _call(call: Mapping[str, Any]) -> Iterator[str]:
    parameters = {one["name"]: one for one in call["parameters"] if one["name"] not in _COMMON}
    if parameters:
        yield from _table(
            ("parameter", "in", "type", "meaning"),
            [
                (f"`{name}`", one["in"], _type(one["schema"]), _meaning(one["schema"] | _without(one, "schema")))
                for name, one in parameters.items()
            ],
        )
        yield ""
    for kind, content in call.get("requestBody", {}).get("content", {}).items():
        yield f"Takes `{kind}`: {_type(content.get('schema', {}))}."
        yield ""
        for example in content.get("examples", {}).values():
            given = example["value"]
            yield f"```json\n{given if isinstance(given, str) else json.dumps(given, indent=2)}\n```"
            yield ""
    answers = [
        (status, ", ".join(_type(one.get("schema", {})) for one in answer.get("content", {}).values()), answer)
        for status, answer in call["responses"].items()
    ]
    yield from _table(
        ("status", "answer", "when"),
        [(status, shape, answer["description"]) for status, shape, answer in answers],
    )


def _record(schema: Mapping[str, Any]) -> Iterator[str]:
    if "enum" in schema:
        yield ", ".join(f"`{value}`" for value in schema["enum"])
        return
    needed = schema.get("required", ())
    yield from _table(
        ("field", "type", "meaning"),
        [
            (f"`{name}`{' (required)' if name in needed else ''}", _type(one), _meaning(one))
            for name, one in schema["properties"].items()
        ],
    )


def _type(schema: Mapping[str, Any]) -> str:
    """The type of a field in words, with links to records."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return "any JSON" if name == "JsonValue" else "the tests" if name == "Tests" else f"[{name}](#{name.lower()})"
    if either := schema.get("anyOf", schema.get("oneOf")):
        return " or ".join(dict.fromkeys(_type(one) for one in either))
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return "one of " + ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"array of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any JSON"))


def _meaning(schema: Mapping[str, Any]) -> str:
    """The description, with the default and the bounds."""
    inner: Mapping[str, Any] = next((one for one in schema.get("anyOf", ()) if one.get("type") != "null"), {})
    schema = {**inner, **schema}
    words = [schema.get("description", "")]
    if schema.get("default") not in (None, "", [], {}):
        words.append(f"default `{json.dumps(schema['default'])}`")
    bounds = {"minimum": "at least", "maximum": "at most", "exclusiveMinimum": "above", "maxItems": "entries: at most"}
    words += [f"{word} {schema[key]}" for key, word in bounds.items() if key in schema]
    return "; ".join(word for word in words if word)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    for row in (head, ("---",) * len(head), *rows):
        yield "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) + " |"


def _without(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != key}
