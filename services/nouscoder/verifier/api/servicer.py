"""The gRPC API: handlers convert, call the grader and convert.

INVARIANT: an answer is counted in the memory budget before it is handed to gRPC, and until the call has ended.

A server cannot end a call whose client takes no answer: gRPC for Python has no such function. (It closes a connection
that answers no pings, within a minute.) So a client can keep the bytes of an answer counted. Therefore gRPC's answers
have a part of the budget, and leave the rest to other requests.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path

import grpc

from nouscoder.config import TlsSection
from nouscoder.domain.submission import Limits, Submission, Tests, TestsReference
from nouscoder.domain.verdict import Verdict
from nouscoder.formats.json_values import MAX_WEIGHT, ValueCount, json_weight, without_collections
from nouscoder.http_server.listener import checked_context, files_of
from nouscoder.http_server.memory_budget import MemoryBudget, Reservation
from nouscoder.rpc.convert import InvalidMessage
from nouscoder.rpc.pairs import ANSWER, LIMITS, OUTCOME, SUBMISSION, VERDICT, tests_from, tests_from_text
from nouscoder.rpc.tls import following
from nouscoder.store.blobs import BlobsUnavailable
from nouscoder.v1 import verdict_pb2, verifier_pb2, verifier_pb2_grpc
from nouscoder.verifier.access.caller import current_caller
from nouscoder.verifier.api.schema import bodies, compact
from nouscoder.verifier.api.streaming import grade_events, grade_patiently, map_concurrently, while_full
from nouscoder.verifier.api.tests_upload import tests_of_message
from nouscoder.verifier.grading.grader import Grading, QueueFull
from nouscoder.verifier.grading.validation import Bounds, InvalidSubmission, TooLarge
from nouscoder.verifier.toolchains.languages import installed
from nouscoder.verifier.tools.sessions import InterpreterFailed, SessionOver, ToolSessions, ToolsOff

SHARE = 0.25  # of the memory budget
FULL_NAME = "nouscoder.v1.VerifierService"
_FIRST_CALL_S = 5.0
_Context = grpc.aio.ServicerContext[object, object]
STATUS_CODES: dict[type[Exception], grpc.StatusCode] = {
    InvalidSubmission: grpc.StatusCode.INVALID_ARGUMENT,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    BlobsUnavailable: grpc.StatusCode.UNAVAILABLE,
    ToolsOff: grpc.StatusCode.FAILED_PRECONDITION,
    SessionOver: grpc.StatusCode.ABORTED,
    InterpreterFailed: grpc.StatusCode.UNAVAILABLE,
}


class Servicer(verifier_pb2_grpc.VerifierServiceServicer):
    """The gRPC API: convert, grade, convert. A cancelled call cancels its grading, which frees the sandbox."""

    def __init__(
        self,
        grader: Grading,
        isolation: tuple[str, ...],
        budget: MemoryBudget,
        tools: ToolSessions | None = None,
    ) -> None:
        """Without `tools`, Interpret is refused."""
        self._grader = grader
        self._isolation = isolation
        self._budget = budget
        self._answers = budget.part(SHARE)
        self._tools = tools

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Have `server` answer the calls of verifier.proto."""
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(self, server)

    async def Grade(  # noqa: N802
        self, request: verifier_pb2.GradeRequest, context: _Context
    ) -> verifier_pb2.GradeResponse:
        """Grade one submission."""
        await _send_request_id(context)
        verdict = await self._grader.grade(await _submission(request.submission))
        response = verifier_pb2.GradeResponse(verdict=VERDICT.to(verdict))
        await (
            Reservation(self._answers.of_client(current_caller().share))
            .until_end_of(context)
            .add_answer(response.ByteSize())
        )
        return response

    async def GradeStream(  # noqa: N802
        self, request: verifier_pb2.GradeStreamRequest, context: _Context
    ) -> AsyncIterator[verifier_pb2.GradeStreamResponse]:
        """Grade one submission and stream the outcome of each test."""
        await _send_request_id(context)
        submission = await _submission(request.submission)
        answers = Reservation(self._answers.of_client(current_caller().share)).until_end_of(context)
        async with aclosing(grade_events(self._grader, submission)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Verdict):
                    answer = verifier_pb2.GradeStreamResponse(verdict=VERDICT.to(event))
                else:
                    answer = verifier_pb2.GradeStreamResponse(outcome=OUTCOME.to(event))
                await answers.add_answer(answer.ByteSize())
                yield answer

    async def GradeBatch(  # noqa: N802
        self, request_iterator: AsyncIterator[verifier_pb2.GradeBatchRequest], context: _Context
    ) -> AsyncIterator[verifier_pb2.GradeBatchResponse]:
        """Grade many submissions. A request is read only when there is room for it, in slots and in memory."""
        await _send_request_id(context)
        sent = Reservation(self._answers.of_client(current_caller().share)).until_end_of(context)
        with self._budget.of_client(current_caller().share).request() as reservation:

            async def grade(request: verifier_pb2.GradeBatchRequest) -> verifier_pb2.GradeBatchResponse:
                try:
                    verdict = await grade_patiently(self._grader, await _submission_of_batch(request))
                    return verifier_pb2.GradeBatchResponse(request_id=request.request_id, verdict=VERDICT.to(verdict))
                finally:
                    reservation.release(request.ByteSize())

            answers = map_concurrently(_counted(request_iterator, reservation), grade, 2 * self._grader.num_slots)
            async with aclosing(answers) as closing:  # type: ignore[type-var]
                async for answer in closing:
                    await sent.add_answer(answer.ByteSize())
                    yield answer

    async def Interpret(  # noqa: N802
        self, request_iterator: AsyncIterator[verifier_pb2.InterpretRequest], context: _Context
    ) -> AsyncIterator[verifier_pb2.InterpretResponse]:
        """A tool session. It ends with the call, whatever ends that."""
        await _send_request_id(context)
        sent = Reservation(self._answers.of_client(current_caller().share)).until_end_of(context)
        if self._tools is None:
            with suppress(TimeoutError):  # a client that is still sending its first call would not see the reason
                async with asyncio.timeout(_FIRST_CALL_S):
                    await anext(request_iterator, None)
            raise ToolsOff("this verifier has no tool sessions: set verifier.tools.sessions")
        async with self._tools.open() as session, aclosing(session.calls(request_iterator)) as calls:
            async for request in calls:
                with self._budget.of_client(current_caller().share).request() as reservation:
                    reservation.add(request.ByteSize())
                    answer = await session.run(request.code)
                message = ANSWER.to(answer)
                await sent.add_answer(message.ByteSize())
                await session.deliver(functools.partial(context.write, message))
        by_generator: tuple[verifier_pb2.InterpretResponse, ...] = ()  # gRPC waits for its client outside of it
        for message in by_generator:
            yield message

    async def Capabilities(  # noqa: N802
        self, request: verifier_pb2.CapabilitiesRequest, context: _Context
    ) -> verifier_pb2.CapabilitiesResponse:
        """The languages, slots and limits of this service."""
        return verifier_pb2.CapabilitiesResponse(
            languages=tuple(installed()),
            backend=self._grader.backend,
            num_slots=self._grader.num_slots,
            isolation=self._isolation,
            default_limits=LIMITS.to(Limits()),
        )


