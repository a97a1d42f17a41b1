"""POST /v1/grade without the web framework, whose layers cost more than the parsing of a submission.

INVARIANT: a request to POST /v1/grade passes the same checks as any other (`GradingApi.wrap`). Its answers and faults
are those of the route that the OpenAPI document describes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from nouscoder.http_server.body import read_whole
from nouscoder.http_server.connected import while_connected
from nouscoder.verifier.access.gatekeeper import App, Receive, Scope, Send
from nouscoder.verifier.api.faults import answer_to
from nouscoder.verifier.api.parsing import parsed
from nouscoder.verifier.api.schema import answer_json, parse_submission
from nouscoder.verifier.grading.grader import Grading

PATH = "/v1/grade"


class GradeFront:
    """ASGI application that grades the body of every request."""

    def __init__(self, grader: Grading, enter: Callable[[], None], max_body_bytes: int) -> None:
        """`enter` raises when the service drains."""
        self._grader = grader
        self._enter = enter
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        try:
            body = await self.graded(scope, receive)
        except Exception as error:
            answer = answer_to(error)
            if answer is None:
                raise
            await answer(scope, receive, send)
            return
        headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def graded(self, scope: Scope, receive: Receive) -> bytes:
        """The JSON of the verdict. Raises the errors of `answer_to`."""
        self._enter()
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        body = await read_whole(declared.decode("latin-1"), receive, self._max_body_bytes)
        submission = await parsed(body, parse_submission)
        return answer_json(await while_connected(receive, self._grader.grade(submission)))


class GradingApi(FastAPI):
    """The API. Requests to POST /v1/grade go to `grade_front`, all others to the routes."""

    def __init__(self, grade_front: GradeFront, **settings: Any) -> None:
        super().__init__(**settings)
        self.grade_front = grade_front
        self._wrapped_front: App = grade_front

    def wrap(self, middleware: Callable[..., App], **options: Any) -> None:
        """Add a middleware in front of all others."""
        self.add_middleware(middleware, **options)
        self._wrapped_front = middleware(self._wrapped_front, **options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http" and scope["path"] == PATH and scope["method"] == "POST":
            await self._wrapped_front(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)
