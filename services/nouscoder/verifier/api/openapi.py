"""The OpenAPI document: FastAPI's, with what FastAPI cannot derive: headers, tokens, bounds of validation, examples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from nouscoder.domain.submission import Limits
from nouscoder.verifier.access.gatekeeper import MAX_DEADLINE_S, is_open_path
from nouscoder.verifier.api.faults import FAULTS
from nouscoder.verifier.api.remote_rewards import GetRewardRequest
from nouscoder.verifier.api.run_code import RunCodeRequest
from nouscoder.verifier.api.sandbox_fusion import SubmitRequest
from nouscoder.verifier.api.schema import GradeRequest, StoredGradeRequest
from nouscoder.verifier.grading.validation import Bounds

_REF = "#/components/schemas/{model}"
_PARAMETERS = [
    {
        "name": "X-Deadline-S",
        "in": "header",
        "required": False,
        "description": "deadline in seconds from now; after it the work is cancelled and the answer is 504",
        "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DEADLINE_S},
    },
    {
        "name": "X-Request-Id",
        "in": "header",
        "required": False,
        "description": "returned with the answer and written to logs; an id that is not a plain name is replaced",
        "schema": {"type": "string"},
    },
]
_ONE_OF_THREE = [{"$ref": f"#/components/schemas/{name}"} for name in ("TestBody", "GradeAnswer", "Fault")]
_EVENT = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {
        "event": {"enum": ["outcome", "verdict", "fault"]},
        "data": {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": _ONE_OF_THREE}},
    },
}
_STREAMS = {
    "/v1/grade/stream": ("text/event-stream", _EVENT),
    "/v1/grade/batch": ("application/x-ndjson", {"type": "string"}),
}
_PROGRAM = {
    "language": "python",
    "code": "print(sum(map(int, input().split())))",
    "tests": {"type": "stdin", "cases": [{"input": "1 2\n", "output": "3\n"}]},
}
_CALL: dict[str, Any] = {
    "completion": "```python\ndef add(a, b):\n    return a + b\n```",
    "tests": {"type": "call", "entry_point": "add", "cases": [{"args": [1], "kwargs": {"b": 2}, "expected": 3}]},
}
_REWARD = {
    "query": ["Print 3.```python\nprint(3)\n```"],
    "prompts": ["Print 3."],
    "labels": ['{"inputs": [""], "outputs": ["3"]}'],
}
_PYTEST = {
    "code": "def add(a, b):\n    return a + b\n",
    "tests": {"type": "pytest", "file": "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n"},
}
_PUBLIC = {"code": "print(3)", "tests": {"inputs": [""], "outputs": ["3"]}}
_OTHER_FORMS = {
    "type": "object",
    "properties": {"type": {"const": "pytest"}},
    "description": "a file for pytest (`file`), or a public form, such as inputs with outputs: docs/verdicts.md",
}
_LINES = [{"id": "first", **_PROGRAM}, {"id": "second", **_CALL}]
_SUBMIT = {
    "dataset": "CommonOJDataset",
    "id": 1,
    "completion": "```python\nprint(input())\n```",
    "config": {"language": "python", "provided_data": {"test": [{"input": {"stdin": "3"}, "output": {"stdout": "3"}}]}},
}
_EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/grade": {"program": _PROGRAM, "function": _CALL, "pytest": _PYTEST, "public form": _PUBLIC},
    "/v1/grade/stream": {"program": _PROGRAM},
    "/v1/grade/batch": {"two lines": _LINES},
    "/v1/jobs": {"two lines": _LINES},
    "/v1/tests": {"program": _PROGRAM["tests"]},
    "/submit": {"program": _SUBMIT},
    "/get_reward": {"program": _REWARD},
    "/run_code": {"program": {"language": "python", "code": "print(6 * 7)", "run_timeout": 5}},
}
_FAULT: dict[str, Any] = {"content": {"application/json": {"schema": {"$ref": _REF.format(model="Fault")}}}}
_SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "a token of `nouscoder tokens new`"},
    "basic": {"type": "http", "scheme": "basic", "description": "any name, with the token as the password"},
}
_ABOUT = (
    "Grades programs with tests in sandboxes. Every submission that was graded gets status 200 with its verdict; other "
    "statuses say why nothing was graded. docs/grading.md and docs/verdicts.md of NousCoder define the fields. "
    "OpenEnv's calls are in /openenv/openapi.json, and its sessions a WebSocket at /openenv/ws (docs/protocols.md)."
)
_REQUEST_ID = {"description": "the request's id", "required": True, "schema": {"type": "string"}}
_RETRY_AFTER = {"description": "seconds", "required": True, "schema": {"type": "integer", "minimum": 0}}


# The fields of these records that have a default may also be null, which means the default (formats/public_shapes.py).
_NULLABLE = (
    *("GradeRequest", "StoredGradeRequest", "LimitsBody", "ComparatorBody", "AssertTestsBody", "InteractiveTestsBody"),
    *("CallCaseBody", "StdinCaseBody", "CheckedCaseBody", "InteractiveCaseBody"),
)


def openapi_document(
    app: FastAPI, languages: Sequence[str], *, needs_token: bool, bounds: Bounds | None = None
) -> dict[str, Any]:
    """The document of the service's REST API. `needs_token`: tokens are configured."""
    document = get_openapi(title=app.title, version=app.version, description=_ABOUT, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for model in (GradeRequest, StoredGradeRequest, GetRewardRequest, SubmitRequest, RunCodeRequest):
        schema = model.model_json_schema(ref_template=_REF)
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    ours = schemas["GradeRequest"]["properties"]["tests"]
    schemas["GradeRequest"]["properties"]["tests"] = {"anyOf": [ours, _OTHER_FORMS]}
    schemas["Tests"] = schemas["GradeRequest"]["properties"]["tests"]
    for path, item in document["paths"].items():
        for operation in item.values():
            _complete(operation, is_open=is_open_path(path), needs_token=needs_token)
    _describe_bodies(document["paths"])
    _bound(schemas, languages, bounds or Bounds())
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    if needs_token:
        document["components"]["securitySchemes"] = _SECURITY_SCHEMES
    copied: dict[str, Any] = json.loads(json.dumps(document))  # no two parts are one object
    return copied


def _complete(operation: dict[str, Any], *, is_open: bool, needs_token: bool) -> None:
    """Add what the gatekeeper does on every path: headers, deadline, tokens."""
    operation["parameters"] = [*operation.get("parameters", ()), *_PARAMETERS]
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's own has another form
    for status in (422, 504) if is_open else (401, 403, 422, 504):
        responses.setdefault(str(status), _FAULT | {"description": FAULTS[status]["description"]})
    if needs_token and not is_open:
        operation["security"] = [{name: []} for name in _SECURITY_SCHEMES]
    for status, response in responses.items():
        response.setdefault("headers", {})["X-Request-Id"] = _REQUEST_ID
        if status in ("429", "503"):
            response["headers"]["Retry-After"] = _RETRY_AFTER
    operation["responses"] = dict(sorted(responses.items()))


def _describe_bodies(paths: dict[str, Any]) -> None:
    """Add streams and examples."""
    for path, (media_type, schema) in _STREAMS.items():
        paths[path]["post"]["responses"]["200"]["content"] = {media_type: {"schema": schema}}
    for path, examples in _EXAMPLES.items():
        for operation in paths.get(path, {}).values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                if content["schema"].get("format") != "binary":
                    content["examples"] = {name: {"value": value} for name, value in examples.items()}


def _bound(schemas: dict[str, Any], languages: Sequence[str], most: Bounds) -> None:
    """Add the rules of validation that JSON Schema can express."""
    for name in ("GradeRequest", "StoredGradeRequest"):
        schemas[name]["properties"]["language"]["enum"] = list(languages)
        schemas[name]["properties"]["other_languages"]["items"]["enum"] = list(languages)
        schemas[name]["oneOf"] = [
            {"required": [source], "properties": {source: {"type": "string"}}} for source in ("code", "completion")
        ]
    schemas["JudgeProgramBody"]["properties"]["language"]["enum"] = list(languages)
    for limit in fields(Limits):
        schemas["LimitsBody"]["properties"][limit.name]["maximum"] = getattr(most.limits, limit.name)
    for name, schema in schemas.items():
        if name.endswith("TestsBody"):
            schema["properties"]["cases"]["maxItems"] = most.num_tests
    run_code = schemas["RunCodeRequest"]["properties"]
    run_code["language"]["enum"] = [*languages, "nodejs"]  # SandboxFusion's name
    run_code["run_timeout"]["maximum"] = most.limits.wall_time_s
    run_code["memory_limit_MB"]["maximum"] = most.limits.memory_bytes // 1024**2
    for name in _NULLABLE:
        properties = schemas[name]["properties"]
        for field, schema in properties.items():
            if "default" in schema and "anyOf" not in schema:
                properties[field] = {"anyOf": [schema, {"type": "null"}]}