async def _send_request_id(context: _Context) -> None:
    """Send the request id at once, so that the client knows it whatever the outcome of the call."""
    await context.send_initial_metadata((("x-request-id", current_caller().request_id),))


async def _counted(
    requests: AsyncIterator[verifier_pb2.GradeBatchRequest], reservation: Reservation
) -> AsyncIterator[verifier_pb2.GradeBatchRequest]:
    """Each request once the memory budget has room for it; the next one is read after that. Raises QueueFull."""
    async for request in requests:

        async def reserve(num_bytes: int = request.ByteSize()) -> None:
            reservation.add(num_bytes)

        await while_full(reserve)
        yield request


async def _submission_of_batch(request: verifier_pb2.GradeBatchRequest) -> Submission:
    """The submission of one request of a batch. Raises InvalidMessage that names the request."""
    try:
        return await _submission(request.submission)
    except InvalidMessage as error:
        raise InvalidMessage(f"{request.request_id:.100}: {error}") from error


async def _submission(message: verdict_pb2.Submission) -> Submission:
    """Protocol -> domain. Large tests are not converted on the event loop. Even asking for their size takes long."""
    tests = message.tests
    match tests.WhichOneof("kind"):
        case "json":
            return await _submission_of_json(message, tests.json)
        case "call":
            data = await asyncio.to_thread(tests.SerializeToString)
            return await bodies.parsed(
                data,
                lambda _, values: compact(SUBMISSION.of(message), values),
                weigh=lambda _: _weight_of_calls(tests),
            )
        case None | "digest":
            return SUBMISSION.of(message)
        case _:
            return SUBMISSION.of(message, tests=await asyncio.to_thread(_tests_from, tests))


def _weight_of_calls(message: verdict_pb2.Tests) -> int:
    """The weight (formats/json_values.py) of all JSON texts of calls; above MAX_WEIGHT, some weight above it."""
    weight = 0
    for case in message.call.cases:
        weight += sum(json_weight(text, MAX_WEIGHT) for text in (case.args_json, case.kwargs_json, case.expected_json))
        if weight > MAX_WEIGHT:
            break
    return weight


async def _submission_of_json(message: verdict_pb2.Submission, text: bytes) -> Submission:
    """A submission whose tests are JSON. Another process converts those with more values than may be decoded here."""

    def parse(text: bytes, values: ValueCount) -> Submission:
        return compact(SUBMISSION.of(message, tests=tests_from_text(text)), values)

    try:
        return await bodies.parsed(text, parse)
    except TooLarge:
        found, digest = await tests_of_message(text)
        return replace(SUBMISSION.of(message, tests=found), tests_digest=digest)


def _tests_from(message: verdict_pb2.Tests) -> Tests | TestsReference:
    """Protocol -> domain. Raises InvalidMessage, and InvalidSubmission for more tests than may be graded."""
    num_tests = len(getattr(message, str(message.WhichOneof("kind"))).cases)
    if num_tests > Bounds().num_tests:
        raise InvalidSubmission("tests.cases", f"may hold at most {Bounds().num_tests} tests")
    with without_collections():
        return tests_from(message)


# TLS, with the configuration section that the HTTP API has too.


def grpc_credentials(section: TlsSection) -> grpc.ServerCredentials | None:
    """The credentials of the gRPC API; None when TLS is off. Raises Unusable."""
    if not section.certificate:
        return None

    def configuration() -> grpc.ServerCertificateConfiguration:
        checked_context(section)  # this checks the files more strictly than gRPC does
        pair = (Path(section.key).read_bytes(), Path(section.certificate).read_bytes())
        authority = Path(section.client_ca).read_bytes() if section.client_ca else None
        return grpc.ssl_server_certificate_configuration([pair], authority)

    return following(files_of(section), configuration, needs_client=bool(section.client_ca))
