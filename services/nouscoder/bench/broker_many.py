"""`nouscoder bench broker --many N`: workers work all the time.

At each point the last rollouts before it are measured, and what broker and Redis hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from nouscoder.bench.broker_load import BrokerThroughput, Load, at_work
from nouscoder.bench.broker_process import RunningBroker, running_broker
from nouscoder.bench.measuring import BenchError, usage_of

_LOAD = Load(num_workers=2, at_once=64, reads_records=True)
_BATCH = 512
# Batches of which a point is the mean.
_MEASURED = 16
_NUM_PROBLEMS = 24_000
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Point:
    """The last rollouts before `num_rollouts` were trained on, and the memory at that moment."""

    num_rollouts: int
    throughput: BrokerThroughput
    broker_bytes: int
    redis_bytes: int
    problems_with_statistics: int
    statistics_bytes: int


@dataclass(frozen=True, slots=True)
class ManyRollouts:
    """The points of one run: soon after its start, after a third, and at the end."""

    num_problems: int
    points: tuple[Point, ...]


async def bench_many(num_rollouts: int, num_problems: int = _NUM_PROBLEMS, batch: int = _BATCH) -> ManyRollouts:
    """Train on `num_rollouts` rollouts. Raises BenchError."""
    total = num_rollouts // batch
    measured = min(_MEASURED, total // 8)
    if not measured:
        raise BenchError(f"--many must be at least {8 * batch}, not {num_rollouts}")
    # A quarter of the measured batches warms up before the first point.
    ends = (measured + measured // 4, total // 3, total)
    points, done = [], 0
    async with running_broker(batch, num_problems=num_problems) as broker, at_work(broker, _LOAD) as loop:
        for end in ends:
            if end - measured > done:
                await loop.train(batch, end - measured - done)
            throughput, done = await loop.train(batch, measured), end
            points.append(_point(broker, done * batch, throughput))
    return ManyRollouts(num_problems, tuple(points))


def _point(broker: RunningBroker, num_rollouts: int, throughput: BrokerThroughput) -> Point:
    num_known, statistics_bytes = broker.problem_statistics()
    return Point(
        num_rollouts=num_rollouts,
        throughput=throughput,
        broker_bytes=usage_of(broker.pid).memory_bytes,
        redis_bytes=broker.redis_bytes(),
        problems_with_statistics=num_known,
        statistics_bytes=statistics_bytes,
    )


def as_text(result: ManyRollouts) -> str:
    """The figures as readable lines."""
    rows = [f"{result.num_problems} problems; broker, Redis and workers on the same cores"]
    first = result.points[0].throughput.rollouts_per_second
    rows += [
        f"after {point.num_rollouts} rollouts: {point.throughput.rollouts_per_second:.0f} rollouts/s"
        f" ({point.throughput.rollouts_per_second / first - 1:+.1%}), {point.throughput.cpu_ms_a_rollout:.2f} ms of"
        f" CPU of broker and Redis a rollout; broker {point.broker_bytes / _MIB:.0f} MiB,"
        f" Redis {point.redis_bytes / _MIB:.1f} MiB, statistics of"
        f" {point.problems_with_statistics} problems {point.statistics_bytes / _MIB:.2f} MiB"
        for point in result.points
    ]
    return "\n".join(rows)
