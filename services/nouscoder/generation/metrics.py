"""Prometheus metrics of the generation service."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# Weights of 14B parameters are 28 GB: tenths of a second over NVLink, minutes from a disk or through a slow network.
_WEIGHTS_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)


class IdleReason(StrEnum):
    """The reasons for not decoding."""

    NO_TASKS = "no_tasks"
    NO_POLICY = "no_policy"
    PAUSED = "paused"


class FetchResult(StrEnum):
    """The results of fetching a policy from the learner."""

    FETCHED = "fetched"
    CHANGES = "changes"  # only what changed since the policy before was fetched
    FROM_MEMORY = "from_memory"  # the engine received it from the learner's memory
    NOT_FROM_MEMORY = "not_from_memory"  # that failed, and the files were taken
    GONE = "gone"
    FAILED = "failed"


class PartialTokens(StrEnum):
    """What became of tokens of unfinished rollouts."""

    SAVED = "saved"  # the broker keeps them
    CONTINUED = "continued"  # kept since an earlier delivery, and not sampled again
    DROPPED = "dropped"  # kept, but a tool or the prompt was different this time


class ApiRoute(StrEnum):
    """The routes of the API in OpenAI's form."""

    CHAT = "/v1/chat/completions"
    TEXT = "/v1/completions"
    MODELS = "/v1/models"
    SESSIONS = "/v1/sessions"
    OTHER = "other"


class ApiTokens(StrEnum):
    """The tokens of a request to that API."""

    PROMPT = "prompt"
    COMPLETION = "completion"


def _counter(name: str, text: str, label: str, values: Iterable[StrEnum], registry: CollectorRegistry) -> Counter:
    """A counter that is 0 from the start for each value of its label."""
    counter = Counter(f"nouscoder_generation_{name}_total", text, [label], registry=registry)
    for value in values:
        counter.labels(value.value)
    return counter


class ApiMetrics:
    """The metrics of the API in OpenAI's form. Thread-safe."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "nouscoder_generation_api_requests_total",
            "Requests to the API in OpenAI's form, by route and status code.",
            ["route", "status"],
            registry=registry,
        )
        self.request_seconds = Histogram(
            "nouscoder_generation_api_request_seconds",
            "Seconds from the head of such a request to the last byte of its answer, by route.",
            ["route"],
            registry=registry,
            buckets=(0.01, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3600),
        )
        for route in ApiRoute:
            self.requests.labels(route.value, "200")
            self.request_seconds.labels(route.value)
        what = "Tokens of the prompts of such requests, and of the completions that ended."
        self.tokens = _counter("api_tokens", what, "kind", ApiTokens, registry)

    def count_request(self, route: str, status: str, seconds: float) -> None:
        """Count a request that has ended."""
        self.requests.labels(route, status).inc()
        self.request_seconds.labels(route).observe(seconds)

    def count_tokens(self, kind: str, number: int) -> None:
        """Count tokens of a kind of ApiTokens."""
        self.tokens.labels(kind).inc(number)


class GenerationMetrics:
    """The metrics and their registry. Thread-safe."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.tokens = Counter("nouscoder_generation_tokens_total", "Tokens sampled since the start.", registry=registry)
        self.running_rollouts = Gauge(
            "nouscoder_generation_running_rollouts", "Rollouts being decoded.", registry=registry
        )
        self.policy_version = Gauge(
            "nouscoder_generation_policy_version", "Policy version in use; -1 before the first.", registry=registry
        )
        self.policy_version.set(-1)
        self.policy_update_seconds = Histogram(
            "nouscoder_generation_policy_update_seconds",
            "Seconds decoding stood still for new weights.",
            buckets=_WEIGHTS_BUCKETS,
            registry=registry,
        )
        what = "Seconds in which no token was decoded, by reason."
        self.idle_seconds = _counter("idle_seconds", what, "reason", IdleReason, registry)
        self.policy_fetch_seconds = Histogram(
            "nouscoder_generation_policy_fetch_seconds",
            "Seconds to fetch a policy from the learner, waiting for it included.",
            buckets=_WEIGHTS_BUCKETS,
            registry=registry,
        )
        what = "Policies asked of the learner, by how it ended."
        self.policy_fetches = _counter("policy_fetches", what, "result", FetchResult, registry)
        what = "Sampled tokens of unfinished rollouts, by what became of them."
        self.partial_tokens = _counter("partial_tokens", what, "fate", PartialTokens, registry)
        self.api = ApiMetrics(registry)
