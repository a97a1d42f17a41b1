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
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from nouscoder.config import Config, VerifierSection
from nouscoder.http_server.api_keys import open_api_keys
from nouscoder.http_server.body import BODIES_OF_MANY
from nouscoder.http_server.freed_memory import held_bytes, return_freed_memory, return_large_blocks
from nouscoder.http_server.listener import WebSockets, http_context, start_apart, start_http
from nouscoder.http_server.memory_budget import MemoryBudget
from nouscoder.private_folder import PRIVATE, private_folder, refuse_foreign
from nouscoder.rpc.health import Health
from nouscoder.rpc.server import Served, run_until_stopped, start_grpc, stop_event
from nouscoder.rpc.tls import channel_credentials
from nouscoder.store.blobs import open_blobs
from nouscoder.store.tests_cache import TestsCache
from nouscoder.verifier.access.caller import CallerFilter
from nouscoder.verifier.access.grpc_gate import GrpcGate
from nouscoder.verifier.access.quotas import QuotaGrader, Quotas
from nouscoder.verifier.access.stored_tests import ClientTests, StoredTestsGrader
from nouscoder.verifier.api.capabilities import Capabilities
from nouscoder.verifier.api.compat.mcp import add_mcp
from nouscoder.verifier.api.compat.nemo_gym import add_nemo_gym
from nouscoder.verifier.api.compat.openenv import add_openenv
from nouscoder.verifier.api.compat.problem_set import ProblemSet, open_problem_set
from nouscoder.verifier.api.remote_rewards import add_remote_rm
from nouscoder.verifier.api.rest import DrainState, GradingApi, make_app, make_health_app
from nouscoder.verifier.api.run_code import CodeRunner
from nouscoder.verifier.api.schema import bodies
from nouscoder.verifier.api.servicer import FULL_NAME, STATUS_CODES, Servicer, grpc_credentials
from nouscoder.verifier.grading.grader import Grader, Grading
from nouscoder.verifier.grading.time_limits import ExclusiveRunLock
from nouscoder.verifier.grading.verdict_cache import CachedGrader
from nouscoder.verifier.jobs.service import Jobs, open_jobs
from nouscoder.verifier.judges import judge
from nouscoder.verifier.observe.audit import AuditedGrader, AuditLog
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.observe.trace_fronts import trace_fronts
from nouscoder.verifier.observe.tracing import open_tracing, traced_grader, traced_sandbox
from nouscoder.verifier.processes.share import ProcessNumber, Share
from nouscoder.verifier.sandbox import SpillOverSandbox, open_backends
from nouscoder.verifier.tools.sessions import ToolSessions

log = logging.getLogger(__name__)

# gRPC calls at once, besides the submissions that may wait for slots and mathematics: streams, tool sessions, health
_MORE_CALLS = 1024
# Times the bytes of bodies, what they become included, above which the process takes no more of gRPC messages
_MEMORY_OF_BODIES = 4


