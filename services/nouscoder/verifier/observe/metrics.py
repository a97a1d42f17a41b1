"""The verifier's Prometheus metrics (names are an interface: docs/reference/metrics.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from enum import StrEnum
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from nouscoder.domain.conversation import CallEnd
from nouscoder.domain.verdict import TestOutcome, Verdict, VerdictKind
from nouscoder.verifier.sandbox.base import BackendUse, Cap
from nouscoder.verifier.sandbox.runners.pool import Replaced, RunnerState

# The trace to which the work of this task belongs, for exemplars. It needs no OpenTelemetry.

# Hexadecimal id of the trace; "" when the request is not traced, or its trace is not sampled.
current_trace: ContextVar[str] = ContextVar("trace", default="")


def exemplar() -> dict[str, str] | None:
    """The labels of an exemplar of this task's work; None when it is not traced."""
    trace_id = current_trace.get()
    return {"trace_id": trace_id} if trace_id else None


_PREFIX = "nouscoder_verifier_"
_TEST_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60)
_WAIT_BUCKETS = (0.001, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)
_MAX_CLIENTS = 100  # with a series of their own: their names come from the file of tokens, which has no limit
_OTHER_CLIENTS = "other"
_SUBMISSION_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)


Value = TypeVar("Value", bound=StrEnum)
Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)


class FailureCause(StrEnum):
    """The cause of an infrastructure failure: the label of `verifier_internal_errors_total`."""

    SANDBOX = "sandbox"  # the backend reported an error
    SANDBOX_SILENT = "sandbox_silent"  # the backend did not answer in time
    GRADER = "grader"  # an error in the gateway itself
    JUDGE = "judge"  # a checker or an interactor failed, or a gold answer cannot be read


class _Scraped(Collector):
    """What is read at each scrape: load that changes often, and the sources that the parts of the service set.

    Every state and reason of runner pods is present, with 0 if the backend has no pods.
    """

    def __init__(self) -> None:
        self.waiting = self.busy = self.slots = 0
        self.waiting_sessions = self.open_sessions = 0
        # Submissions with math tests that wait, and that are compared.
        self.math: Callable[[], tuple[int, int]] = lambda: (0, 0)
        # The wait of the oldest submission in seconds, and the number of clients that wait.
        self.queue: Callable[[], tuple[float, int]] = lambda: (0.0, 0)
        self.runners: Callable[[], Mapping[str, int]] = dict  # by state
        self.replacements: Callable[[], Mapping[str, int]] = dict  # by reason
        self.backends: Callable[[], Mapping[str, BackendUse]] = dict
        # Waits for threads that do one work at a time, by what waits: their number and the seconds.
        self.threads: Callable[[], Mapping[str, tuple[int, float]]] = dict

    def collect(self) -> Iterator[Metric]:
        oldest_s, num_clients = self.queue()
        yield GaugeMetricFamily(f"{_PREFIX}queue_depth", "Submissions waiting for a sandbox", self.waiting)
        yield GaugeMetricFamily(f"{_PREFIX}queue_oldest_age_seconds", "Wait of the oldest waiting submission", oldest_s)
        yield GaugeMetricFamily(f"{_PREFIX}queue_clients", "Clients with a waiting submission", num_clients)
        slots = {"busy": self.busy, "free": self.slots - self.busy}
        yield _by_label(GaugeMetricFamily, "sandboxes", "Sandbox slots, by state", "state", slots)
        sessions = {"waiting": self.waiting_sessions, "open": self.open_sessions}
        yield _by_label(GaugeMetricFamily, "tool_sessions", "Tool sessions, by state", "state", sessions)
        math = dict(zip(("waiting", "compared"), self.math(), strict=True))
        yield _by_label(GaugeMetricFamily, "math", "Submissions with math tests, by state", "state", math)
        states, replaced = self.runners(), self.replacements()
        pods = {state.value: states.get(state.value, 0) for state in RunnerState}
        yield _by_label(GaugeMetricFamily, "runners", "Runner pods, by state", "state", pods)
        reasons = {reason.value: replaced.get(reason.value, 0) for reason in Replaced}
        text = "Runner pods that were replaced, by reason"
        yield _by_label(CounterMetricFamily, "runner_replacements", text, "reason", reasons)
        yield from self._backends()
        text = "Seconds that large bodies and large tests waited for their thread"
        yield _summary("thread_wait_seconds", text, "for", self.threads())

    def _backends(self) -> Iterator[Metric]:
        uses = self.backends()

        def family(kind: type[Family], name: str, text: str, value: Callable[[BackendUse], float]) -> Family:
            return _by_label(kind, name, text, "backend", {backend: value(use) for backend, use in uses.items()})

        yield family(CounterMetricFamily, "backend_sessions", "Sandboxes used, by backend", lambda use: use.submissions)
        text = "Seconds of sandboxes in use, by backend"
        yield family(CounterMetricFamily, "backend_seconds", text, lambda use: use.seconds)
        text = "Cost at the configured prices, by backend"
        yield family(CounterMetricFamily, "backend_dollars", text, lambda use: use.dollars)
        text, labels = "1 while a cap allows no further container", ["backend", "cap"]
        limited = GaugeMetricFamily(f"{_PREFIX}backend_limited", text, labels=labels)
        for name, use in uses.items():
            for cap in Cap:
                limited.add_metric([name, cap.value], cap.value == use.limited_by)
        yield limited
        text = "From the creation of a runner until it can be reached, by backend"
        starts = {name: use.runner_starts for name, use in uses.items()}
        yield _summary("runner_start_seconds", text, "backend", starts)
        text = "Programs that were not compiled again"
        yield family(CounterMetricFamily, "compile_cache_hits", text, lambda use: use.compile_cache[0])
        text = "Programs that were compiled"
        yield family(CounterMetricFamily, "compile_cache_misses", text, lambda use: use.compile_cache[1])
        text = "Disk that compiled programs take"
        yield family(GaugeMetricFamily, "compile_cache_bytes", text, lambda use: use.compile_cache[2])


