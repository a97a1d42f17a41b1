"""The verifier's Prometheus metrics (names are an interface: design.md section 8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nouscoder.domain.verdict import TestOutcome, Verdict, VerdictKind
from nouscoder.verifier.sandbox.pool import Replaced, RunnerState

_TEST_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60)
_SUBMISSION_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)


class FailureCause(StrEnum):
    """Why the infrastructure failed: the label of `verifier_internal_errors_total`."""

    SANDBOX = "sandbox"  # the backend said so
    SANDBOX_SILENT = "sandbox_silent"  # the backend did not answer in time
    GRADER = "grader"  # a fault in the gateway itself
    JUDGE = "judge"  # a checker or an interactor failed, or a gold answer cannot be read


class _RunnerCollector(Collector):
    """Counts runner pods when somebody looks; every state and reason is there, at 0 where a slot is no pod."""

    def __init__(self) -> None:
        self.states: Callable[[], Mapping[str, int]] = dict
        self.replacements: Callable[[], Mapping[str, int]] = dict

    def collect(self) -> Iterator[Metric]:
        """The metrics of one instant."""
        runners = GaugeMetricFamily("nouscoder_verifier_runners", "Runner pods, by state", labels=["state"])
        states, replaced = self.states(), self.replacements()
        for state in RunnerState:
            runners.add_metric([state.value], states.get(state.value, 0))
        replacements = CounterMetricFamily(
            "nouscoder_verifier_runner_replacements", "Runner pods that another replaced, by reason", labels=["reason"]
        )
        for reason in Replaced:
            replacements.add_metric([reason.value], replaced.get(reason.value, 0))
        yield from (runners, replacements)


class VerifierMetrics:
    """Counts what was graded. One instance a registry."""

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
        self._load = (0, 0, 0)  # waiting, busy, slots: read when somebody looks, for it changes often
        queue = Gauge(f"{prefix}queue_depth", "Submissions waiting for a sandbox", registry=registry)
        queue.set_function(lambda: self._load[0])
        sandboxes = Gauge(f"{prefix}sandboxes", "Sandbox slots, by state", ["state"], registry=registry)
        sandboxes.labels("busy").set_function(lambda: self._load[1])
        sandboxes.labels("free").set_function(lambda: self._load[2] - self._load[1])
        self._cache_hits = Counter(f"{prefix}cache_hits", "Submissions answered from the cache", registry=registry)
        self._ours = Counter(
            f"{prefix}internal_errors", "Failures of ours while grading, by cause", ["cause"], registry=registry
        )
        self._lanes = Counter(
            f"{prefix}extra_lanes",
            "Sandboxes opened beside the first of a submission, on idle slots",
            registry=registry,
        )
        self._runners = _RunnerCollector()
        registry.register(self._runners)
        for cause in FailureCause:
            self._ours.labels(cause.value)
        self._submissions = {kind: submissions.labels(kind.value) for kind in VerdictKind}
        never = (VerdictKind.NO_CODE, VerdictKind.COMPILE_ERROR)
        self._tests = {kind: tests.labels(kind.value) for kind in VerdictKind if kind not in never}

    def watch_runners(
        self, states: Callable[[], Mapping[str, int]], replacements: Callable[[], Mapping[str, int]]
    ) -> None:
        """Where to read the numbers of runner pods."""
        self._runners.states, self._runners.replacements = states, replacements

    def graded(self, verdict: Verdict) -> None:
        """A submission got its verdict."""
        self._submissions[verdict.kind].inc()
        self._submission_s.observe(verdict.duration_s)
        if verdict.cached:
            self._cache_hits.inc()

    def tested(self, outcome: TestOutcome) -> None:
        """A test was run."""
        self._tests[outcome.outcome].inc()
        self._test_s.observe(outcome.wall_time_s)

    def worker_opened(self) -> None:
        """A submission got a sandbox beside its first."""
        self._lanes.inc()

    def failed(self, cause: FailureCause) -> None:
        """The infrastructure failed once."""
        self._ours.labels(cause.value).inc()

    def load(self, waiting: int, busy: int, slots: int) -> None:
        """How many submissions wait, and how many slots are busy."""
        self._load = (waiting, busy, slots)
