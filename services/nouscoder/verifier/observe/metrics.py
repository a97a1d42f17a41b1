"""The verifier's Prometheus metrics (names are an interface: design.md section 8)."""

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


class FailureCause(StrEnum):
    """The cause of an infrastructure failure: the label of `verifier_internal_errors_total`."""

    SANDBOX = "sandbox"  # the backend reported an error
    SANDBOX_SILENT = "sandbox_silent"  # the backend did not answer in time
    GRADER = "grader"  # an error in the gateway itself
    JUDGE = "judge"  # a checker or an interactor failed, or a gold answer cannot be read


class _LoadCollector(Collector):
    """What waits and runs, read at each scrape, because it changes often."""

    def __init__(self) -> None:
        self.waiting = self.busy = self.slots = 0
        self.waiting_sessions = self.open_sessions = 0
        self.math: Callable[[], tuple[int, int]] = lambda: (0, 0)  # waiting and compared
        self.queue: Callable[[], tuple[float, int]] = lambda: (0.0, 0)  # age of the oldest, number of clients

    def collect(self) -> Iterator[Metric]:
        """The current values."""
        oldest_s, num_clients = self.queue()
        yield GaugeMetricFamily(f"{_PREFIX}queue_depth", "Submissions waiting for a sandbox", self.waiting)
        yield GaugeMetricFamily(f"{_PREFIX}queue_oldest_age_seconds", "Wait of the oldest waiting submission", oldest_s)
        yield GaugeMetricFamily(f"{_PREFIX}queue_clients", "Clients with a waiting submission", num_clients)
        states = {"busy": self.busy, "free": self.slots - self.busy}
        yield _gauge_by_state("sandboxes", "Sandbox slots, by state", states)
        states = {"waiting": self.waiting_sessions, "open": self.open_sessions}
        yield _gauge_by_state("tool_sessions", "Tool sessions, by state", states)
        waiting, compared = self.math()
        states = {"waiting": waiting, "compared": compared}
        yield _gauge_by_state("math", "Submissions with math tests, by state", states)


class _RunnerCollector(Collector):
    """Counts runner pods at each scrape. Every state and reason is present, with 0 if the backend has no pods."""

    def __init__(self) -> None:
        self.states: Callable[[], Mapping[str, int]] = dict
        self.replacements: Callable[[], Mapping[str, int]] = dict

    def collect(self) -> Iterator[Metric]:
        """The current values."""
        states, replaced = self.states(), self.replacements()
        by_state = {state.value: states.get(state.value, 0) for state in RunnerState}
        yield _gauge_by_state("runners", "Runner pods, by state", by_state)
        replacements = CounterMetricFamily(
            f"{_PREFIX}runner_replacements", "Runner pods that were replaced, by reason", labels=["reason"]
        )
        for reason in Replaced:
            replacements.add_metric([reason.value], replaced.get(reason.value, 0))
        yield replacements


class _BackendCollector(Collector):
    """What each backend has done, at each scrape."""

    def __init__(self) -> None:
        self.uses: Callable[[], Mapping[str, BackendUse]] = dict

    def collect(self) -> Iterator[Metric]:
        """The current values."""
        prefix, label = f"{_PREFIX}backend_", ["backend"]
        sessions = CounterMetricFamily(f"{prefix}sessions", "Sandboxes used, by backend", labels=label)
        seconds = CounterMetricFamily(f"{prefix}seconds", "Seconds of sandboxes in use, by backend", labels=label)
        dollars = CounterMetricFamily(f"{prefix}dollars", "Cost at the configured prices, by backend", labels=label)
        limited = GaugeMetricFamily(
            f"{prefix}limited", "1 while a cap allows no further container", labels=["backend", "cap"]
        )
        starts = SummaryMetricFamily(
            f"{_PREFIX}runner_start_seconds",
            "From the creation of a runner until it can be reached, by backend",
            labels=label,
        )
        for name, use in self.uses().items():
            sessions.add_metric([name], use.submissions)
            seconds.add_metric([name], use.seconds)
            dollars.add_metric([name], use.dollars)
            starts.add_metric([name], *use.runner_starts)
            for cap in Cap:
                limited.add_metric([name, cap.value], cap.value == use.limited_by)
        yield from (sessions, seconds, dollars, limited, starts)
        yield from self._compile_caches()

    def _compile_caches(self) -> Iterator[Metric]:
        prefix, label = f"{_PREFIX}compile_cache_", ["backend"]
        hits = CounterMetricFamily(f"{prefix}hits", "Programs that were not compiled again", labels=label)
        misses = CounterMetricFamily(f"{prefix}misses", "Programs that were compiled", labels=label)
        held = GaugeMetricFamily(f"{prefix}bytes", "Disk that compiled programs take", labels=label)
        for name, use in self.uses().items():
            num_hits, num_misses, num_bytes = use.compile_cache
            hits.add_metric([name], num_hits)
            misses.add_metric([name], num_misses)
            held.add_metric([name], num_bytes)
        yield from (hits, misses, held)


class _ThreadCollector(Collector):
    """The waits for threads that do one work at a time, read at each scrape."""

    def __init__(self) -> None:
        self.waits: Callable[[], Mapping[str, tuple[int, float]]] = dict

    def collect(self) -> Iterator[Metric]:
        """The current values."""
        text = "Seconds that large bodies and large tests waited for their thread"
        waits = SummaryMetricFamily(f"{_PREFIX}thread_wait_seconds", text, labels=["for"])
        for name, (num, seconds) in self.waits().items():
            waits.add_metric([name], num, seconds)
        yield waits


def _gauge_by_state(name: str, text: str, states: Mapping[str, float]) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(f"{_PREFIX}{name}", text, labels=["state"])
    for state, value in states.items():
        gauge.add_metric([state], value)
    return gauge


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
        self._load = _LoadCollector()
        self._runners = _RunnerCollector()
        self._backends = _BackendCollector()
        self._threads = _ThreadCollector()
        for collector in (self._load, self._runners, self._backends, self._threads):
            registry.register(collector)
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

    def watch_runners(
        self, states: Callable[[], Mapping[str, int]], replacements: Callable[[], Mapping[str, int]]
    ) -> None:
        """Set the sources of the numbers of runner pods."""
        self._runners.states, self._runners.replacements = states, replacements

    def watch_backends(self, uses: Callable[[], Mapping[str, BackendUse]]) -> None:
        """Set the source of what each backend has done."""
        self._backends.uses = uses

    def watch_threads(self, waits: Callable[[], Mapping[str, tuple[int, float]]]) -> None:
        """Set the source of the waits for threads, by what waits: their number and the seconds."""
        self._threads.waits = waits

    def watch_queue(self, queue: Callable[[], tuple[float, int]]) -> None:
        """Set the source of the wait of the oldest submission, in seconds, and the number of clients that wait."""
        self._load.queue = queue

    def watch_math(self, load: Callable[[], tuple[int, int]]) -> None:
        """Set the source of the numbers of submissions with math tests that wait, and that are compared."""
        self._load.math = load

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
        self._load.waiting_sessions, self._load.open_sessions = waiting, open_

    def failed(self, cause: FailureCause) -> None:
        """Count an infrastructure failure."""
        self._failures[cause].inc()

    def load(self, waiting: int, busy: int, slots: int) -> None:
        """Set the number of waiting submissions, busy slots and all slots."""
        self._load.waiting, self._load.busy, self._load.slots = waiting, busy, slots
