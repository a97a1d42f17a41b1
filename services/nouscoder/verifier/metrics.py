"""The verifier's Prometheus metrics (names are an interface: design.md section 8)."""

from __future__ import annotations

from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from nouscoder.verdict import TestOutcome, Verdict, VerdictKind

_TEST_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60)
_SUBMISSION_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)


class FailureCause(StrEnum):
    """Why the infrastructure failed: the label of `verifier_internal_errors_total`."""

    SANDBOX = "sandbox"  # the backend said so
    SANDBOX_SILENT = "sandbox_silent"  # the backend did not answer in time
    GRADER = "grader"  # a fault in the gateway itself
    JUDGE = "judge"  # a checker or an interactor failed, or a gold answer cannot be read


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
        for cause in FailureCause:
            self._ours.labels(cause.value)
        self._submissions = {kind: submissions.labels(kind.value) for kind in VerdictKind}
        never = (VerdictKind.NO_CODE, VerdictKind.COMPILE_ERROR)
        self._tests = {kind: tests.labels(kind.value) for kind in VerdictKind if kind not in never}

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

    def lane_opened(self) -> None:
        """A submission got a sandbox beside its first."""
        self._lanes.inc()

    def failed(self, cause: FailureCause) -> None:
        """The infrastructure failed once."""
        self._ours.labels(cause.value).inc()

    def load(self, waiting: int, busy: int, slots: int) -> None:
        """How many submissions wait, and how many slots are busy."""
        self._load = (waiting, busy, slots)
