"""The grading service: gRPC and REST over one grader. It runs alone, or also grades the rollouts of a broker.

Drain on SIGTERM: leases of the broker are given back at once. For `leave_s` seconds the APIs still take calls. Then the
REST API answers 503 and gRPC accepts no new call. Submissions in progress have `drain_s` seconds to get their verdict.
Then the sandboxes close.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from nouscoder.config import Config, VerifierSection
from nouscoder.http_server.api_keys import open_api_keys
from nouscoder.http_server.listener import start_http
from nouscoder.http_server.tls import http_context
from nouscoder.rpc.health import Health
from nouscoder.rpc.server import Served, run_until_stopped, start_grpc, stop_event
from nouscoder.rpc.tls import channel_credentials
from nouscoder.store.blobs import open_blobs
from nouscoder.store.tests_cache import TestsCache
from nouscoder.v1 import verifier_pb2_grpc
from nouscoder.verifier.access.caller import CallerFilter
from nouscoder.verifier.access.client_tests import ClientTests, StoredTestsGrader
from nouscoder.verifier.access.grpc_gate import GrpcGate
from nouscoder.verifier.access.memory_budget import MemoryBudget
from nouscoder.verifier.access.quotas import QuotaGrader, Quotas
from nouscoder.verifier.api import parsing
from nouscoder.verifier.api.capabilities import Capabilities
from nouscoder.verifier.api.rest import DrainState, make_app, make_health_app
from nouscoder.verifier.api.run_code import CodeRunner
from nouscoder.verifier.api.servicer import FULL_NAME, STATUS_CODES, Servicer
from nouscoder.verifier.api.tls import grpc_credentials
from nouscoder.verifier.grading import long_work
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.grading.grader_decorator import Grading
from nouscoder.verifier.grading.verdict_cache import CachedGrader
from nouscoder.verifier.jobs.service import open_jobs
from nouscoder.verifier.observe import full_collections
from nouscoder.verifier.observe.audit import AuditedGrader, AuditLog
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.observe.tracing import open_tracing, traced_grader, traced_sandbox
from nouscoder.verifier.observe.tracing_fronts import trace_fronts
from nouscoder.verifier.processes.large_blocks import return_large_blocks
from nouscoder.verifier.processes.share import Share
from nouscoder.verifier.processes.shares import Place
from nouscoder.verifier.sandbox import Sandbox, SpillOverSandbox, open_backends
from nouscoder.verifier.settings import cache_folder, grading_policy, not_served, sandbox_config, tool_policy
from nouscoder.verifier.tools.sessions import ToolSessions

log = logging.getLogger(__name__)

_MORE_CALLS = 1024  # gRPC calls at once, besides the submissions that may wait: streams, tool sessions, health


async def serve(
    config: Config, with_broker: bool = False, place: Place | None = None, channel: socket.socket | None = None
) -> None:
    """Serve until SIGTERM. `with_broker` adds the grading worker. Raises Unusable when the host cannot run it.

    With `place` this process is one of several, and `channel` is the socket to their parent.
    """
    return_large_blocks()
    stop = stop_event()
    share = None if place is None or channel is None else Share(place, channel, stop)
    section = config.verifier
    for handler in logging.getLogger().handlers:
        handler.addFilter(CallerFilter())
    registry = CollectorRegistry()
    metrics = VerifierMetrics(registry)
    metrics.watch_threads(lambda: {"body": parsing.thread.waits, "test": long_work.thread.waits})
    async with AsyncExitStack() as stack:
        sandbox = await _start_sandbox(section, metrics, stack)
        tracing = open_tracing(section.tracing_endpoint, stack)
        run_lock, quotas = (share.run_lock, share.quotas) if share else (None, Quotas())
        core = Grader(traced_sandbox(sandbox, tracing), metrics, grading_policy(section), run_lock)
        core.follow(sandbox)
        cache = TestsCache(cache_folder(section.tests), section.tests.cache_bytes)
        stack.callback(cache.close)
        api_keys = open_api_keys(section.tokens_file)
        audit = _open_audit(section, stack)
        client_tests = _client_tests(section, cache)
        grader = _grader(section, traced_grader(core, tracing), metrics, quotas, audit, client_tests)
        on_hangup = [api_keys.reload, *([] if audit is None else [audit.reopen])]
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: [act() for act in on_hangup])
        drain_state = DrainState()
        runner = CodeRunner(core, quotas, audit)
        budget = MemoryBudget(section.max_bodies_bytes)
        tools = _tools(section, sandbox, core, quotas, metrics, audit)
        capabilities = Capabilities(core, _isolation(sandbox))
        jobs = await stack.enter_async_context(open_jobs(section.jobs, grader, budget, section.max_body_bytes))
        parts = (api_keys, runner, client_tests, budget, section.hosts, capabilities, jobs)
        app = make_app(grader, share.page if share else registry, drain_state, section.max_body_bytes, *parts)
        interceptors = trace_fronts(app, tracing)
        await _start_http(section, app, drain_state, stack)
        if share is not None:
            share.serve_metrics(registry, stack)
            await share.start(app, section, stack)
        stack.push_async_callback(_let_finish, grader, section.drain_s)
        gate = GrpcGate(api_keys, budget)
        served = grpc_served(section, Servicer(grader, _isolation(sandbox), budget, tools), registry, gate)
        served = replace(served, shares_address=share is not None)
        await start_grpc(replace(served, interceptors=[*interceptors, *served.interceptors]), stack)
        stack.callback(drain_state.start)
        stack.push_async_callback(asyncio.sleep, section.leave_s)
        if share is None:
            log.info("serving", extra={"not_served": not_served(section, with_broker)})
        else:
            share.ready()
        _keep_what_is_loaded()
        work = [client_tests.keep_sweeping(), full_collections.run(budget), *([] if jobs is None else [jobs.run()])]
        await run_until_stopped(stop, *work, *_workers(config, grader, cache, with_broker))


def _keep_what_is_loaded() -> None:
    """Full collections ignore what exists now. They would look at all of it, for a tenth of a second."""
    gc.collect()
    gc.freeze()


async def _start_sandbox(section: VerifierSection, metrics: VerifierMetrics, stack: AsyncExitStack) -> SpillOverSandbox:
    """The backends, whose runners and uses `metrics` shows. Raises SandboxUnavailable."""
    sandbox = open_backends(sandbox_config(section))
    stack.push_async_callback(sandbox.close)
    metrics.watch_runners(lambda: sandbox.runners, lambda: sandbox.replacements)
    metrics.watch_backends(lambda: sandbox.uses)
    await sandbox.start()
    return sandbox


def _open_audit(section: VerifierSection, stack: AsyncExitStack) -> AuditLog | None:
    """The audit log, if it is configured."""
    if not section.audit_log:
        return None
    audit = AuditLog(Path(section.audit_log), section.audit_source)
    stack.callback(audit.close)
    return audit


def _client_tests(section: VerifierSection, cache: TestsCache) -> ClientTests:
    """The tests that clients store."""
    blobs = open_blobs(section.tests.store or str(cache_folder(section.tests) / "stored"))
    return ClientTests(blobs, cache, section.tests.client_bytes, section.tests.expiry_s, section.tests.store_bytes)


def _grader(
    section: VerifierSection,
    grader: Grading,
    metrics: VerifierMetrics,
    quotas: Quotas,
    audit: AuditLog | None,
    client_tests: ClientTests,
) -> Grading:
    """`grader` behind what a submission passes, from the last to the first: cache, quotas, audit, stored tests."""
    if section.cache_entries:
        grader = CachedGrader(grader, metrics, section.cache_entries)
    grader = QuotaGrader(grader, quotas)
    if audit is not None:
        grader = AuditedGrader(grader, audit)
    return StoredTestsGrader(grader, client_tests)


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


def grpc_served(section: VerifierSection, servicer: Servicer, registry: CollectorRegistry, gate: GrpcGate) -> Served:
    """How the gRPC API is served."""
    return Served(
        address=section.grpc,
        metrics_address=section.metrics,
        full_names=[FULL_NAME],
        register=lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server),
        registry=registry,
        drain_s=section.drain_s,
        credentials=grpc_credentials(section.tls),
        interceptors=[gate],
        status_codes=STATUS_CODES,
        max_message_bytes=section.max_body_bytes,
        max_calls=section.max_queue + _MORE_CALLS,
        takes_compressed=False,  # a message may expand a thousandfold before anything here can count it
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
