"""Completes FastAPI's OpenAPI document with what FastAPI cannot derive: headers, and the bounds of validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from nouscoder.domain.submission import Limits
from nouscoder.verifier.access.gatekeeper import MAX_DEADLINE_S
from nouscoder.verifier.grading.validation import Bounds

_GRADING = ("/v1/grade", "/v1/grade/stream", "/v1/grade/batch", "/get_reward", "/submit", "/run_code")
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
_EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/grade": {"program": _PROGRAM, "function": _CALL},
    "/v1/grade/stream": {"program": _PROGRAM},
    "/get_reward": {"program": _REWARD},
    "/run_code": {"program": {"language": "python", "code": "print(6 * 7)", "run_timeout": 5}},
}
_REQUEST_ID = {"description": "the request's id", "required": True, "schema": {"type": "string"}}
_RETRY_AFTER = {"description": "seconds", "required": True, "schema": {"type": "integer", "minimum": 0}}


# The fields of these records that have a default may also be null, which means the default (formats/public_shapes.py).
_NULLABLE = (
    *("GradeRequest", "StoredGradeRequest", "LimitsBody", "ComparatorBody", "AssertTestsBody", "InteractiveTestsBody"),
    *("CallCaseBody", "StdinCaseBody", "CheckedCaseBody", "InteractiveCaseBody"),
)


def complete_openapi(document: dict[str, Any], languages: Sequence[str], bounds: Bounds | None = None) -> None:
    """Add headers, examples and bounds to `document`, in place."""
    for path, item in document["paths"].items():
        for operation in item.values():
            responses = operation["responses"]
            if path in _GRADING:
                operation["parameters"] = _PARAMETERS
            if path == "/metrics":
                responses["401"] = {"description": "A valid API key is required."}
            for status, response in responses.items():
                response.setdefault("headers", {})["X-Request-Id"] = _REQUEST_ID
                if status in ("429", "503"):
                    response["headers"]["Retry-After"] = _RETRY_AFTER
    for path, (media_type, schema) in _STREAMS.items():
        document["paths"][path]["post"]["responses"]["200"]["content"] = {media_type: {"schema": schema}}
    for path in document["paths"].keys() & _EXAMPLES.keys():
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        content["examples"] = {name: {"value": value} for name, value in _EXAMPLES[path].items()}
    _bound(document["components"]["schemas"], languages, bounds or Bounds())


def _bound(schemas: dict[str, Any], languages: Sequence[str], most: Bounds) -> None:
    """Add the rules of validation that JSON Schema can express."""
    for name in ("GradeRequest", "StoredGradeRequest"):
        schemas[name]["properties"]["language"]["enum"] = list(languages)
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
