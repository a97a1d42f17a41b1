"""The verifier's Prometheus metrics (names are an interface: design.md section 8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from nouscoder.domain.interpreter import CallEnd
from nouscoder.domain.verdict import TestOutcome, Verdict, VerdictKind
from nouscoder.verifier.sandbox.base import BackendUse
from nouscoder.verifier.sandbox.modal_budget import Cap
from nouscoder.verifier.sandbox.pool import Replaced, RunnerState
from nouscoder.verifier.sandbox.runner_choice import SecondRun

_TEST_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60)
_WAIT_BUCKETS = (0.001, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)
_MAX_CLIENTS = 100  # with a series of their own: their names come from the file of tokens, which has no limit
_OTHER_CLIENTS = "other"
_SUBMISSION_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)


class FailureCause(StrEnum):
    """The cause of an infrastructure failure: the label of `verifier_internal_errors_total`."""

    SANDBOX = "sandbox"  # the backend reported an error
    SANDBOX_SILENT = "sandbox_silent"  # the backend did not answer in time
    GRADER = "grader"  # an error in the gateway itself
    JUDGE = "judge"  # a checker or an interactor failed, or a gold answer cannot be read


class _RunnerCollector(Collector):
    """Counts runner pods at each scrape. Every state and reason is present, with 0 if the backend has no pods."""

    def __init__(self) -> None:
        self.states: Callable[[], Mapping[str, int]] = dict
        self.replacements: Callable[[], Mapping[str, int]] = dict

    def collect(self) -> Iterator[Metric]:
        """The current values."""
        runners = GaugeMetricFamily("nouscoder_verifier_runners", "Runner pods, by state", labels=["state"])
        states, replaced = self.states(), self.replacements()
        for state in RunnerState:
            runners.add_metric([state.value], states.get(state.value, 0))
        replacements = CounterMetricFamily(
            "nouscoder_verifier_runner_replacements", "Runner pods that were replaced, by reason", labels=["reason"]
        )
        for reason in Replaced:
            replacements.add_metric([reason.value], replaced.get(reason.value, 0))
        yield from (runners, replacements)


class _BackendCollector(Collector):
    """What each backend has done, at each scrape."""

    def __init__(self) -> None:
        self.uses: Callable[[], Mapping[str, BackendUse]] = dict

    def collect(self) -> Iterator[Metric]:
        """The current values."""
        prefix, label = "nouscoder_verifier_backend_", ["backend"]
        sessions = CounterMetricFamily(f"{prefix}sessions", "Sandboxes used, by backend", labels=label)
        seconds = CounterMetricFamily(f"{prefix}seconds", "Seconds of sandboxes in use, by backend", labels=label)
        dollars = CounterMetricFamily(f"{prefix}dollars", "Cost at the configured prices, by backend", labels=label)
        limited = GaugeMetricFamily(
            f"{prefix}limited", "1 while a cap allows no further container", labels=["backend", "cap"]
        )
        starts = SummaryMetricFamily(
            "nouscoder_verifier_runner_start_seconds",
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


class VerifierMetrics:
    """The metrics of grading. One instance per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "nouscoder_verifier_"
        submissions = Counter(f"{prefix}submissions", "Submissions that got a verdict", ["verdict"], registry=registry)
        tests = Counter(f"{prefix}tests", "Tests run, by outcome", ["outcome"], registry=registry)
        self._submission_s = Histogram(
            f"{prefix}submission_duration_seconds",
            "Seconds from acceptance to verdict",
            buckets=_SUBMISSION_BUCKETS,
            registry=registry,
        )
        self._test_s = Histogram(
            f"{prefix}test_duration_seconds", "Wall seconds of one test", buckets=_TEST_BUCKETS, registry=registry
        )
        self._load = (0, 0, 0)  # waiting, busy, slots: read at each scrape, because they change often
        queue = Gauge(f"{prefix}queue_depth", "Submissions waiting for a sandbox", registry=registry)
        queue.set_function(lambda: self._load[0])
        self._queue: Callable[[], tuple[float, int]] = lambda: (0.0, 0)
        oldest = Gauge(f"{prefix}queue_oldest_age_seconds", "Wait of the oldest waiting submission", registry=registry)
        oldest.set_function(lambda: self._queue()[0])
        clients = Gauge(f"{prefix}queue_clients", "Clients with a waiting submission", registry=registry)
        clients.set_function(lambda: self._queue()[1])
        self._wait_s = Histogram(
            f"{prefix}queue_wait_seconds", "Seconds that submissions waited", buckets=_WAIT_BUCKETS, registry=registry
        )
        self._clients: dict[str, Counter] = {}
        self._by_client = Counter(
            f"{prefix}client_submissions", "Submissions that got a verdict, by client", ["client"], registry=registry
        )
        self._count(_OTHER_CLIENTS, 0)
        sandboxes = Gauge(f"{prefix}sandboxes", "Sandbox slots, by state", ["state"], registry=registry)
        sandboxes.labels("busy").set_function(lambda: self._load[1])
        sandboxes.labels("free").set_function(lambda: self._load[2] - self._load[1])
        self._cache_hits = Counter(f"{prefix}cache_hits", "Submissions answered from the cache", registry=registry)
        self._failures = Counter(
            f"{prefix}internal_errors", "Infrastructure failures while grading, by cause", ["cause"], registry=registry
        )
        self._extra_workers = Counter(
            f"{prefix}extra_lanes", "Further test workers of a submission, opened on idle slots", registry=registry
        )
        self._tool_load = (0, 0)
        sessions = Gauge(f"{prefix}tool_sessions", "Tool sessions, by state", ["state"], registry=registry)
        sessions.labels("waiting").set_function(lambda: self._tool_load[0])
        sessions.labels("open").set_function(lambda: self._tool_load[1])
        calls = Counter(f"{prefix}tool_calls", "Calls of tool sessions, by how they ended", ["end"], registry=registry)
        self._tool_calls = {end: calls.labels(end.value) for end in CallEnd}
        second = Counter(
            f"{prefix}second_runs", "Submissions repeated on a second runner, by end", ["end"], registry=registry
        )
        self._second_runs = {end: second.labels(end.value) for end in SecondRun}
        self._runners = _RunnerCollector()
        registry.register(self._runners)
        self._backends = _BackendCollector()
        registry.register(self._backends)
        for cause in FailureCause:
            self._failures.labels(cause.value)
        self._submissions = {kind: submissions.labels(kind.value) for kind in VerdictKind}
        never = (VerdictKind.NO_CODE, VerdictKind.COMPILE_ERROR)
        self._tests = {kind: tests.labels(kind.value) for kind in VerdictKind if kind not in never}

    def watch_runners(
        self, states: Callable[[], Mapping[str, int]], replacements: Callable[[], Mapping[str, int]]
    ) -> None:
        """Set the sources of the numbers of runner pods."""
        self._runners.states, self._runners.replacements = states, replacements

    def watch_backends(self, uses: Callable[[], Mapping[str, BackendUse]]) -> None:
        """Set the source of what each backend has done."""
        self._backends.uses = uses

    def watch_queue(self, queue: Callable[[], tuple[float, int]]) -> None:
        """Set the source of the wait of the oldest submission, in seconds, and the number of clients that wait."""
        self._queue = queue

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
        self._submission_s.observe(verdict.duration_s)
        if verdict.cached:
            self._cache_hits.inc()

    def tested(self, outcome: TestOutcome) -> None:
        """Count a test that was run."""
        self._tests[outcome.outcome].inc()
        self._test_s.observe(outcome.wall_time_s)

    def worker_opened(self) -> None:
        """Count a further test worker of a submission."""
        self._extra_workers.inc()

    def called(self, end: CallEnd) -> None:
        """Count a call of a tool session."""
        self._tool_calls[end].inc()

    def tool_load(self, waiting: int, open_: int) -> None:
        """Set the number of waiting and of open tool sessions."""
        self._tool_load = (waiting, open_)

    def repeated(self, end: SecondRun) -> None:
        """Count a submission that was repeated on a second runner."""
        self._second_runs[end].inc()

    def failed(self, cause: FailureCause) -> None:
        """Count an infrastructure failure."""
        self._failures.labels(cause.value).inc()

    def load(self, waiting: int, busy: int, slots: int) -> None:
        """Set the number of waiting submissions, busy slots and all slots."""
        self._load = (waiting, busy, slots)
