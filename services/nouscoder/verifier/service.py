"""The grading service: gRPC and REST over one grader. It runs alone, or also grades the rollouts of a broker.

Drain on SIGTERM: leases of the broker are given back at once. For `leave_s` seconds the APIs still take calls. Then the
REST API answers 503 and gRPC accepts no new call. Submissions in progress have `drain_s` seconds to get their verdict.
Then the sandboxes close.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path

import grpc
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from nouscoder.config import Config, VerifierSection
from nouscoder.domain.submission import Limits, Submission
from nouscoder.domain.verdict import Verdict
from nouscoder.http_server.api_keys import ApiKeys, open_api_keys
from nouscoder.http_server.listener import start_http
from nouscoder.http_server.tls import http_context
from nouscoder.rpc.faults import InvalidMessage
from nouscoder.rpc.health import Health
from nouscoder.rpc.interpreter_convert import answer_to
from nouscoder.rpc.server import Served, run_until_stopped, start_grpc, stop_event
from nouscoder.rpc.tls import channel_credentials
from nouscoder.rpc.verdict_convert import limits_to, outcome_to, submission_from, verdict_to
from nouscoder.store.blobs import BlobsUnavailable, open_blobs
from nouscoder.store.tests_cache import TestsCache
from nouscoder.v1 import verifier_pb2, verifier_pb2_grpc
from nouscoder.verifier.access.caller import CallerFilter, current_caller
from nouscoder.verifier.access.client_tests import ClientTests, StoredTestsGrader
from nouscoder.verifier.access.grpc_gate import GrpcGate
from nouscoder.verifier.access.memory_budget import MemoryBudget, Reservation
from nouscoder.verifier.access.quotas import QuotaGrader, Quotas
from nouscoder.verifier.api.capabilities import Capabilities
from nouscoder.verifier.api.rest import DrainState, make_app, make_health_app
from nouscoder.verifier.api.run_code import CodeRunner
from nouscoder.verifier.api.streaming import grade_events, grade_patiently, map_concurrently, while_full
from nouscoder.verifier.api.tls import grpc_credentials
from nouscoder.verifier.grading.grader import Grader, QueueFull
from nouscoder.verifier.grading.grader_decorator import Grading
from nouscoder.verifier.grading.second_runner import with_second_runner
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.grading.verdict_cache import CachedGrader
from nouscoder.verifier.jobs.service import open_jobs
from nouscoder.verifier.observe.audit import AuditedGrader, AuditLog
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.observe.tracing import open_tracing, traced_grader, traced_sandbox
from nouscoder.verifier.observe.tracing_fronts import trace_fronts
from nouscoder.verifier.sandbox import Sandbox, open_backends
from nouscoder.verifier.settings import cache_folder, grading_policy, not_served, sandbox_config, tool_policy
from nouscoder.verifier.toolchains.languages import installed
from nouscoder.verifier.tools.sessions import InterpreterFailed, SessionIdle, ToolSessions, ToolsOff, until_idle

log = logging.getLogger(__name__)

FULL_NAME = "nouscoder.v1.VerifierService"
_Context = grpc.aio.ServicerContext[object, object]
STATUS_CODES: dict[type[Exception], grpc.StatusCode] = {
    InvalidSubmission: grpc.StatusCode.INVALID_ARGUMENT,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    BlobsUnavailable: grpc.StatusCode.UNAVAILABLE,
    ToolsOff: grpc.StatusCode.FAILED_PRECONDITION,
    SessionIdle: grpc.StatusCode.DEADLINE_EXCEEDED,
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
        self._tools = tools

    async def Grade(  # noqa: N802
        self, request: verifier_pb2.GradeRequest, context: _Context
    ) -> verifier_pb2.GradeResponse:
        """Grade one submission."""
        await _send_request_id(context)
        with self._budget.request() as reservation:
            reservation.add(request.ByteSize())
            verdict = await self._grader.grade(submission_from(request.submission))
        return verifier_pb2.GradeResponse(verdict=verdict_to(verdict))

    async def GradeStream(  # noqa: N802
        self, request: verifier_pb2.GradeStreamRequest, context: _Context
    ) -> AsyncIterator[verifier_pb2.GradeStreamResponse]:
        """Grade one submission and stream the outcome of each test."""
        await _send_request_id(context)
        with self._budget.request() as reservation:
            reservation.add(request.ByteSize())
            submission = submission_from(request.submission)
            async with aclosing(grade_events(self._grader, submission)) as events:  # type: ignore[type-var]
                async for event in events:
                    if isinstance(event, Verdict):
                        yield verifier_pb2.GradeStreamResponse(verdict=verdict_to(event))
                    else:
                        yield verifier_pb2.GradeStreamResponse(outcome=outcome_to(event))

    async def GradeBatch(  # noqa: N802
        self, request_iterator: AsyncIterator[verifier_pb2.GradeBatchRequest], context: _Context
    ) -> AsyncIterator[verifier_pb2.GradeBatchResponse]:
        """Grade many submissions. A request is read only when there is room for it, in slots and in memory."""
        await _send_request_id(context)
        with self._budget.request() as reservation:

            async def grade(request: verifier_pb2.GradeBatchRequest) -> verifier_pb2.GradeBatchResponse:
                try:
                    verdict = await grade_patiently(self._grader, _submission(request))
                    return verifier_pb2.GradeBatchResponse(request_id=request.request_id, verdict=verdict_to(verdict))
                finally:
                    reservation.release(request.ByteSize())

            answers = map_concurrently(_counted(request_iterator, reservation), grade, 2 * self._grader.num_slots)
            async with aclosing(answers) as closing:  # type: ignore[type-var]
                async for answer in closing:
                    yield answer

    async def Interpret(  # noqa: N802
        self, request_iterator: AsyncIterator[verifier_pb2.InterpretRequest], context: _Context
    ) -> AsyncIterator[verifier_pb2.InterpretResponse]:
        """A tool session. It ends with the call, whatever ends that."""
        await _send_request_id(context)
        if self._tools is None:
            raise ToolsOff("this verifier has no tool sessions: set verifier.tools.sessions")
        async with self._tools.open() as session, aclosing(until_idle(request_iterator, self._tools.idle_s)) as calls:
            async for request in calls:
                with self._budget.request() as reservation:
                    reservation.add(request.ByteSize())
                    answer = await session.run(request.code)
                yield answer_to(answer)

    async def Capabilities(  # noqa: N802
        self, request: verifier_pb2.CapabilitiesRequest, context: _Context
    ) -> verifier_pb2.CapabilitiesResponse:
        """The languages, slots and limits of this service."""
        return verifier_pb2.CapabilitiesResponse(
            languages=tuple(installed()),
            backend=self._grader.backend,
            num_slots=self._grader.num_slots,
            isolation=self._isolation,
            default_limits=limits_to(Limits()),
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


def _submission(request: verifier_pb2.GradeBatchRequest) -> Submission:
    """The submission of one request of a batch. Raises InvalidMessage that names the request."""
    try:
        return submission_from(request.submission)
    except InvalidMessage as error:
        raise InvalidMessage(f"{request.request_id:.100}: {error}") from error


async def serve(config: Config, with_broker: bool = False) -> None:
    """Serve until SIGTERM. `with_broker` adds the grading worker. Raises Unusable when the host cannot run it."""
    stop = stop_event()
    section = config.verifier
    for handler in logging.getLogger().handlers:
        handler.addFilter(CallerFilter())
    registry = CollectorRegistry()
    metrics = VerifierMetrics(registry)
    async with AsyncExitStack() as stack:
        sandbox = open_backends(sandbox_config(section))
        stack.push_async_callback(sandbox.close)
        metrics.watch_runners(lambda: sandbox.runners, lambda: sandbox.replacements)
        metrics.watch_backends(lambda: sandbox.uses)
        await sandbox.start()
        tracing = open_tracing(section.tracing_endpoint, stack)
        core, quotas, audit = Grader(traced_sandbox(sandbox, tracing), metrics, grading_policy(section)), Quotas(), None
        core.follow(sandbox)
        backends, share = [one.sandbox for one in sandbox.backends], section.sandbox.second_runner_share
        traced = with_second_runner(traced_grader(core, tracing), backends, share, metrics.repeated)
        cached = CachedGrader(traced, metrics, section.cache_entries) if section.cache_entries else traced
        grader: Grading = QuotaGrader(cached, quotas)
        cache = TestsCache(cache_folder(section.tests), section.tests.cache_bytes)
        stack.callback(cache.close)
        api_keys = open_api_keys(section.tokens_file)
        on_hangup = [api_keys.reload]
        if section.audit_log:
            audit = AuditLog(Path(section.audit_log), section.audit_source)
            stack.callback(audit.close)
            on_hangup.append(audit.reopen)
            grader = AuditedGrader(grader, audit)
        blobs = open_blobs(section.tests.store or str(cache_folder(section.tests) / "stored"))
        limits = (section.tests.client_bytes, section.tests.expiry_s, section.tests.store_bytes)
        client_tests = ClientTests(blobs, cache, *limits)
        grader = StoredTestsGrader(grader, client_tests)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: [act() for act in on_hangup])
        drain_state = DrainState()
        runner = CodeRunner(core, quotas, audit)
        budget = MemoryBudget(section.max_bodies_bytes)
        tools = _tools(section, sandbox, core, quotas, metrics, audit)
        capabilities = Capabilities(core, _isolation(sandbox))
        jobs = await stack.enter_async_context(open_jobs(section.jobs, grader, budget, section.max_body_bytes))
        parts = (api_keys, runner, client_tests, budget, section.hosts, capabilities, jobs)
        app = make_app(grader, registry, drain_state, section.max_body_bytes, *parts)
        interceptors = trace_fronts(app, tracing)
        await _start_http(section, app, drain_state, stack)
        stack.push_async_callback(_let_finish, grader, section.drain_s)
        served = _served(section, Servicer(grader, _isolation(sandbox), budget, tools), registry, api_keys)
        await start_grpc(replace(served, interceptors=[*interceptors, *served.interceptors]), stack)
        stack.callback(drain_state.start)
        stack.push_async_callback(asyncio.sleep, section.leave_s)
        log.info("serving", extra={"not_served": not_served(section, with_broker)})
        work = [client_tests.keep_sweeping(), *([] if jobs is None else [jobs.run()])]
        await run_until_stopped(stop, *work, *_workers(config, grader, cache, with_broker))


def _tools(
    section: VerifierSection,
    sandbox: Sandbox,
    grader: Grader,
    quotas: Quotas,
    metrics: VerifierMetrics,
    audit: AuditLog | None,
) -> ToolSessions | None:
    """The tool sessions, if they are configured."""
    if not section.tools.sessions:
        return None
    return ToolSessions(sandbox, grader, quotas, metrics, tool_policy(section.tools), audit)


async def _start_http(section: VerifierSection, app: FastAPI, drain_state: DrainState, stack: AsyncExitStack) -> None:
    """Start the REST API and the plain health port, if configured."""
    if section.http:
        log.info("listening", extra={"http": await start_http(app, section.http, stack, http_context(section.tls))})
    if section.health:
        address = await start_http(make_health_app(drain_state), section.health, stack)
        log.info("listening", extra={"health": address})


def _served(section: VerifierSection, servicer: Servicer, registry: CollectorRegistry, api_keys: ApiKeys) -> Served:
    return Served(
        address=section.grpc,
        metrics_address=section.metrics,
        full_names=[FULL_NAME],
        register=lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server),
        registry=registry,
        drain_s=section.drain_s,
        credentials=grpc_credentials(section.tls),
        interceptors=[GrpcGate(api_keys)],
        status_codes=STATUS_CODES,
        max_message_bytes=section.max_body_bytes,
        health=Health(section.grpc_health),
        certificates=(section.tls.certificate,),
    )


def _isolation(sandbox: Sandbox) -> tuple[str, ...]:
    """The active isolation layers, if the backend names them."""
    return tuple(getattr(sandbox, "isolation", ()))


def _workers(config: Config, grader: Grading, cache: TestsCache, with_broker: bool) -> list[Awaitable[None]]:
    if not with_broker:
        return []
    from nouscoder.verifier.worker import grade_rollouts

    return [grade_rollouts(config, grader, cache, channel_credentials(config.tls))]


async def _let_finish(grader: Grading, drain_s: float) -> None:
    """Wait until every submission in progress has its verdict, for at most `drain_s` seconds."""
    log.info("draining", extra={"unfinished": grader.unfinished})
    end = asyncio.get_running_loop().time() + drain_s
    while grader.unfinished and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.05)
