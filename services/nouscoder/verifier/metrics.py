"""The verifier's Prometheus metrics (names are an interface: design.md section 8)."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from nouscoder.verdict import TestOutcome, Verdict, VerdictKind

_TEST_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60)
_SUBMISSION_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)


class VerifierMetrics:
    """Counts what was graded. One instance a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "nouscoder_verifier_"
        self._submissions = Counter(
            f"{prefix}submissions", "Submissions that got a verdict", ["verdict"], registry=registry
        )
        self._tests = Counter(f"{prefix}tests", "Tests run, by outcome", ["outcome"], registry=registry)
        self._submission_s = Histogram(
            f"{prefix}submission_duration_seconds",
            "Seconds from acceptance to verdict",
            buckets=_SUBMISSION_BUCKETS,
            registry=registry,
        )
        self._test_s = Histogram(
            f"{prefix}test_duration_seconds", "Wall seconds of one test", buckets=_TEST_BUCKETS, registry=registry
        )
        self._queue = Gauge(f"{prefix}queue_depth", "Submissions waiting for a sandbox", registry=registry)
        self._sandboxes = Gauge(f"{prefix}sandboxes", "Sandbox slots, by state", ["state"], registry=registry)
        self._cache_hits = Counter(f"{prefix}cache_hits", "Submissions answered from the cache", registry=registry)
        self._ours = Counter(
            f"{prefix}internal_errors", "Failures of ours while grading, by cause", ["cause"], registry=registry
        )
        self._lanes = Counter(
            f"{prefix}extra_lanes",
            "Sandboxes opened beside the first of a submission, on idle slots",
            registry=registry,
        )
        for kind in VerdictKind:
            self._submissions.labels(kind.value)
            if kind not in (VerdictKind.NO_CODE, VerdictKind.COMPILE_ERROR):
                self._tests.labels(kind.value)

    def graded(self, verdict: Verdict) -> None:
        """A submission got its verdict."""
        self._submissions.labels(verdict.kind.value).inc()
        self._submission_s.observe(verdict.duration_s)
        if verdict.cached:
            self._cache_hits.inc()

    def tested(self, outcome: TestOutcome) -> None:
        """A test was run."""
        self._tests.labels(outcome.outcome.value).inc()
        self._test_s.observe(outcome.wall_time_s)

    def lane_opened(self) -> None:
        """A submission got a sandbox beside its first."""
        self._lanes.inc()

    def failed(self, cause: str) -> None:
        """The infrastructure failed once; `cause` is a FailureCause value."""
        self._ours.labels(cause).inc()

    def load(self, waiting: int, busy: int, slots: int) -> None:
        """How many submissions wait, and how many slots are busy."""
        self._queue.set(waiting)
        self._sandboxes.labels("busy").set(busy)
        self._sandboxes.labels("free").set(slots - busy)