class Parts:
    """The parts of one grading process. `grader` is `core` behind everything that a submission passes."""

    jobs: Jobs | None
    problems: ProblemSet

    def __init__(
        self,
        section: VerifierSection,
        share: Share | None,
        sandbox: SpillOverSandbox,
        registry: CollectorRegistry,
        metrics: VerifierMetrics,
        stack: AsyncExitStack,
    ) -> None:
        """All but jobs and problems, over a `sandbox` that has been started. `stack` closes them."""
        self.section, self.sandbox, self.registry = section, sandbox, registry
        self.tracing = open_tracing(section.tracing_endpoint, stack)
        run_lock, quotas = (share.run_lock, share.quotas) if share else (ExclusiveRunLock(), Quotas())
        self.core = Grader(traced_sandbox(sandbox, self.tracing), metrics, section, run_lock)
        self.core.follow(sandbox)
        stack.push_async_callback(self.core.close)
        self.cache = TestsCache(section.tests.folder, section.tests.cache_bytes)
        stack.callback(self.cache.close)
        self.audit = AuditLog(Path(section.audit_log), section.audit_source) if section.audit_log else None
        if self.audit is not None:
            stack.callback(self.audit.close)
        place = section.tests.store or str(private_folder(section.tests.folder / "stored"))
        if "://" not in place:
            with suppress(OSError):  # said when tests are stored
                Path(place).mkdir(PRIVATE, parents=True, exist_ok=True)
                refuse_foreign(Path(place))
        self.client_tests = ClientTests(open_blobs(place), self.cache, section.tests)
        # What a submission passes, from the last to the first: cache, quotas, audit, stored tests.
        grader = traced_grader(self.core, self.tracing)
        if self.section.cache_entries:
            grader = CachedGrader(grader, metrics, self.section.cache_entries)
        grader = QuotaGrader(grader, quotas)
        if self.audit is not None:
            grader = AuditedGrader(grader, self.audit)
        self.grader = StoredTestsGrader(grader, self.client_tests)
        self.runner = CodeRunner(self.core, quotas, self.audit)
        is_divided = section.max_bodies_bytes >= 2 * BODIES_OF_MANY * section.max_body_bytes
        self.budget = MemoryBudget(section.max_bodies_bytes, is_divided=is_divided)
        self.api_keys = open_api_keys(section.tokens_file)
        self.tools: ToolSessions | None = None
        if section.tools.sessions:
            num_slots = self.core.num_slots
            self.tools = ToolSessions(sandbox, num_slots, run_lock, quotas, metrics, section.tools, self.audit)

    @property
    def isolation(self) -> tuple[str, ...]:
        """The active isolation layers, if the backend names them."""
        return tuple(getattr(self.sandbox, "isolation", ()))

    def reload(self) -> None:
        """What SIGHUP does: read the API keys again, and open the audit log anew."""
        self.api_keys.reload()
        if self.audit is not None:
            self.audit.reopen()

    def app(self, page: CollectorRegistry, drain_state: DrainState) -> GradingApi:
        """The REST API with the protocols of other projects, and with `page` as the page of metrics."""
        section, enter = self.section, drain_state.enter
        app = make_app(
            self.grader,
            page,
            drain_state,
            section.max_body_bytes,
            api_keys=self.api_keys,
            runner=self.runner,
            client_tests=self.client_tests,
            budget=self.budget,
            hosts=section.hosts,
            capabilities=Capabilities(self.core, self.isolation),
            jobs=self.jobs,
        )
        add_nemo_gym(app, self.grader, enter, section.max_body_bytes, section.max_bodies_bytes)
        add_mcp(app, self.runner, self.problems, enter, section.max_body_bytes)
        add_openenv(app, self.problems, self.budget, enter, section.max_body_bytes)
        add_remote_rm(app, self.grader, enter, section.max_body_bytes)
        return app

    def servicer(self) -> Servicer:
        """The gRPC API."""
        return Servicer(self.grader, self.isolation, self.budget, self.tools)

    def background(self) -> list[Awaitable[None]]:
        """What runs beside the calls, until the service stops."""
        jobs = [] if self.jobs is None else [self.jobs.run()]
        return [self.client_tests.keep_sweeping(), return_freed_memory(), *jobs]