def _by_label(kind: type[Family], name: str, text: str, label: str, values: Mapping[str, float]) -> Family:
    family = kind(f"{_PREFIX}{name}", text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _summary(name: str, text: str, label: str, values: Mapping[str, tuple[int, float]]) -> SummaryMetricFamily:
    summary = SummaryMetricFamily(f"{_PREFIX}{name}", text, labels=[label])
    for value, (num, total) in values.items():
        summary.add_metric([value], num, total)
    return summary


def _counter(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Counter:
    return Counter(f"{_PREFIX}{name}", text, labels, registry=registry)


def _histogram(registry: CollectorRegistry, name: str, text: str, buckets: Sequence[float]) -> Histogram:
    return Histogram(f"{_PREFIX}{name}", text, buckets=buckets, registry=registry)


def _by_value(
    registry: CollectorRegistry, name: str, text: str, label: str, values: Sequence[Value]
) -> dict[Value, Counter]:
    """A counter for each value of a label, all of which exist from the start, because finding one is slow."""
    counter = _counter(registry, name, text, label)
    return {value: counter.labels(value.value) for value in values}


class VerifierMetrics:
    """The metrics of grading. One instance per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.scraped = _Scraped()
        registry.register(self.scraped)
        self._clients: dict[str, Counter] = {}
        self._by_client = _counter(
            registry, "client_submissions", "Submissions that got a verdict, by client", "client"
        )
        self._count(_OTHER_CLIENTS, 0)
        self._cache_hits = _counter(registry, "cache_hits", "Submissions answered from the cache")
        self._extra_workers = _counter(
            registry, "extra_lanes", "Further test workers of a submission, opened on idle slots"
        )
        never = (VerdictKind.NO_CODE, VerdictKind.COMPILE_ERROR)
        of_tests = [kind for kind in VerdictKind if kind not in never]
        self._submissions = _by_value(
            registry, "submissions", "Submissions that got a verdict", "verdict", list(VerdictKind)
        )
        self._tests = _by_value(registry, "tests", "Tests run, by outcome", "outcome", of_tests)
        self._failures = _by_value(
            registry, "internal_errors", "Infrastructure failures while grading, by cause", "cause", list(FailureCause)
        )
        self._tool_calls = _by_value(
            registry, "tool_calls", "Calls of tool sessions, by how they ended", "end", list(CallEnd)
        )
        self._submission_s = _histogram(
            registry, "submission_duration_seconds", "Seconds from acceptance to verdict", _SUBMISSION_BUCKETS
        )
        self._test_s = _histogram(registry, "test_duration_seconds", "Wall seconds of one test", _TEST_BUCKETS)
        self._wait_s = _histogram(registry, "queue_wait_seconds", "Seconds that submissions waited", _WAIT_BUCKETS)

    def waited(self, wait_s: float) -> None:
        """Count the wait of a submission that got a slot."""
        self._wait_s.observe(wait_s)

    def _count(self, client: str, submissions: int = 1) -> None:
        if client not in self._clients and len(self._clients) > _MAX_CLIENTS:
            client = _OTHER_CLIENTS
        if client not in self._clients:
            self._clients[client] = self._by_client.labels(client)
        self._clients[client].inc(submissions)

    def graded(self, verdict: Verdict, client: str) -> None:
        """Count a submission of `client` that got its verdict."""
        self._count(client)
        self._submissions[verdict.kind].inc()
        self._submission_s.observe(verdict.duration_s, exemplar())
        if verdict.cached:
            self._cache_hits.inc()

    def tested(self, outcome: TestOutcome) -> None:
        """Count a test that was run."""
        self._tests[outcome.outcome].inc()
        self._test_s.observe(outcome.wall_time_s, exemplar())

    def worker_opened(self) -> None:
        """Count a further test worker of a submission."""
        self._extra_workers.inc()

    def called(self, end: CallEnd) -> None:
        """Count a call of a tool session."""
        self._tool_calls[end].inc()

    def tool_load(self, waiting: int, open_: int) -> None:
        """Set the number of waiting and of open tool sessions."""
        self.scraped.waiting_sessions, self.scraped.open_sessions = waiting, open_

    def failed(self, cause: FailureCause) -> None:
        """Count an infrastructure failure."""
        self._failures[cause].inc()

    def load(self, waiting: int, busy: int, slots: int) -> None:
        """Set the number of waiting submissions, busy slots and all slots."""
        self.scraped.waiting, self.scraped.busy, self.scraped.slots = waiting, busy, slots
