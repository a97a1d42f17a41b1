"""The Model Context Protocol at /mcp: streamable HTTP, without sessions, each answer one JSON object.

Both generations are spoken. Until 2025-11-25 a client begins with `initialize`. From 2026-07-28 on each request says in
`params._meta` and in its headers which version it is of, and `server/discover` tells what there is. An unknown version
is refused with the list of known ones.

The tools are in mcp_tools.py. What a caller or the service does wrong is the error of a tool, which a model can read.

INVARIANT: no call needs what an earlier one left, so any process or replica may answer it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fastapi import FastAPI, Request, Response
from pydantic import ValidationError

from nouscoder import __version__
from nouscoder.errors import did_you_mean
from nouscoder.formats.body import first_fault
from nouscoder.formats.json_values import ValueCount, json_value, with_whole_characters
from nouscoder.http_server.body import read_body, while_connected
from nouscoder.http_server.memory_budget import add_answer
from nouscoder.store.blobs import BlobsUnavailable
from nouscoder.verifier.api.compat.mcp_tools import TOOLS, Services, ToolError
from nouscoder.verifier.api.compat.problem_set import NoSuchProblem, ProblemSet
from nouscoder.verifier.api.faults import FAULTS, Draining
from nouscoder.verifier.api.run_code import CodeRunner
from nouscoder.verifier.api.schema import bodies
from nouscoder.verifier.api.streaming import NotGraded
from nouscoder.verifier.grading.grader import QueueFull
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.sandbox.base import CompileStarved

VERSION = "2026-07-28"  # the newest that is spoken
PATH = "/mcp"
_HANDSHAKE = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
_VERSIONS = (*_HANDSHAKE, VERSION)
_META = "io.modelcontextprotocol/"
_INSTRUCTIONS = (
    "Runs programs in a sandbox without network. list_problems has tasks; grade a program on their public tests."
)
_PARSE, _REQUEST, _METHOD, _PARAMS, _HEADERS, _UNSUPPORTED = -32700, -32600, -32601, -32602, -32020, -32022
_STATUS = {_METHOD: 404}  # of the newer generation; others: 400
# What the document of the API says.
_ANSWERS: dict[int | str, dict[str, Any]] = {
    202: {"description": "A notification: it gets no answer."},
    400: {"description": "An error of JSON-RPC: no such message or version."},
    404: {"description": "An error of JSON-RPC: the method is not known."},
}
_FIELDS = {
    "jsonrpc": {"const": "2.0"},
    "method": {"type": "string"},
    "params": {"type": ["object", "null"]},
    "id": {"type": ["string", "integer"]},
}
_MESSAGE = {"type": "object", "required": ["jsonrpc", "method"], "properties": _FIELDS}
_REQUEST_BODY = {"required": True, "content": {"application/json": {"schema": _MESSAGE}}}


async def _called(services: Services, params: Mapping[str, Any], enter: Callable[[], None]) -> dict[str, Any]:
    """The result of tools/call. Raises _Refused for an unknown tool."""
    name = params.get("name")
    if not isinstance(name, str) or name not in TOOLS:
        near = did_you_mean(name, TOOLS) if isinstance(name, str) else ""
        raise _Refused(_PARAMS, f"there is no tool {name!r:.60}{near} (tools: {', '.join(TOOLS)})")
    tool = TOOLS[name]
    try:
        enter()
        asked = tool.asked.model_validate(params.get("arguments") or {})
        answer = (await tool.call(services, asked)).model_dump(mode="json")
    except ValidationError as error:
        return _failed(": ".join(first_fault(error)))
    except Draining:
        return _failed("the service is draining: call again, another replica may answer")
    except _FAULTS as error:
        return _failed(str(error))
    return {"content": _text(json.dumps(answer, ensure_ascii=False)), "structuredContent": answer, "isError": False}


def _failed(message: str) -> dict[str, Any]:
    return {"content": _text(message), "isError": True}


def _text(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


_FAULTS = (ToolError, NoSuchProblem, InvalidSubmission, NotGraded, QueueFull, BlobsUnavailable, CompileStarved)


class _Refused(Exception):
    """The request gets an error of JSON-RPC."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.data = data


class _Message(NamedTuple):
    """A request, or without `id` a notification. `is_stateless`: of the newer generation."""

    id: str | int | None
    method: str
    params: dict[str, Any]
    is_stateless: bool


def add_mcp(
    app: FastAPI, runner: CodeRunner, problems: ProblemSet, enter: Callable[[], None], max_body_bytes: int
) -> None:
    """Add the endpoint. `enter` raises Draining when the service drains."""
    services = Services(runner, problems)

    @app.post(PATH, responses={**FAULTS, **_ANSWERS}, openapi_extra={"requestBody": _REQUEST_BODY})
    @app.post(f"{PATH}/", include_in_schema=False)
    async def call(request: Request) -> Response:
        """Answers one message of JSON-RPC."""
        body = await read_body(request, max_body_bytes)
        record = None
        try:
            record = await _record(body)
            message = _message(record, request.headers)
            if message.id is None:
                return Response(status_code=202)
            result = await while_connected(request.receive, _answered(services, message, enter))
        except _Refused as error:
            return await _answer(request, _refusal(error, _id_of(record)), _status(error, request))
        return await _answer(request, {"jsonrpc": "2.0", "id": message.id, "result": result}, 200)

    @app.get(PATH, include_in_schema=False)
    @app.delete(PATH, include_in_schema=False)
    async def no_session(_: Request) -> Response:
        """There is no stream of the server's own, and no session to end."""
        return Response(status_code=405, headers={"Allow": "POST"})


