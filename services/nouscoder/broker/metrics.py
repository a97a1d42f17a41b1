"""The broker's metrics for Prometheus, made from one status of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nouscoder.domain.lease import LeaseLoss
from nouscoder.domain.run_status import RunStatus


class BrokerCollector(Collector):
    """Exports `latest`, or nothing while it is None: a broker that cannot reach Redis exports no old numbers."""

    def __init__(self) -> None:
        self.latest: RunStatus | None = None
        self.oldest_s: Mapping[str, float] = {}
        self.redis_memory_ratio = 0.0  # of maxmemory; 0 without maxmemory

    def collect(self) -> Iterator[Metric]:
        """The metrics of one instant."""
        if (status := self.latest) is None:
            return
        ledger = status.ledger
        final = {state: getattr(ledger, state) for state in ("trained", "filtered", "stale", "abandoned", "lost")}
        yield _gauge("nouscoder_broker_ledger_rollouts", "Rollouts by state", state={**ledger.in_flight, **final})
        yield _gauge(
            "nouscoder_broker_ledger_balanced",
            "1 while admitted = trained + filtered + stale + abandoned + lost + in flight",
            ledger.balanced,
        )
        yield _counter(
            "nouscoder_broker_admitted_rollouts",
            "Rollouts admitted: the sum of the states of nouscoder_broker_ledger_rollouts",
            ledger.admitted,
        )
        yield from _of_streams(status)
        yield _gauge(
            "nouscoder_broker_oldest_age_seconds",
            "Age of the oldest unfinished entry, 0 without one",
            stream={stream: self.oldest_s.get(stream, 0.0) for stream in ("tasks", "grading")},
        )
        yield _gauge(
            "nouscoder_broker_admission_slots_free", "Rollouts that may be admitted now", status.admission_slots_free
        )
        yield _gauge(
            "nouscoder_broker_policy_version",
            "Newest policy version, -1 before the first",
            -1 if status.policy_version is None else status.policy_version,
        )
        yield _counter("nouscoder_broker_steps", "Optimizer steps of the run's committed batches", status.step)
        yield _gauge(
            "nouscoder_broker_redis_memory_used_ratio",
            "Share of Redis' maxmemory in use, 0 without maxmemory",
            self.redis_memory_ratio,
        )
        yield _counter("nouscoder_broker_rollouts_graded", "Rollouts that got a verdict", status.rollouts_graded)
        yield _counter("nouscoder_broker_rollouts_accepted", "Rollouts accepted", status.rollouts_accepted)
        yield _gauge("nouscoder_broker_run_finished", "1 once the run is finished", status.finished)
        yield from _of_problems(status)


def _of_streams(status: RunStatus) -> Iterator[Metric]:
    streams = status.streams
    yield _gauge("nouscoder_broker_stream_lag", "Entries nobody holds", stream={s.stream: s.lag for s in streams})
    yield _gauge(
        "nouscoder_broker_pending_leases", "Entries under lease", stream={s.stream: s.pending for s in streams}
    )
    yield _counter(
        "nouscoder_broker_dead_letters",
        "Entries given up after too many deliveries",
        stream={s.stream: s.dead_letters for s in streams},
    )
    yield _counter(
        "nouscoder_broker_redeliveries",
        "Entries given again after a lease or grading failed",
        stream={s.stream: s.redeliveries for s in streams},
    )


def _of_problems(status: RunStatus) -> Iterator[Metric]:
    again = (LeaseLoss.EXPIRED, LeaseLoss.PROGRESS, LeaseLoss.RESTORED)
    yield _counter(
        "nouscoder_broker_cancelled_rollouts",
        "Rollouts that ended without a verdict because their group or the run had ended",
        reason={reason.value: status.cancelled.get(reason.value, 0) for reason in LeaseLoss if reason not in again},
    )
    refused = status.refused_problems
    yield _gauge(
        "nouscoder_broker_problems",
        "Problems: asked, refused by generation, left out because their prompts are too long",
        state={"asked": status.num_problems - refused, "refused": refused, "left_out": status.left_out_problems},
    )


def _gauge(name: str, text: str, value: float | None = None, **by_label: Mapping[str, float]) -> Metric:
    return _filled(GaugeMetricFamily(name, text, value, labels=[*by_label] or None), by_label)


def _counter(name: str, text: str, value: float | None = None, **by_label: Mapping[str, float]) -> Metric:
    return _filled(CounterMetricFamily(name, text, value, labels=[*by_label] or None), by_label)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, by_label: Mapping[str, Mapping[str, float]]) -> Metric:
    for values in by_label.values():
        for label, value in values.items():
            family.add_metric([label], value)
    return family
