"""What FastAPI cannot know of the REST API, added to its OpenAPI document: headers, and bounds that grading sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from nouscoder.submission import Limits
from nouscoder.verifier.validation import Bounds

MAX_DEADLINE_S = 86400
_GRADING = ("/v1/grade", "/v1/grade/stream", "/v1/grade/batch", "/run_code")
_PARAMETERS = [
    {
        "name": "X-Deadline-S",
        "in": "header",
        "required": False,
        "description": "seconds from now after which the answer is of no use: 504 then, and the work is given up",
        "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DEADLINE_S},
    },
    {
        "name": "X-Request-Id",
        "in": "header",
        "required": False,
        "description": "comes back with the answer and stands in logs; one that is no plain name is replaced",
        "schema": {"type": "string"},
    },
]
_REQUEST_ID = {"description": "the request's id", "required": True, "schema": {"type": "string"}}
_RETRY_AFTER = {"description": "seconds", "required": True, "schema": {"type": "integer", "minimum": 0}}


def complete(document: dict[str, Any], languages: Sequence[str], bounds: Bounds | None = None) -> None:
    """Add to `document`, in place, what every operation of this API has."""
    for path, item in document["paths"].items():
        for operation in item.values():
            responses = operation["responses"]
            if path in _GRADING:
                operation["parameters"] = _PARAMETERS
            if path == "/metrics":
                responses["401"] = {"description": "A token is needed and none that is valid was given."}
            for status, response in responses.items():
                response.setdefault("headers", {})["X-Request-Id"] = _REQUEST_ID
                if status in ("429", "503"):
                    response["headers"]["Retry-After"] = _RETRY_AFTER
    schemas = document["components"]["schemas"]
    schemas["GradeRequest"]["properties"]["language"]["enum"] = list(languages)
    schemas["GradeRequest"]["oneOf"] = [
        {"required": [name], "properties": {name: {"type": "string"}}} for name in ("code", "completion")
    ]
    schemas["JudgeProgramBody"]["properties"]["language"]["enum"] = list(languages)
    most = bounds or Bounds()
    for limit in fields(Limits):
        schemas["LimitsBody"]["properties"][limit.name]["maximum"] = getattr(most.limits, limit.name)
    for name, schema in schemas.items():
        if name.endswith("TestsBody"):
            schema["properties"]["cases"]["maxItems"] = most.num_tests
