"""`nouscoder bench broker`: rollouts through a broker process over gRPC, compared with bare Redis and bare protobuf.

Broker, Redis and the imitated workers share the cores of this machine. A whole life of a rollout is: leased, sampled,
leased to a grader with its text, judged, leased in a batch, streamed to a learner, committed, deleted from Redis. Its
tokens and log-probabilities are random, so they do not compress. The large batch goes through while another process
beats for its leases every 100 ms.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from nouscoder.bench.broker_load import BrokerThroughput, Flow, IdleWorkers, Load, flow, idle_workers
from nouscoder.bench.broker_process import (
    GROUP_SIZE,
    MAX_TOKENS,
    RunningBroker,
    Samples,
    bare_protobuf_cpu_ms,
    bare_redis_ms,
    fill_batch,
    manifest,
    running_broker,
    train,
)
from nouscoder.bench.measuring import BenchError, Machine, p99, peak_resident_bytes
from nouscoder.rpc.broker_client import BrokerClient

_BEAT_EVERY_S = 0.1
_MOST_BEATEN = 256
# Tokens of a rollout, and how many rollouts go through; the batch is as large as the number.
_LENGTHS = ((64, 2048), (8192, 512), (MAX_TOKENS, 256))
# Workers that take rollouts through in bulk: the load, and rollouts of a batch.
_FLOWS = (
    (Load(2, at_once=64, reads_records=True), 1024),
    (Load(2, at_once=8, num_tokens=MAX_TOKENS, reads_records=True), 64),
)
_FLOW_BATCHES = 7
# Workers with few rollouts in a call, and what they take through; and workers that wait.
_LOADS = (Load(4), Load(128))
_LOAD_BATCH, _LOAD_BATCHES = 512, 5
_IDLE_WORKERS, _IDLE_S = 256, 20.0


@dataclass(frozen=True, slots=True)
class WholeLife:
    """Rollouts of one length, one worker of each kind, one after the other. The controls hold for a rollout too.

    `redis_control_ms` is the time of SET, GET, GET, DEL of the same bytes; `protobuf_control_cpu_ms` the CPU time to
    parse the message that brings a record and to write the one that streams it.
    """

    num_tokens: int
    num_rollouts: int
    record_bytes: int
    rollouts_per_second: float
    broker_cpu_ms: float
    redis_control_ms: float
    protobuf_control_cpu_ms: float


@dataclass(frozen=True, slots=True)
class LargeBatch:
    """One batch of 32k-token rollouts. Heartbeats are those sent while it was leased, streamed and committed.

    `filling_heartbeat_p99_s` is of the time in which its rollouts were sampled and graded.
    """

    num_rollouts: int
    batch_bytes: int
    filling_s: float
    training_s: float
    broker_cpu_ms_a_rollout: float
    num_heartbeats: int
    heartbeat_p50_s: float
    heartbeat_p99_s: float
    filling_heartbeat_p99_s: float
    leases_beaten: int
    leases_lost: int
    broker_peak_rss_bytes: int
    redis_bytes_before: int
    redis_bytes_full: int
    redis_bytes_after: int


@dataclass(frozen=True, slots=True)
class BrokerBench:
    """The figures of one run. `load_average` is that of the machine over the minute before the start."""

    num_cores: int
    load_average: float
    stolen_cpu_share: float
    whole_lives: tuple[WholeLife, ...]
    large_batch: LargeBatch
    flows: tuple[Flow, ...]
    throughputs: tuple[BrokerThroughput, ...]
    idle: IdleWorkers


async def bench_broker(batch: int = 512, scale: float = 1.0) -> BrokerBench:
    """Both parts, each with a broker and a Redis of its own. Raises BenchError."""
    if batch % GROUP_SIZE:
        raise BenchError(f"the batch must be a multiple of {GROUP_SIZE}, not {batch}")
    machine = Machine()
    lives = []
    for num_tokens, number in _LENGTHS:
        num_rollouts = _scaled(number, scale)
        async with running_broker(num_rollouts) as broker:
            lives.append(await whole_life(broker, num_tokens, num_rollouts))
    async with running_broker(batch) as broker:
        large = await large_batch(broker, batch)
    flows = []
    for load, size in _FLOWS:
        flow_batch = _scaled(size, scale)
        async with running_broker(flow_batch) as broker:
            flows.append(await flow(broker, load, flow_batch, _FLOW_BATCHES))
    load_batch = _scaled(_LOAD_BATCH, scale)
    throughputs = []
    for load in _LOADS:
        async with running_broker(load_batch) as broker:
            throughputs.append((await flow(broker, load, load_batch, _LOAD_BATCHES)).throughput)
    async with running_broker(load_batch) as broker:
        idle = await idle_workers(broker, _IDLE_WORKERS, max(1.0, _IDLE_S * scale))
    return BrokerBench(
        machine.num_cores,
        machine.load_average,
        machine.stolen_share,
        tuple(lives),
        large,
        tuple(flows),
        tuple(throughputs),
        idle,
    )


def _scaled(number: int, scale: float) -> int:
    """So many rollouts, in whole groups."""
    return max(32, round(number * scale) // GROUP_SIZE * GROUP_SIZE)


async def whole_life(broker: RunningBroker, num_tokens: int, num_rollouts: int) -> WholeLife:
    """Take a batch of rollouts through, twice; the first one warms up. Raises BenchError."""
    samples = Samples()
    async with _clients(broker.address) as (generation, verifier, learner):
        for version in range(2):
            await learner.publish_policy(manifest(version))
            begun_s, cpu_before_s = time.monotonic(), broker.cpu_s()
            await fill_batch(generation, verifier, samples, num_rollouts, num_tokens)
            num_bytes = await train(learner, num_rollouts, num_tokens)
            wall_s = time.monotonic() - begun_s
            await broker.wait_until_deleted()
            cpu_s = broker.cpu_s() - cpu_before_s
    record_bytes = num_bytes // num_rollouts
    return WholeLife(
        num_tokens,
        num_rollouts,
        record_bytes,
        rollouts_per_second=num_rollouts / wall_s,
        broker_cpu_ms=1000 * cpu_s / num_rollouts,
        redis_control_ms=bare_redis_ms(broker.redis, record_bytes, num_rollouts),
        protobuf_control_cpu_ms=bare_protobuf_cpu_ms(record_bytes, num_rollouts),
    )


async def large_batch(broker: RunningBroker, num_rollouts: int) -> LargeBatch:
    """Fill a batch, lease it, stream it, commit it, while another worker beats for its leases. Raises BenchError."""
    samples = Samples()
    async with _clients(broker.address) as (generation, verifier, learner):
        await learner.publish_policy(manifest(0))
        before = broker.redis_bytes()
        async with beating(broker.address, min(_MOST_BEATEN, num_rollouts)) as beats:
            cpu_before_s, begun_s = broker.cpu_s(), time.monotonic()
            await fill_batch(generation, verifier, samples, num_rollouts, MAX_TOKENS)
            full_s, full = time.monotonic(), broker.redis_bytes()
            num_bytes = await train(learner, num_rollouts, MAX_TOKENS)
            await broker.wait_until_deleted()
            done_s, cpu_s = time.monotonic(), broker.cpu_s() - cpu_before_s
    filling = sorted(spent_s for moment_s, spent_s in beats.beats if moment_s < full_s)
    training = sorted(spent_s for moment_s, spent_s in beats.beats if moment_s >= full_s)
    return LargeBatch(
        num_rollouts=num_rollouts,
        batch_bytes=num_bytes,
        filling_s=full_s - begun_s,
        training_s=done_s - full_s,
        broker_cpu_ms_a_rollout=1000 * cpu_s / num_rollouts,
        num_heartbeats=len(training),
        heartbeat_p50_s=statistics.median(training),
        heartbeat_p99_s=p99(training),
        filling_heartbeat_p99_s=p99(filling),
        leases_beaten=beats.num_leases,
        leases_lost=beats.num_lost,
        broker_peak_rss_bytes=peak_resident_bytes(broker.pid),
        redis_bytes_before=before,
        redis_bytes_full=full,
        redis_bytes_after=broker.redis_bytes(),
    )


@dataclass(slots=True)
class Beats:
    """What a beating process saw: filled when it has ended."""

    num_leases: int
    beats: list[tuple[float, float]]
    num_lost: int = 0


@asynccontextmanager
async def beating(address: str, num_leases: int) -> AsyncIterator[Beats]:
    """Another process (`main`) beats for leases meanwhile. Raises BenchError when it does not get them."""
    command = [sys.executable, "-m", "nouscoder.bench.broker", address, str(num_leases)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 26)
    assert process.stdout is not None
    try:
        got = int(await process.stdout.readline() or 0)
        if got != num_leases:
            raise BenchError(f"the broker gave {got} of {num_leases} leases")
        beats = Beats(num_leases, [])
        yield beats
        answer, _ = await process.communicate(b"")
        beats.beats, beats.num_lost = json.loads(answer)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def main(address: str, num_leases: int) -> None:
    """Print how many leases there are, beat for them until standard input ends, and print the beats and the losses.

    Moments are those of CLOCK_MONOTONIC, which all processes of a machine share.
    """
    async with BrokerClient(address, "generation-beats-0-1") as client:
        lease_ids = [item.lease.lease_id for item in (await client.lease_tasks(num_leases)).tasks]
        _say(str(len(lease_ids)))
        closed = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        beats: list[tuple[float, float]] = []
        lost: set[str] = set()
        while not closed.done():
            begun_s = time.monotonic()
            lost.update(await client.heartbeat(lease_ids))
            spent_s = time.monotonic() - begun_s
            beats.append((begun_s, spent_s))
            await asyncio.wait({closed}, timeout=max(0.0, _BEAT_EVERY_S - spent_s))
    _say(json.dumps([beats, len(lost)]))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@asynccontextmanager
async def _clients(address: str) -> AsyncIterator[tuple[BrokerClient, BrokerClient, BrokerClient]]:
    async with (
        BrokerClient(address, "generation-bench-0-1") as generation,
        BrokerClient(address, "verifier-bench-0-1") as verifier,
        BrokerClient(address, "learner-bench-0-1") as learner,
    ):
        yield generation, verifier, learner


def as_text(result: BrokerBench) -> str:
    """The figures as readable lines."""
    rows = [
        f"{result.num_cores} cores, load {result.load_average:.1f} at the start,"
        f" {result.stolen_cpu_share:.1%} of the CPU stolen; broker, Redis and workers on the same cores"
    ]
    rows += [
        f"{life.num_tokens} tokens: {life.rollouts_per_second:.0f} rollouts/s,"
        f" {life.broker_cpu_ms:.2f} ms of broker CPU a rollout; bare Redis {life.redis_control_ms:.2f} ms,"
        f" bare protobuf {life.protobuf_control_cpu_ms:.2f} ms of CPU, record {life.record_bytes} bytes"
        for life in result.whole_lives
    ]
    large = result.large_batch
    mib = 1 << 20
    rows += [
        f"batch of {large.num_rollouts} x {MAX_TOKENS} tokens, {large.batch_bytes / mib:.0f} MiB:"
        f" sampled and graded in {large.filling_s:.1f} s, trained in {large.training_s:.1f} s,"
        f" {large.broker_cpu_ms_a_rollout:.2f} ms of broker CPU a rollout",
        f"{large.num_heartbeats} heartbeats meanwhile: p50 {1e3 * large.heartbeat_p50_s:.1f} ms,"
        f" p99 {1e3 * large.heartbeat_p99_s:.1f} ms (p99 {1e3 * large.filling_heartbeat_p99_s:.1f} ms while it filled);"
        f" {large.leases_lost} of {large.leases_beaten} leases lost",
        f"broker RSS at most {large.broker_peak_rss_bytes / mib:.0f} MiB;"
        f" Redis {large.redis_bytes_before / mib:.1f} MiB"
        f" before, {large.redis_bytes_full / mib:.0f} full, {large.redis_bytes_after / mib:.1f} after",
    ]
    rows += [
        f"{bulk.throughput.load.num_tokens} tokens, {bulk.throughput.load.at_once} at once, all workers at the same"
        f" time: {bulk.throughput.rollouts_per_second:.0f} rollouts/s,"
        f" {bulk.throughput.rollouts_per_second * bulk.record_bytes / mib:.0f} MiB/s of records,"
        f" {bulk.share_of_redis:.0%} of bare Redis ({bulk.redis_control_ms:.2f} ms a record);"
        f" {bulk.throughput.cpu_ms_a_rollout:.2f} ms of CPU of broker and Redis a rollout"
        for bulk in result.flows
    ]
    rows += [
        f"{each.load.num_workers} + {each.load.num_workers} workers: {each.rollouts_per_second:.0f} rollouts/s,"
        f" {each.cpu_ms_a_rollout:.2f} ms of CPU of broker and Redis and {each.redis_commands_a_rollout:.0f} Redis"
        " commands a rollout"
        for each in result.throughputs
    ]
    idle = result.idle
    rows.append(
        f"{idle.num_workers} idle workers: {idle.broker_cpu_share:.1%} of a core for the broker,"
        f" {idle.redis_cpu_share:.1%} for Redis"
    )
    return "\n".join(rows)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