async def _record(body: bytes) -> Any:
    try:
        return await bodies.parsed(body, _parsed)
    except InvalidSubmission as error:  # a key that is given twice
        raise _Refused(_REQUEST, str(error)) from None


def _parsed(body: bytes, _: ValueCount) -> Any:
    try:
        return json_value(with_whole_characters(body))
    except (ValueError, RecursionError) as error:
        raise _Refused(_PARSE, f"not JSON: {error}") from None


def _id_of(record: Any) -> Any:
    given = record.get("id") if isinstance(record, dict) else None
    return given if type(given) in (str, int) else None


def _message(record: Any, headers: Mapping[str, str]) -> _Message:
    """The message. Raises _Refused for one that is none, or of an unknown version."""
    if not isinstance(record, dict) or record.get("jsonrpc") != "2.0" or not isinstance(record.get("method"), str):
        raise _Refused(_REQUEST, "one JSON-RPC 2.0 object with a method is expected, and no batch")
    params = {} if record.get("params") is None else record["params"]
    if not isinstance(params, dict) or ("id" in record and _id_of(record) is None):
        raise _Refused(_REQUEST, "params must be an object, and id a text or an integer")
    meta = params.get("_meta")
    version = meta.get(f"{_META}protocolVersion") if isinstance(meta, dict) else None
    header = headers.get("mcp-protocol-version")
    is_stateless = version is not None or header == VERSION
    for given in (version, header):
        if given is not None and given not in _VERSIONS:
            supported = {"supported": list(_VERSIONS), "requested": given}
            raise _Refused(_UNSUPPORTED, f"version {given!r:.40} of MCP is not spoken here", supported)
    message = _Message(_id_of(record), record["method"], params, is_stateless)
    if is_stateless and message.id is not None:
        _check_headers(message, version, headers)
    return message


def _check_headers(message: _Message, version: Any, headers: Mapping[str, str]) -> None:
    """Raises _Refused where the headers, by which a proxy may route, say something else than the body."""
    if version is None:
        raise _Refused(_PARAMS, f"params._meta lacks {_META}protocolVersion, which the header names")
    wanted = {"mcp-protocol-version": version, "mcp-method": message.method}
    if message.method == "tools/call":
        wanted["mcp-name"] = message.params.get("name")
    for name, value in wanted.items():
        if headers.get(name) != value:
            raise _Refused(_HEADERS, f"the header {name} does not agree with the request")


async def _answered(services: Services, message: _Message, enter: Callable[[], None]) -> dict[str, Any]:
    """The result of a request. Raises _Refused."""
    me = {"name": "nouscoder", "version": __version__}
    can = {"tools": {"listChanged": False}}
    caching = {"ttlMs": 0, "cacheScope": "private"} if message.is_stateless else {}
    match message.method:
        case "initialize" if not message.is_stateless:
            asked = message.params.get("protocolVersion")
            version = asked if asked in _HANDSHAKE else _HANDSHAKE[-1]
            result = {"protocolVersion": version, "capabilities": can, "serverInfo": me, "instructions": _INSTRUCTIONS}
        case "server/discover" if message.is_stateless:
            result = {
                "supportedVersions": list(_VERSIONS),
                "capabilities": can,
                "instructions": _INSTRUCTIONS,
                **caching,
            }
        case "ping":
            result = {}
        case "tools/list":
            result = {
                "tools": [
                    {
                        "name": name,
                        "description": tool.about,
                        "inputSchema": tool.asked.model_json_schema(),
                        "outputSchema": tool.answer.model_json_schema(mode="serialization"),
                        "annotations": {
                            "readOnlyHint": tool.reads_only,
                            "destructiveHint": False,
                            "openWorldHint": False,
                        },
                    }
                    for name, tool in TOOLS.items()
                ],
                **caching,
            }
        case "tools/call":
            result = await _called(services, message.params, enter)
        case other:
            raise _Refused(_METHOD, f"the method {other:.60} is not known")
    return {**result, "resultType": "complete", "_meta": {f"{_META}serverInfo": me}} if message.is_stateless else result


def _refusal(error: _Refused, request_id: str | int | None) -> dict[str, Any]:
    fault = {"code": error.code, "message": str(error), **({} if error.data is None else {"data": error.data})}
    return {"jsonrpc": "2.0", "id": request_id, "error": fault}


def _status(error: _Refused, request: Request) -> int:
    """The older generation gets a 200 for a method that it does not know."""
    is_old = request.headers.get("mcp-protocol-version", _HANDSHAKE[-1]) in _HANDSHAKE
    return 200 if is_old and error.code in (_METHOD, _PARAMS) else _STATUS.get(error.code, 400)


async def _answer(request: Request, record: dict[str, Any], status: int) -> Response:
    body = json.dumps(record, ensure_ascii=False).encode("utf8", "surrogatepass")
    await add_answer(request.scope, len(body))
    return Response(body, status, media_type="application/json")
