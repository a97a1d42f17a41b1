"""The REST calls of SandboxFusion, so that its clients work unchanged. Handlers convert, call and convert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Scope

from nouscoder.http_server.body import read_body
from nouscoder.http_server.connected import while_connected
from nouscoder.verifier.access.count_memory import add_answer
from nouscoder.verifier.api.faults import FAULTS, Absent, Draining, fault
from nouscoder.verifier.api.json_pieces import BYTES_PER_CHAR, MAX_PIECE_BYTES, json_pieces
from nouscoder.verifier.api.parsing import parsed
from nouscoder.verifier.api.run_code import CodeRunner, RunCodeAnswer, parse_run_code
from nouscoder.verifier.api.schema import Fault
from nouscoder.verifier.api.submit import NO_DATA_SETS, NO_JUPYTER, EvalResult, evaluated, submitted_answer
from nouscoder.verifier.grading.grader import Grading, QueueFull
from nouscoder.verifier.sandbox.base import CompileStarved

_JSON = "application/json"
_HEAD_BYTES = 1024  # of an answer to /run_code: all but its texts
_REF = "#/components/schemas/{model}"
_RUN_FAULTS = {status: fault for status, fault in FAULTS.items() if status not in (429, 503, 504)} | {
    504: {"model": Fault, "description": "No slot, CPU or memory in time, or the X-Deadline-S has passed: retry."}
}


def add_run_code(app: FastAPI, runner: CodeRunner, enter: Callable[[], None], max_body_bytes: int) -> None:
    """Add /run_code. `enter` raises when the service drains."""
    request_schema = {"$ref": _REF.format(model="RunCodeRequest")}
    extra = {"requestBody": {"required": True, "content": {_JSON: {"schema": request_schema}}}}

    @app.post("/run_code", response_model=RunCodeAnswer, responses=_RUN_FAULTS, openapi_extra=extra)
    async def run_code(request: Request) -> Response:
        """Run one program once, like SandboxFusion."""
        try:
            enter()
            run_request = await parsed(await read_body(request, max_body_bytes), parse_run_code)
            answer = await while_connected(request.receive, runner.run(run_request))
            return await _counted(request.scope, answer)
        except (QueueFull, Draining, CompileStarved) as error:
            # The callers of this path repeat only a 504 (run_code.py).
            return fault(504, str(error) or "the service is draining", **{"Retry-After": "1"})


async def _counted(scope: Scope, answer: RunCodeAnswer) -> Response:
    """The answer, counted in the memory budget before it is JSON. Raises MemoryBudgetExceeded."""
    most_bytes = _HEAD_BYTES + BYTES_PER_CHAR * answer.memory_bytes
    if most_bytes <= MAX_PIECE_BYTES:
        await add_answer(scope, most_bytes)
        return Response(answer.model_dump_json(), media_type=_JSON)
    await add_answer(scope, answer.memory_bytes + MAX_PIECE_BYTES)
    return StreamingResponse(json_pieces(answer.model_dump()), media_type=_JSON)


def add_submit(app: FastAPI, grader: Grading, enter: Callable[[], None], max_body_bytes: int) -> None:
    """Add /submit, and a 501 for what only SandboxFusion has. `enter` raises when the service drains."""
    schema = {"$ref": _REF.format(model="SubmitRequest")}
    extra = {"requestBody": {"required": True, "content": {_JSON: {"schema": schema}}}}
    absent: dict[int | str, dict[str, Any]] = {
        501: {"model": Fault, "description": "SandboxFusion has this, the service does not."}
    }

    @app.post("/submit", response_model=EvalResult, responses=FAULTS | absent, openapi_extra=extra)
    async def submit(request: Request) -> Response:
        """Grade an answer with tests in the request, like SandboxFusion."""
        enter()
        sent = await parsed(await read_body(request, max_body_bytes), submitted_answer)
        answer = await while_connected(request.receive, evaluated(grader, sent))
        return Response(answer.model_dump_json(), media_type=_JSON)

    def refuse(path: str, detail: str) -> None:
        @app.post(path, status_code=501, response_model=Fault, response_description="The service does not have this.")
        async def absent_call() -> Response:
            """Says what to use instead."""
            raise Absent(detail)

    refuse("/run_jupyter", NO_JUPYTER)
    refuse("/get_prompts", NO_DATA_SETS)
    refuse("/get_prompt_by_id", NO_DATA_SETS)
