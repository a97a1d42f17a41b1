"""The broker's Prometheus metrics, from the last status read."""

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
        status = self.latest
        if status is None:
            return
        yield _ledger(status)
        yield GaugeMetricFamily(
            "nouscoder_broker_ledger_balanced",
            "1 while admitted = trained + filtered + stale + abandoned + lost + in flight",
            value=float(status.ledger.balanced),
        )
        yield CounterMetricFamily(
            "nouscoder_broker_admitted_rollouts",
            "Rollouts admitted: the sum of the states of nouscoder_broker_ledger_rollouts",
            value=float(status.ledger.admitted),
        )
        yield from _streams(status)
        yield _oldest(self.oldest_s)
        yield GaugeMetricFamily(
            "nouscoder_broker_admission_slots_free",
            "Rollouts that may be admitted now",
            value=float(status.admission_slots_free),
        )
        yield GaugeMetricFamily(
            "nouscoder_broker_policy_version",
            "Newest policy version, -1 before the first",
            value=float(-1 if status.policy_version is None else status.policy_version),
        )
        yield CounterMetricFamily(
            "nouscoder_broker_steps", "Optimizer steps of the run's committed batches", value=float(status.step)
        )
        yield GaugeMetricFamily(
            "nouscoder_broker_redis_memory_used_ratio",
            "Share of Redis' maxmemory in use, 0 without maxmemory",
            value=self.redis_memory_ratio,
        )
        yield from _grading(status)
        yield _cancelled(status)


def _ledger(status: RunStatus) -> Metric:
    ledger = status.ledger
    family = GaugeMetricFamily(
        "nouscoder_broker_ledger_rollouts",
        "Rollouts by state",
        labels=["state"],
    )
    counts = {
        **ledger.in_flight,
        "trained": ledger.trained,
        "filtered": ledger.filtered,
        "stale": ledger.stale,
        "abandoned": ledger.abandoned,
        "lost": ledger.lost,
    }
    for state, number in counts.items():
        family.add_metric([state], number)
    return family


def _grading(status: RunStatus) -> Iterator[Metric]:
    graded, accepted = status.rollouts_graded, status.rollouts_accepted
    yield CounterMetricFamily("nouscoder_broker_rollouts_graded", "Rollouts that got a verdict", value=float(graded))
    yield CounterMetricFamily("nouscoder_broker_rollouts_accepted", "Rollouts accepted", value=float(accepted))
    yield GaugeMetricFamily("nouscoder_broker_run_finished", "1 once the run is finished", value=float(status.finished))


def _cancelled(status: RunStatus) -> Metric:
    family = CounterMetricFamily(
        "nouscoder_broker_cancelled_rollouts",
        "Rollouts that ended without a verdict because their group or the run had ended",
        labels=["reason"],
    )
    for reason in (LeaseLoss.STALE, LeaseLoss.TOO_SMALL, LeaseLoss.PROBLEM_GONE, LeaseLoss.FINISHED):
        family.add_metric([reason.value], status.cancelled.get(reason.value, 0))
    return family


def _oldest(oldest_s: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(
        "nouscoder_broker_oldest_age_seconds", "Age of the oldest unfinished entry, 0 without one", labels=["stream"]
    )
    for stream in ("tasks", "grading"):
        family.add_metric([stream], oldest_s.get(stream, 0.0))
    return family


def _streams(status: RunStatus) -> Iterator[Metric]:
    lag = GaugeMetricFamily("nouscoder_broker_stream_lag", "Entries nobody holds", labels=["stream"])
    pending = GaugeMetricFamily("nouscoder_broker_pending_leases", "Entries under lease", labels=["stream"])
    dead = CounterMetricFamily(
        "nouscoder_broker_dead_letters", "Entries given up after too many deliveries", labels=["stream"]
    )
    again = CounterMetricFamily(
        "nouscoder_broker_redeliveries", "Entries given again after a lease or grading failed", labels=["stream"]
    )
    for stream in status.streams:
        lag.add_metric([stream.stream], stream.lag)
        pending.add_metric([stream.stream], stream.pending)
        dead.add_metric([stream.stream], stream.dead_letters)
        again.add_metric([stream.stream], stream.redeliveries)
    yield from (lag, pending, dead, again)