async def serve(
    config: Config, with_broker: bool = False, place: ProcessNumber | None = None, channel: socket.socket | None = None
) -> None:
    """Serve until SIGTERM. `with_broker` adds the grading worker. Raises Unusable when the host cannot run it.

    With `place` this process is one of several, and `channel` is the socket to their parent.
    """
    return_large_blocks()
    stop = stop_event()
    share = None if place is None or channel is None else Share(place, channel, stop)
    section, drain_state = config.verifier, DrainState()
    for handler in logging.getLogger().handlers:
        handler.addFilter(CallerFilter())
    async with AsyncExitStack() as stack:
        parts = await _build(section, share, stack)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, parts.reload)
        app = parts.app(share.page if share else parts.registry, drain_state)
        interceptors = trace_fronts(app, parts.tracing)
        await _start_http(section, app, drain_state, stack)
        if share is not None:
            share.serve_metrics(parts.registry, stack)
            await share.start(app, section, stack, web_sockets(section))
        stack.push_async_callback(_let_finish, parts.grader, section.drain_s)
        gate = GrpcGate(parts.api_keys, parts.budget)
        served = grpc_served(section, parts.servicer(), parts.registry, gate)
        served = replace(served, shares_address=share is not None)
        address = await start_grpc(replace(served, interceptors=[*interceptors, *served.interceptors]), stack)
        stack.callback(drain_state.start)
        stack.push_async_callback(asyncio.sleep, section.leave_s)
        if share is None:
            log.info("serving", extra={"not_served": section.not_served(with_broker)})
        else:
            share.ready()
        # Full collections would look at all that exists now, for a tenth of a second.
        gc.collect()
        gc.freeze()
        workers = _workers(config, parts.grader, parts.cache, with_broker)
        workers.append(gate.bound_memory(held_bytes() + _MEMORY_OF_BODIES * section.max_bodies_bytes, address))
        await run_until_stopped(stop, *parts.background(), *workers)


async def _build(section: VerifierSection, share: Share | None, stack: AsyncExitStack) -> Parts:
    """Make the parts, and start the sandboxes. `stack` closes them."""
    registry = CollectorRegistry()
    metrics = VerifierMetrics(registry)
    metrics.scraped.threads = lambda: {"body": bodies.thread.waits, "test": judge.thread.waits}
    sandbox = open_backends(section)
    stack.push_async_callback(sandbox.close)
    scraped = metrics.scraped
    scraped.runners, scraped.replacements = lambda: sandbox.runners, lambda: sandbox.replacements
    scraped.backends = lambda: sandbox.uses
    await sandbox.start()
    parts = Parts(section, share, sandbox, registry, metrics, stack)
    parts.jobs = await stack.enter_async_context(
        open_jobs(section.jobs, parts.grader, parts.budget, section.max_body_bytes)
    )
    parts.problems = await stack.enter_async_context(open_problem_set(section.problems, parts.grader, parts.cache))
    return parts


def web_sockets(section: VerifierSection) -> WebSockets | None:
    """What makes WebSockets, which only OpenEnv's sessions need."""
    if not section.problems:
        return None
    from nouscoder.http_server.websocket import bounded

    return bounded()


async def _start_http(section: VerifierSection, app: FastAPI, drain_state: DrainState, stack: AsyncExitStack) -> None:
    """Start the REST API and the plain health port, if configured."""
    if section.http:
        tls = http_context(section.tls)
        log.info("listening", extra={"http": await start_http(app, section.http, stack, tls, web_sockets(section))})
    if section.health:
        address = await start_apart(make_health_app(drain_state), section.health, stack)
        drain_state.beat()
        log.info("listening", extra={"health": address})


def grpc_served(section: VerifierSection, servicer: Servicer, registry: CollectorRegistry, gate: GrpcGate) -> Served:
    """How the gRPC API is served."""
    return Served(
        address=section.grpc,
        metrics_address=section.metrics,
        full_names=[FULL_NAME],
        register=servicer.add_to_server,
        registry=registry,
        drain_s=section.drain_s,
        credentials=grpc_credentials(section.tls),
        interceptors=[gate],
        status_codes=STATUS_CODES,
        max_message_bytes=min(BODIES_OF_MANY * section.max_body_bytes, section.max_bodies_bytes),
        max_calls=2 * section.max_queue + _MORE_CALLS,
        takes_compressed=False,  # a message may expand a thousandfold before anything here can count it
        health=Health(section.grpc_health),
        certificates=(section.tls.certificate,),
    )


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
